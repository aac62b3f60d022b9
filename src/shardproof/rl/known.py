"""A trajectory as JSON, with what the token ledger recorded of it: for checkpoints, and for ranks that share sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardproof.rollout.experts import Experts
from shardproof.rollout.token_ledger import Sampled
from shardproof.rollout.trajectory import Segment, Trajectory


@dataclass(frozen=True)
class Known:
    """What is known of a trajectory: all of it, or the beginning of its only turn."""

    trajectory: Trajectory | None = None  # with its reward, if that was known
    turns: tuple[Sampled, ...] = ()  # as the engine returned them
    begun: Segment | None = None

    @property
    def sampled(self) -> tuple[Segment, ...]:
        """What was drawn of it."""
        if self.trajectory is not None:
            return self.trajectory.sampled
        return () if self.begun is None else (self.begun,)

    @property
    def drawn(self) -> Segment | None:
        """What was drawn of its only turn; None of a conversation, whose environment would begin anew."""
        made = self.trajectory
        if made is None:
            return self.begun
        return None if made.ended or len(made.sampled) != 1 else made.sampled[0]

    def unscored(self) -> Known:
        """The same, to be scored again."""
        made = self.trajectory
        return self if made is None else replace(self, trajectory=replace(made, reward=None))

    def to_json(self) -> dict[str, Any]:
        """Plain lists, numbers and text; `from_json` gives the same back."""
        if self.trajectory is None:
            begun = None if self.begun is None else Trajectory((self.begun,)).to_json()["segments"][0]
            return {"begun": begun}
        pieces: dict[tuple[int, ...], int] = {}  # each is written once, however many turns were read after it

        def place(piece: tuple[int, ...]) -> int:
            return pieces.setdefault(piece, len(pieces))

        turns = [
            {
                **{name: _plain(value) for name, value in vars(turn).items()},
                "context": [place(piece) for piece in turn.context],
                "tokens": place(turn.tokens),
            }
            for turn in self.turns
        ]
        return {"trajectory": self.trajectory.to_json(), "pieces": list(pieces), "turns": turns}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Known:
        """Raises KeyError, IndexError, TypeError, ValueError or AttributeError for what `to_json` never makes."""
        if "trajectory" not in given:
            row = given["begun"]
            begun = None if row is None else Trajectory.from_json({**_EMPTY, "segments": [row]}).segments[0]
            return cls(begun=begun)
        pieces = [tuple(piece) for piece in given["pieces"]]
        turns = [
            Sampled(
                **{
                    **{name: _from_plain(name, value) for name, value in turn.items()},
                    "context": tuple(pieces[place] for place in turn["context"]),
                    "tokens": pieces[turn["tokens"]],
                }
            )
            for turn in given["turns"]
        ]
        return cls(Trajectory.from_json(given["trajectory"]), tuple(turns))


_EMPTY = Trajectory(()).to_json()


def _plain(value: Any) -> Any:
    return value.to_json() if isinstance(value, Experts) else value


def _from_plain(name: str, value: Any) -> Any:
    """A field of a turn, of those that are not pieces."""
    if name == "experts":
        return None if value is None else Experts.from_json(value)
    if name == "parts":
        return tuple((num, version) for num, version in value)
    return tuple(value) if isinstance(value, list) else value
