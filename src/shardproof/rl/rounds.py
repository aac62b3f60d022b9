"""Rounds: the prompts that are drawn together for a step, and their trajectories until the step takes them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardproof.dist.collectives import exchange_among, together
from shardproof.dist.deadline import await_all
from shardproof.rl.background import BackgroundBatch, BackgroundRollouts
from shardproof.rl.conversations.measures import all_rewards, reward_sample
from shardproof.rl.conversations.steps import Start, starts_of
from shardproof.rl.data import Prompt, Share
from shardproof.rl.known import Known
from shardproof.rl.rewards.runner import PendingRewards
from shardproof.rl.rollouts import Sampler
from shardproof.rl.versions import lag_of
from shardproof.rollout.engine import Sampling
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Reward, Trajectory, reward_of

Key = tuple[int, int]  # of a trajectory in its round: group and sample


@dataclass(frozen=True)
class Means:
    """What rounds are sampled with on this rank."""

    sampler: Sampler
    sampling: Sampling
    prompts: Sequence[Prompt]
    group_size: int
    share: Share  # of the prompts, that this rank takes
    background: BackgroundRollouts | None = None  # None: the engine computes in this process
    greedy: bool = False  # each prompt has a greedy trajectory too, behind those of its group

    @property
    def num_per_prompt(self) -> int:
        """Trajectories of each prompt."""
        return self.group_size + self.greedy

    def is_greedy(self, trajectory: Trajectory) -> bool:
        """Whether it is the one that its prompt's others are compared with."""
        return trajectory.sample == self.group_size

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that share sequences."""
        return self.share.rank % self.share.sequence_parallel == 0


@dataclass(frozen=True)
class Drawn:
    """A prompt that was drawn: its number among those of its step, its row of the data, and its place in the stream."""

    group: int
    row: int
    position: int


class Round(ABC):
    """Prompts that are drawn together for a step, and this rank's trajectories of them.

    The draws of the prompts and of the tokens depend on the seed, the step and the place in the round alone.
    """

    def __init__(
        self, means: Means, step: int, drawn: Sequence[Drawn], known: Mapping[Key, Known] | None = None
    ):
        self.means, self.step = means, step
        self.drawn = list(drawn)  # by all ranks
        self.known = dict(known or {})  # from a checkpoint, of all ranks
        self.ledger = TokenLedger()
        self.begun_at: int | None = None  # the step before which its oldest tokens may have been drawn
        self.starts: list[Start] = []  # of this rank

    @property
    def is_begun(self) -> bool:
        return self.begun_at is not None

    def begin(self, step: int, max_lag: int) -> None:
        """Have the round's trajectories made before this step, but for those of a checkpoint whose lag is not larger.

        Collective: every rank.
        """
        versions = self.means.sampler.versions
        lags = {key: lag_of(known.sampled, versions) for key, known in self.known.items()}
        kept = {key: lag for key, lag in lags.items() if lag is not None and lag <= max_lag}
        self.known = {key: known for key, known in self.known.items() if key in kept}
        self.begun_at = step - max(kept.values(), default=0)
        asked = [(each.group, self.means.prompts[each.row]) for each in self.means.share.of(self.drawn)]
        self.starts = starts_of(
            self.means.sampler.seed, asked, self.means.group_size, self.step, self.means.greedy
        )
        for start in self.starts:
            if (known := self.known.get((start.group, start.sample))) is not None and known.turns:
                self.ledger.put(start.group, start.sample, known.turns)
        self._begin()
        self.known = {}  # what is this rank's was taken over

    def complete(self, start: Start) -> Trajectory | None:
        """The checkpoint's trajectory of this beginning, if it was complete."""
        known = self.known.get((start.group, start.sample))
        return None if known is None else known.trajectory

    def saved(self) -> dict[Key, Known]:
        """What a checkpoint has to keep of this rank's trajectories; waits for rewards of those that are drawn."""
        if self.is_begun:
            return self._saved()
        mine = {each.group for each in self.means.share.of(self.drawn)}
        return {key: known for key, known in self.known.items() if key[0] in mine}

    @property
    @abstractmethod
    def num_complete(self) -> int:
        """How many of this rank's trajectories are there and not taken."""

    @property
    def num_in_progress(self) -> int:
        """How many of this rank's trajectories are being made."""
        return 0

    @abstractmethod
    def trajectories(self) -> list[Trajectory]:
        """This rank's, in order, as soon as they are there. Collective: every rank."""

    @abstractmethod
    def rewards(self) -> list[Reward]:
        """Of the trajectories, as soon as they are there, without an algorithm's penalties."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is not there yet."""

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _saved(self) -> dict[Key, Known]: ...


