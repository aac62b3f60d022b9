"""The rounds that are begun and not trained on yet, and which of them a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardproof.rl.data import PromptStream
from shardproof.rl.rounds import Drawn, Known, Means, Round, SampledRound
from shardproof.rl.versions import Versions, lags_of, max_lag
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

    def __init__(
        self, means: Means, stream: PromptStream, *, num_prompts: int, num_steps: int, ahead: int = 0
    ):
        self.means, self.stream = means, stream
        self.num_prompts, self.num_steps, self.ahead = num_prompts, num_steps, ahead
        self.rounds: list[Round] = []
        self.ledger = TokenLedger()  # of what the step took
        self.num_drawn: dict[int, int] = {}  # prompts for each step, of those that are not over
        self._taken: list[Round] = []

    @property
    def versions(self) -> Versions:
        return self.means.sampler.versions

    @property
    def is_ahead(self) -> bool:
        """Whether what is trained on may have a lag, which is measured then."""
        return self.ahead > 0

    def begin(self, step: int) -> None:
        """Begin the rounds of this step and of those after it that may be begun now. Collective: every rank."""
        self._end_taken()
        self.num_drawn = {each: num for each, num in self.num_drawn.items() if each >= step}
        last = min(step + self.ahead, self.num_steps - 1)
        for target in range(step, last + 1):
            found = [each for each in self.rounds if each.step == target]
            for each in found or [self._draw(target)]:
                if not each.is_begun:
                    self._begin(each, step)

    def take(self, step: int) -> Taken:
        """The step's round, which leaves the buffer; if it has been taken, one that is begun now.

        Collective: every rank.
        """
        mine = [each for each in self.rounds if each.step == step]
        taken = mine[0] if mine else self._draw(step)
        if not taken.is_begun:
            self._begin(taken, step)
        self.rounds.remove(taken)
        self._taken.append(taken)
        made = taken.trajectories()
        for each in made:
            self.ledger.put(each.group, each.sample, taken.ledger.turns(each.group, each.sample))
        if self.is_ahead:
            made = [replace(each, facts={**each.facts, "drawn_for": taken.step + 1}) for each in made]
        return Taken([each.group for each in taken.drawn], made, taken.rewards)

    def facts(self, trained: Sequence[Trajectory]) -> dict[str, Any]:
        """What `ahead_metrics` needs of this rank; JSON-able. `trained` is what the step trains on."""
        return {"lags": lags_of(trained, self.versions), "buffered": self.num_complete}

    @property
    def num_complete(self) -> int:
        """How many trajectories of this rank are complete and wait for their step."""
        return sum(each.num_complete for each in self.rounds)

    def close(self) -> None:
        """Give up everything that is begun, without waiting for it."""
        rounds, self.rounds = self.rounds, []
        for each in rounds:
            each.close()
        self._end_taken()

    def _draw(self, step: int) -> Round:
        """A round of the next prompts."""
        first = self.num_drawn.get(step, 0)
        rows = self.stream.take(self.num_prompts)
        self.num_drawn[step] = first + len(rows)
        drawn = [Drawn(first + k, row) for k, row in enumerate(rows)]
        self.rounds.append(self.make_round(step, drawn))
        return self.rounds[-1]

    def make_round(self, step: int, drawn: Sequence[Drawn]) -> Round:
        return SampledRound(self.means, step, drawn)

    def _begin(self, begun: Round, step: int) -> None:
        def is_usable(known: Known) -> bool:
            lag = max_lag(known.sampled, self.versions)
            return lag is not None and lag + begun.step - step <= self.ahead

        begun.begin(is_usable)

    def _end_taken(self) -> None:
        taken, self._taken = self._taken, []
        for each in taken:
            each.close()
