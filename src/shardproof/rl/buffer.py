"""The rounds that are begun and not trained on yet, and which of them a step takes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardproof.rl.data import PromptStream
from shardproof.rl.known import Known
from shardproof.rl.rounds import BackgroundRound, Drawn, Key, Means, Round, SampledRound
from shardproof.rl.versions import Versions, lags_of, token_counts
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Reward, Trajectory


@dataclass(frozen=True)
class Taken:
    """Prompts that a step trains on."""

    groups: list[int]  # of all ranks
    trajectories: list[Trajectory]  # of this rank
    rewards: Callable[[], list[Reward]]  # of these, once they are there


class Buffer:
    """Begun rounds, in the order in which they were drawn. A step takes the round that was drawn for it.

    Before a step, the rounds of the `ahead` steps after it are begun as well: what they draw comes from weights that are
    at most `ahead` hand-overs old when their step trains on it.
    """

    order = "drawn"

    def __init__(
        self, means: Means, stream: PromptStream, *, num_prompts: int, num_steps: int, ahead: int = 0
    ):
        self.means, self.stream = means, stream
        self.num_prompts, self.num_steps, self.ahead = num_prompts, num_steps, ahead
        self.rounds: list[Round] = []
        self.ledger = TokenLedger()  # of what the step took
        self.num_drawn: dict[int, int] = {}  # prompts for each step, of those that are not over
        self.num_dropped = 0  # prompts that were given up since the last step
        self.waited_s = 0.0  # for trajectories, in the step
        self._taken: list[Round] = []

    @property
    def versions(self) -> Versions:
        return self.means.sampler.versions

    @property
    def is_ahead(self) -> bool:
        """Whether what is trained on may have a lag, which is measured then."""
        return self.ahead > 0 or self.means.background is not None

    def begin(self, step: int) -> None:
        """Begin the rounds of this step and of those after it that may be begun now. Collective: every rank."""
        self._begin_step(step)
        last = min(step + self.ahead, self.num_steps - 1)
        for target in range(step, last + 1):
            found = [each for each in self.rounds if each.step == target]
            for each in found or [self._draw(target, self.num_prompts)]:
                if not each.is_begun:
                    each.begin(step, self.ahead - (target - step))

    def take(self, step: int, count: int) -> Taken:
        """The step's round, which leaves the buffer; if it has been taken, one that is begun now. `count` is not read.

        Collective: every rank.
        """
        mine = [each for each in self.rounds if each.step == step]
        taken = mine[0] if mine else self._draw(step, self.num_prompts)
        if not taken.is_begun:
            taken.begin(step, self.ahead)
        groups = [each.group for each in taken.drawn]
        self._leave(taken)
        started = time.perf_counter()
        made = taken.trajectories()
        self.waited_s += time.perf_counter() - started
        return Taken(groups, [self._handed(taken, each, each.group) for each in made], taken.rewards)

    def end_step(self, step: int) -> None:
        """Give up what no later step may take. Collective: every rank."""

    def facts(self, trained: Sequence[Trajectory]) -> dict[str, Any]:
        """What `ahead_metrics` needs of this rank; JSON-able. `trained` is what the step trains on."""
        background = self.means.background
        found: dict[str, Any] = {
            "lags": lags_of(trained, self.versions),
            "buffered": sum(each.num_complete for each in self.rounds),
        }
        if background is None:
            return found
        several = [len({version for _, version in token_counts(made.sampled)}) > 1 for made in trained]
        activity = {k: v for k, v in background.engine.activity().items() if k.startswith("time/")}
        return found | {
            "in_flight": sum(each.num_in_progress for each in self.rounds),
            "made": len(trained),
            "interrupted": sum(several),
            "dropped": self.num_dropped,
            "replicas": Counter(str(made.facts["replica"]) for made in trained if "replica" in made.facts),
            "activity": activity,
        }

    def close(self) -> None:
        """Give up everything that is begun, without waiting for it."""
        rounds, self.rounds = self.rounds, []
        for each in [*rounds, *self._taken]:
            each.close()
        self._taken = []

    def make_round(
        self, step: int, drawn: Sequence[Drawn], known: Mapping[Key, Known] | None = None
    ) -> Round:
        """A round of this run's kind, with what a checkpoint holds of it."""
        kind = SampledRound if self.means.background is None else BackgroundRound
        return kind(self.means, step, drawn, known)

    def _begin_step(self, step: int) -> None:
        taken, self._taken = self._taken, []
        for each in taken:
            each.close()
        self.num_drawn = {each: num for each, num in self.num_drawn.items() if each >= step}
        self.num_dropped, self.waited_s = 0, 0.0

    def _draw(self, step: int, num: int) -> Round:
        """A round of the next prompts."""
        first = self.num_drawn.get(step, 0)
        position, rows = self.stream.position, self.stream.take(num)
        self.num_drawn[step] = first + num
        drawn = [Drawn(first + k, row, position + k) for k, row in enumerate(rows)]
        self.rounds.append(self.make_round(step, drawn))
        return self.rounds[-1]

    def _leave(self, taken: Round) -> None:
        """Take a round out of the buffer; it is closed when the next step begins."""
        self.rounds.remove(taken)
        self._taken.append(taken)

    def _handed(self, taken: Round, made: Trajectory, group: int) -> Trajectory:
        """A trajectory as the step gets it, with what the round's ledger recorded of it."""
        self.ledger.put(group, made.sample, taken.ledger.turns(made.group, made.sample))
        if not self.is_ahead:
            return made
        return replace(made, group=group, facts={**made.facts, "drawn_for": taken.step + 1})