class SampledRound(Round):
    """A round of an engine that computes in this process: sampled as it is begun, while rewards may come later."""

    _pending: PendingRewards | None = None
    _made: list[Trajectory]
    _rewards: list[Reward] | None = None  # once they are known

    def _begin(self) -> None:
        sampler, starts = self.means.sampler, self.starts
        self._pending = sampler.pending()
        found = {k: made for k, start in enumerate(starts) if (made := self.complete(start)) is not None}
        unscored = {k: made for k, made in found.items() if made.reward is None and made.ended != "failed"}
        if self.means.leads:
            samples = [reward_sample(made, starts[k].prompt.row) for k, made in unscored.items()]
            self._pending.add(samples, list(unscored))
        if self._is_incomplete:
            places = [k for k in range(len(starts)) if k not in found]
            missing = [starts[k] for k in places]
            fresh = sampler.sample(missing, self.means.sampling, self._pending, self.ledger, places)
            found |= dict(zip(places, fresh, strict=True))
        self._made = [found[k] for k in range(len(starts))]

    @property
    def _is_incomplete(self) -> bool:
        """Whether any rank has something to sample. The same on every rank."""
        num_complete = sum(known.trajectory is not None for known in self.known.values())
        return num_complete < len(self.drawn) * self.means.num_per_prompt

    @property
    def num_complete(self) -> int:
        return len(self._made) if self.is_begun else 0

    def trajectories(self) -> list[Trajectory]:
        return self._made

    def rewards(self) -> list[Reward]:
        """Of ranks that share sequences the first one has them, and hands them to the others: `rewards_together`."""
        if self._rewards is None and not self.means.leads:
            self._rewards = []
        if self._rewards is None:
            assert self._pending is not None, "the round is begun"
            masks = self.means.sampler.masks_truncated
            self._rewards = all_rewards(self._made, self._pending.result(), masks)
        return self._rewards

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()

    def _saved(self) -> dict[Key, Known]:
        rewards: list[Reward | None] = [None] * len(self._made)
        with contextlib.suppress(Exception):  # which the step that takes the round raises, on every rank
            rewards = [*self.rewards()]
        return {
            (made.group, made.sample): Known(
                replace(made, reward=reward), self.ledger.turns(made.group, made.sample)
            )
            for made, reward in zip(self._made, rewards, strict=True)
        }


