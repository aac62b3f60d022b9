"""A record of the experts that an engine chose, token by token. Free of torch."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ExpertShape:
    """What a policy routes: its layers with a router, how many experts each has, and how many a token visits."""

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest numbers that name all experts."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


class Experts:
    """The experts of the tokens from place `start` of a sequence on: `rows`, [tokens, layers, chosen], read-only.

    `layers` are the numbers of the layers. Two records are equal if their digests are: of the place, the layers, the
    shape and all experts.
    """

    __slots__ = ("digest", "layers", "rows", "start")

    def __init__(self, start: int, rows: np.ndarray, layers: Sequence[int], digest: str | None = None):
        self.start = start
        self.rows = np.ascontiguousarray(rows)
        self.rows.flags.writeable = False
        self.layers = tuple(layers)
        self.digest = digest if digest is not None else self.computed_digest()

    def computed_digest(self) -> str:
        """The digest of what the record holds now."""
        facts = f"{self.start} {self.layers} {self.rows.shape} {self.rows.dtype.str} ".encode()
        return hashlib.blake2b(facts + self.rows.tobytes(), digest_size=16).hexdigest()

    @property
    def stop(self) -> int:
        """The place after its last token."""
        return self.start + len(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experts) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __deepcopy__(self, memo: Any) -> Experts:
        return self

    def __reduce__(self) -> Any:
        return Experts, (self.start, self.rows, self.layers, self.digest)

    def __repr__(self) -> str:
        return f"Experts(start={self.start}, shape={self.rows.shape}, digest={self.digest!r})"

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and text; `from_json` gives the same record back."""
        return {
            "start": self.start,
            "layers": list(self.layers),
            "shape": list(self.rows.shape),
            "dtype": self.rows.dtype.str,
            "rows": base64.b64encode(self.rows.tobytes()).decode(),
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Experts:
        rows = np.frombuffer(base64.b64decode(given["rows"]), given["dtype"]).reshape(given["shape"])
        return cls(given["start"], rows, given["layers"], given["digest"])
