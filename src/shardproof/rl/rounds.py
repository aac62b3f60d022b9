"""Rounds: the prompts that are drawn together for a step, and their trajectories until the step takes them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardproof.rl.conversations.measures import reward_sample, with_environment
from shardproof.rl.conversations.steps import Start, starts_of
from shardproof.rl.data import Prompt, Share
from shardproof.rl.rewards import PendingRewards
from shardproof.rl.rollouts import Sampler
from shardproof.rollout.engine import Sampling
from shardproof.rollout.token_ledger import Sampled, TokenLedger
from shardproof.rollout.trajectory import Reward, Segment, Trajectory

Key = tuple[int, int]  # of a trajectory in its round: group and sample


@dataclass(frozen=True)
class Means:
    """What rounds are sampled with on this rank."""

    sampler: Sampler
    sampling: Sampling
    prompts: Sequence[Prompt]
    group_size: int
    share: Share  # of the prompts, that this rank takes

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that share sequences."""
        return self.share.rank % self.share.sequence_parallel == 0


@dataclass(frozen=True)
class Known:
    """What a checkpoint holds of a trajectory: all of it, or the beginning of its only turn."""

    trajectory: Trajectory | None = None  # with its reward, if that was known
    turns: tuple[Sampled, ...] = ()  # as the engine returned them
    begun: Segment | None = None

    @property
    def sampled(self) -> tuple[Segment, ...]:
        """What was drawn of it."""
        if self.trajectory is not None:
            return self.trajectory.sampled
        return () if self.begun is None else (self.begun,)


@dataclass(frozen=True)
class Drawn:
    """A prompt that was drawn: its place in its round, and its row of the data."""

    group: int
    row: int


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
        self.is_begun = False
        self.starts: list[Start] = []  # of this rank

    def begin(self, is_usable: Callable[[Known], bool] = lambda _: True) -> None:
        """Have the round's trajectories made, but for those of a checkpoint that are usable. Collective: every rank."""
        self.known = {key: known for key, known in self.known.items() if is_usable(known)}
        asked = [(each.group, self.means.prompts[each.row]) for each in self.means.share.of(self.drawn)]
        self.starts = starts_of(self.means.sampler.seed, asked, self.means.group_size, self.step)
        for start in self.starts:
            if (known := self.known.get((start.group, start.sample))) is not None:
                self.ledger.put(start.group, start.sample, known.turns)
        self.is_begun = True
        self._begin()

    def complete(self, start: Start) -> Trajectory | None:
        """The checkpoint's trajectory of this beginning, if it was complete."""
        known = self.known.get((start.group, start.sample))
        return None if known is None else known.trajectory

    def saved(self) -> dict[Key, Known]:
        """What a checkpoint has to keep of this rank's trajectories; waits for rewards of those that are drawn."""
        return self._saved() if self.is_begun else {}

    @property
    @abstractmethod
    def num_complete(self) -> int:
        """How many of this rank's trajectories are there."""

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

    def _begin(self) -> None:
        sampler, starts = self.means.sampler, self.starts
        self._pending = sampler.pending()
        found = {k: made for k, start in enumerate(starts) if (made := self.complete(start)) is not None}
        unscored = {k: made for k, made in found.items() if made.reward is None and made.ended != "failed"}
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
        return num_complete < len(self.drawn) * self.means.group_size

    @property
    def num_complete(self) -> int:
        return len(self._made) if self.is_begun else 0

    def trajectories(self) -> list[Trajectory]:
        return self._made

    def rewards(self) -> list[Reward]:
        assert self._pending is not None, "the round is begun"
        masks, nothing = self.means.sampler.masks_truncated, Reward(0.0)
        found = iter(
            self._pending.result()
        )  # of those that had no reward, and whose environment did not fail
        return [
            made.reward
            if made.reward is not None
            else with_environment(made, nothing if made.ended == "failed" else next(found), masks)
            for made in self._made
        ]

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