class BackgroundRound(Round):
    """A round of an engine that answers in the background, from its prompts to its rewards.

    Of ranks that share sequences the first one has it made, and hands what is taken to the others.
    """

    _batch: BackgroundBatch | None = None
    _places: list[int]  # in `starts`, of the batch's
    _found: dict[int, Trajectory]  # by their place in `starts`; complete, and not taken
    _taken: list[Trajectory]

    def _begin(self) -> None:
        self._found, self._places, missing = {}, [], []
        for place, start in enumerate(self.starts):
            known = self.known.get((start.group, start.sample), Known())
            if known.trajectory is not None and known.trajectory.reward is not None:
                self._found[place] = known.trajectory
            else:
                self._places.append(place)
                missing.append(replace(start, begun=known.drawn))
                self.ledger.put(start.group, start.sample, ())  # what was drawn is recorded as it is taken up
        background = self.means.background
        assert background is not None, "the engine answers in the background"
        with together("rollout"):  # a thread may not be had on one rank
            if self.means.leads:
                self._batch = background.begin(missing, self.means.sampling, self.ledger)

    @property
    def num_complete(self) -> int:
        return len(self._found) + (0 if self._batch is None else len(self._batch.done()))

    @property
    def num_in_progress(self) -> int:
        return 0 if self._batch is None else self._batch.num_in_progress

    def complete_groups(self) -> list[int]:
        """This rank's groups of which every trajectory is complete, and which were not taken."""
        self._look()
        num: dict[int, int] = {}
        for place in self._found:
            group = self.starts[place].group
            num[group] = num.get(group, 0) + 1
        return [group for group, complete in num.items() if complete == self.means.num_per_prompt]

    def trajectories(self, groups: Collection[int] | None = None) -> list[Trajectory]:
        """This rank's, in order, as soon as they are there: of these groups, all if None. Each can be taken once.

        Collective: every rank.
        """
        wanted = [k for k, start in enumerate(self.starts) if groups is None or start.group in groups]
        with self.means.sampler.lending():
            settle(self._batch, self._numbers(wanted))
        with together("rollout"):
            self._taken = self._take(wanted) if self.means.leads else []
        if self.means.share.sequence_parallel > 1:
            self._taken = self._shared(self._taken)
        self.drawn = [each for each in self.drawn if groups is not None and each.group not in groups]
        return self._taken

    def rewards(self) -> list[Reward]:
        return [reward_of(made) for made in self._taken]

    def give_up(self, groups: Collection[int]) -> None:
        """Give these groups of all ranks up."""
        places = {k for k, start in enumerate(self.starts) if start.group in groups}
        self._found = {k: made for k, made in self._found.items() if k not in places}
        self.drawn = [each for each in self.drawn if each.group not in groups]
        if self._batch is not None:
            self._batch.cancel([n for n, place in enumerate(self._places) if place in places])

    def close(self) -> None:
        if self._batch is not None:
            self._batch.cancel()

    def _saved(self) -> dict[Key, Known]:
        saved: dict[Key, Known] = {}
        open_groups = {each.group for each in self.drawn}
        for number, place in enumerate(self._places):
            start = self.starts[place]
            if self._batch is not None and start.group in open_groups:
                saved[start.group, start.sample] = Known(begun=self._batch.so_far(number))
        with contextlib.suppress(Exception):  # which the step that takes the round raises, on every rank
            self._look()
        for made in self._found.values():
            turns = self.ledger.turns(made.group, made.sample)
            saved[made.group, made.sample] = Known(made, turns)
        return saved

    def _look(self) -> None:
        """Fetch what is complete."""
        if self._batch is not None and (done := self._batch.done()):
            self._found |= {self._places[number]: made for number, made in self._batch.wait(done).items()}

    def _take(self, places: Sequence[int]) -> list[Trajectory]:
        """Wait for the trajectories of these places, which are forgotten then."""
        self._look()
        numbers = self._numbers(places)
        if self._batch is not None and numbers:
            self._found |= {self._places[n]: made for n, made in self._batch.wait(numbers).items()}
        return [self._found.pop(place) for place in places]

    def _numbers(self, places: Sequence[int]) -> list[int]:
        """Where those of these places are in the batch whose trajectories were not fetched from it."""
        missing = set(places) - self._found.keys()
        return [number for number, place in enumerate(self._places) if place in missing]

    def _shared(self, mine: Sequence[Trajectory]) -> list[Trajectory]:
        """What the first of the ranks that share sequences took. Collective: every rank."""
        known = [Known(made, self.ledger.turns(made.group, made.sample)) for made in mine]
        rows = exchange_among([each.to_json() for each in known], self.means.share.sequence_parallel)
        if self.means.leads:
            return list(mine)
        given = [Known.from_json(row) for row in rows[0]]
        for each in given:
            assert each.trajectory is not None
            self.ledger.put(each.trajectory.group, each.trajectory.sample, each.turns)
        return [each.trajectory for each in given if each.trajectory is not None]


def settle(batch: BackgroundBatch | None, places: Sequence[int] | None = None) -> None:
    """Wait until each rank has what it wants of its batch, or knows that it will not come. Collective: every rank."""
    await_all(lambda seconds: batch is None or batch.settled(places, seconds))
