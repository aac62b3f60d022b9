"""The write ledger: who wrote each element that this rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardproof.findings import Finding
from shardproof.weights.boxes import Box, describe_boxes, first_miscount


@dataclass(frozen=True)
class Writer:
    """Where a tensor's bytes came from."""

    kind: str  # "checkpoint" | "converted whole" | "init" | "tie" | "computed"
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass
class Ledger:
    """Writes by tensor, as boxes of the whole tensor."""

    writers: dict[str, Writer] = field(default_factory=dict)
    _expected: dict[str, tuple[Sequence[int], Sequence[Box]]] = field(default_factory=dict)
    _writes: dict[str, list[Box]] = field(default_factory=dict)

    def expect(self, name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        """This rank holds these boxes of `name`; all of their elements must be written."""
        self._expected[name] = (shape, boxes)
        self._writes[name] = []

    def write(self, name: str, box: Box) -> None:
        """The elements of `box` were written, once."""
        self._writes[name].append(box)

    def name_writer(self, name: str, writer: Writer) -> None:
        self.writers[name] = writer

    def findings(self, rank: int) -> list[Finding]:
        """A finding for each gap, overlap or unnamed writer."""
        found = []
        for name, (shape, boxes) in self._expected.items():
            wrong = first_miscount(shape, boxes, self._writes[name])
            if wrong is None and name in self.writers:
                continue
            code = "S201"
            if wrong is None:
                message = f"{name!r} was written, but no source was recorded for it."
            else:
                first = wrong.position[0] if len(wrong.position) == 1 else wrong.position
                what = "not written"
                if wrong.found > wrong.expected:
                    code, what = "S202", "written twice"
                message = f"elements of {name!r} from {first} on were {what}; this rank holds {describe_boxes(boxes)}."
            found.append(Finding(code, "materialise", message, rank=rank, tensor=name))
        return found

    def num_by_kind(self) -> dict[str, int]:
        return dict(Counter(writer.kind for writer in self.writers.values()))
