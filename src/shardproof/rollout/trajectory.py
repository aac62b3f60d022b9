"""What flows from engines to batches: tokens with their authors, and what the whole is worth. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Literal

from shardproof.rollout.experts import Experts

Author = Literal["prompt", "policy", "environment", "template", "data"]
# What ended a conversation: the environment, one of the limits, or a failure of the environment.
Ending = Literal["", "done", "turns", "tokens", "length", "time", "failed"]
TRUNCATED: tuple[Ending, ...] = ("turns", "tokens", "length", "time")


@dataclass(frozen=True)
class Segment:
    """Tokens of one author. Tokens that the policy drew have their log-probs and the version of its weights."""

    tokens: tuple[int, ...]
    author: Author
    logprobs: tuple[float, ...] | None = None  # that each token was drawn with
    version: int | None = None  # of the weights that drew them; of several, the oldest
    trained: bool = False  # the loss counts these tokens
    reward: float = 0.0  # of the environment for this turn of the policy, as weighed in the total
    # (number of tokens, version) of each part, in order, where the weights changed while the tokens were drawn.
    parts: tuple[tuple[int, int], ...] = ()
    # Those of the policy's own tokens, and of what it read since its last turn, where they are recorded.
    experts: Experts | None = None

    @property
    def token_versions(self) -> tuple[int | None, ...]:
        """The version of the weights that drew each token."""
        if self.parts:
            return tuple(version for num, version in self.parts for _ in range(num))
        return (self.version,) * len(self.tokens)


@dataclass(frozen=True)
class Reward:
    """What a trajectory is worth: the weighted total of the reward functions, each one's own value, and what failed."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)  # what failed, and how; its part is 0
    failed: bool = False  # a reward that counts in the total failed: the total says nothing
    penalty: float = 0.0  # of the algorithm, for length; trained on, and no part of the total
    left_out: bool = (
        False  # known, but not learned from: a limit ended the conversation (environment.truncation)
    )

    greedy: float = 0.0  # what the prompt's greedy completion is worth, where an algorithm compares with it
    no_signal: tuple[str, ...] = ()  # reward functions that had nothing to say; they are no parts
    silent: bool = False  # no reward that counts in the total had anything to say: there is no total
    shaped: float | None = (
        None  # learned from in place of total and penalty: clipped, or each part normalised
    )
    facts: Mapping[str, float] = field(
        default_factory=dict
    )  # what reward functions measured beside their values

    @property
    def values(self) -> dict[str, float]:
        """What each reward function said; nothing of those that failed, whose parts are 0."""
        return {name: value for name, value in self.parts.items() if name not in self.failures}

    @property
    def counts(self) -> bool:
        """Whether it is learned from: neither unknown nor left out."""
        return self.known and not self.left_out

    @property
    def known(self) -> bool:
        """Whether there is a total: no reward that counts failed, and one of them had something to say."""
        return not (self.failed or self.silent)

    @property
    def trained(self) -> float:
        """What is learned from: the total, with its penalty, or what it was shaped to."""
        return self.measured if self.shaped is None else self.shaped

    @property
    def measured(self) -> float:
        """What metrics show: the total, with its penalty."""
        return (0.0 if self.failed else self.total) + self.penalty

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Reward:
        return cls(**{**given, "no_signal": tuple(given.get("no_signal", ()))})

    @property
    def errors(self) -> tuple[str, ...]:
        """What went wrong, in one line per reward."""
        return tuple(f"{name}: {error}" for name, error in self.failures.items())


@dataclass(frozen=True)
class Trajectory:
    """A prompt and all that followed it. Engines and environments append segments; rewards are added at the end."""

    segments: tuple[Segment, ...]
    group: int = 0  # its prompt's place in the step's batch: the trajectories of a group are compared
    sample: int = 0  # its own place in the group
    finished: bool = False  # the policy ended it with a stop token or a stop string, not the length limit
    text: str = ""  # what followed the prompt, as rewards read it
    reward: Reward | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON-able: what else is known about it
    # Sequences of the same conversation before this one, oldest first: where the policy began to read something else.
    earlier: tuple[Trajectory, ...] = ()
    ended: Ending = ""  # what ended the conversation: see `Ending`; "" without an environment
    stop_string: str = ""  # that ended what the policy said last; "" where a stop token did, or nothing

    @classmethod
    def of_prompt(cls, tokens: tuple[int, ...], group: int = 0, sample: int = 0) -> Trajectory:
        """A prompt to which nothing was said yet."""
        return cls((Segment(tokens, "prompt"),), group, sample)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(segment.tokens for segment in self.segments))

    @property
    def sampled(self) -> tuple[Segment, ...]:
        """The policy's own segments, in all sequences of the conversation."""
        parts = (*self.earlier, self)
        return tuple(segment for part in parts for segment in part.segments if segment.author == "policy")

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.tokens) for segment in self.sampled)

    @property
    def version(self) -> int | None:
        """Of the oldest weights that drew any of its tokens; None if none were drawn."""
        return min((s.version for s in self.sampled if s.version is not None), default=None)

    @property
    def sequences(self) -> tuple[Trajectory, ...]:
        """What the conversation gives to train on, in the order of its turns; all have its reward."""
        if not self.earlier:
            return (self,)
        parts = (*self.earlier, self)
        return tuple(
            replace(
                part, group=self.group, sample=self.sample, reward=self.reward, ended=self.ended, earlier=()
            )
            for part in parts
        )

    @property
    def has_stop_token(self) -> bool:
        """Whether its last token says that it ends, and nothing else."""
        return self.finished and not self.stop_string

    def extended(self, segment: Segment, finished: bool = False, stop_string: str = "") -> Trajectory:
        """With one more segment at its end."""
        segments = (*self.segments, segment)
        return replace(self, segments=segments, finished=finished, stop_string=stop_string)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, numbers and text; `from_json` gives the same trajectory back."""
        return asdict(self, dict_factory=_plain)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Trajectory:
        segments = tuple(
            Segment(
                **{
                    **row,
                    "tokens": tuple(row["tokens"]),
                    "logprobs": None if row["logprobs"] is None else tuple(row["logprobs"]),
                    "parts": tuple((num, version) for num, version in row.get("parts", ())),
                    "experts": Experts.from_json(row["experts"]) if row.get("experts") else None,
                }
            )
            for row in given["segments"]
        )
        reward = None if given["reward"] is None else Reward.from_json(given["reward"])
        earlier = tuple(cls.from_json(part) for part in given.get("earlier", ()))
        return cls(**{**given, "segments": segments, "reward": reward, "earlier": earlier})


def _plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.to_json() if isinstance(value, Experts) else value for name, value in fields}


def reward_of(trajectory: Trajectory) -> Reward:
    """The trajectory's reward, which must be there."""
    assert trajectory.reward is not None, "nothing has rewarded this trajectory"
    return trajectory.reward


def conversations_of(sequences: Sequence[Trajectory]) -> list[int]:
    """Which conversation each sequence belongs to, counted from 0: those of one have its place and follow each other."""
    runs = groupby(sequences, key=lambda sequence: (sequence.group, sequence.sample))
    return [number for number, (_, members) in enumerate(runs) for _ in members]
