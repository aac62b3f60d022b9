"""The order of `rollout.order = "finished"`: a step takes prompts whose trajectories are complete, not those drawn for it."""

from __future__ import annotations

import time
from typing import Any

from shardproof.dist.collectives import together
from shardproof.rl.buffer import Buffer, Taken
from shardproof.rl.rounds import BackgroundRound
from shardproof.rollout.trajectory import reward_of

_LOOK_S = 0.02  # how often ranks that wait for trajectories tell each other what is complete

Place = tuple[int, int]  # of a prompt: its round's number in the buffer, and its group


class FinishedBuffer(Buffer):
    """Begun prompts, of which a step takes the first that are complete, those that were drawn first before others.

    A prompt may be trained on in the `ahead` steps after the one before which it was begun. With `drops`, prompts whose
    trajectories are not complete by then are given up, and others are drawn, also in the last steps. Otherwise half of a
    step's prompts less are begun ahead, and a step waits for old prompts as far as is needed for all to be trained on in
    time.
    """

    order = "finished"

    def __init__(self, *given: Any, drops: bool = False, **settings: Any):
        super().__init__(*given, **settings)
        self._drops = drops
        self._num_taken = 0  # prompts, in the step

    def begin(self, step: int) -> None:
        self._begin_step(step)
        self._num_taken = 0
        self._give_up(step)
        most = self.num_prompts * (self.ahead + 1)
        if self.ahead and not self._drops:
            most -= self.num_prompts // 2
            most = min(most, (self.num_steps - step) * self.num_prompts)
        num = 0
        for each in self.rounds:
            if not each.is_begun and num < most:
                each.begin(step, self.ahead)
            num += len(each.drawn)
        if num < most:
            self._draw(step + self.ahead, most - num).begin(step, self.ahead)

    def take(self, step: int, count: int) -> Taken:
        """`count` prompts of those that are complete. Collective: every rank."""
        num = sum(len(each.drawn) for each in self._begun)
        if num < count:
            self._draw(step, count - num).begin(step, self.ahead)
        started = time.perf_counter()
        while (chosen := self._choose(step, count, self._complete())) is None:
            time.sleep(_LOOK_S)
        self.waited_s += time.perf_counter() - started
        made, begun = [], self._begun
        for number, each in enumerate(begun):
            groups = [group for round_number, group in chosen if round_number == number]
            if not groups:
                continue
            labels = {group: self._num_taken + k for k, group in enumerate(groups)}
            self._num_taken += len(groups)
            made += [self._handed(each, one, labels[one.group]) for one in each.trajectories(groups)]
            if not each.drawn:
                self._leave(each)
        labels_of_all = list(range(self._num_taken - len(chosen), self._num_taken))
        return Taken(labels_of_all, made, lambda: [reward_of(each) for each in made])

    def end_step(self, step: int) -> None:
        self._give_up(step + 1)

    @property
    def _begun(self) -> list[BackgroundRound]:
        return [each for each in self.rounds if isinstance(each, BackgroundRound) and each.is_begun]

    def _complete(self) -> set[Place]:
        """The prompts whose trajectories are complete. Collective: every rank."""
        with together("rollout") as message:
            message.mine = [
                [number, group]
                for number, each in enumerate(self._begun)
                for group in (each.complete_groups() if self.means.leads else ())
            ]
        return {(number, group) for row in message.rows for number, group in row}

    def _choose(self, step: int, count: int, complete: set[Place]) -> list[Place] | None:
        """The prompts that the step takes, those that may not get older first; None if it has to wait."""
        begun = self._begun
        last = [self._last_step(each) for each in begun]
        open_places = [(number, one.group) for number, each in enumerate(begun) for one in each.drawn]
        # This is the order in which they were drawn, but after a resume: what could not be kept has begun again, later
        # than prompts that were drawn after it. Without this a step could wait for ever for what it does not choose.
        open_places.sort(key=lambda place: last[place[0]])
        chosen = [place for place in open_places if place in complete][:count]
        if len(chosen) < count:
            return None
        if self._drops:
            return chosen
        for limit in sorted(set(last)):
            # What must be taken by then, less what the steps after this one can take.
            old = [place for place in open_places if last[place[0]] <= limit]
            needed = min(len(old) - (limit - step) * self.num_prompts, count)
            if len(set(chosen) & set(old)) < needed:
                return None
        return chosen

    def _last_step(self, each: BackgroundRound) -> int:
        """The last step that may train on what a round has drawn."""
        assert each.begun_at is not None
        return each.begun_at + self.ahead

    def _give_up(self, step: int) -> None:
        """Give up what this step and later ones may not take."""
        for each in self._begun:
            if self._last_step(each) < step:
                groups = [one.group for one in each.drawn]
                self.num_dropped += len(groups)
                each.give_up(groups)
                self._leave(each)
