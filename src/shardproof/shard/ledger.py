"""The write ledger: who wrote each element that this rank holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shardproof.findings import Finding


@dataclass(frozen=True)
class Writer:
    """Where a tensor's bytes came from."""

    kind: str  # "checkpoint" | "converted whole" | "init" | "tie" | "computed"
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass
class Ledger:
    """Writes by tensor, as flat element ranges of the whole tensor."""

    writers: dict[str, Writer] = field(default_factory=dict)
    _expected: dict[str, tuple[int, int]] = field(default_factory=dict)
    _writes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def expect(self, name: str, start: int, stop: int) -> None:
        """This rank holds elements [start, stop) of `name`; all of them must be written."""
        self._expected[name] = (start, stop)
        self._writes[name] = []

    def write(self, name: str, start: int, stop: int) -> None:
        """Elements [start, stop) were written, once."""
        self._writes[name].append((start, stop))

    def name_writer(self, name: str, writer: Writer) -> None:
        self.writers[name] = writer

    def findings(self, rank: int) -> list[Finding]:
        """A finding for each gap, overlap or unnamed writer."""
        found = []
        for name, (start, stop) in self._expected.items():
            position = start
            for a, b in sorted(self._writes[name]):
                if a != position:
                    break
                position = b
            else:
                a = stop
            if a < position or position > stop:
                message = (
                    f"elements of {name!r} from {a} on are written twice; this rank holds [{start}, {stop})."
                )
                found.append(Finding("S202", "materialise", message, rank=rank, tensor=name))
            elif position != stop:
                message = f"elements of {name!r} from {position} on are not written; this rank holds [{start}, {stop})."
                found.append(Finding("S201", "materialise", message, rank=rank, tensor=name))
            elif name not in self.writers:
                found.append(
                    Finding("S201", "materialise", f"{name!r} has no named writer.", rank=rank, tensor=name)
                )
        return found

    def num_by_kind(self) -> dict[str, int]:
        return dict(Counter(writer.kind for writer in self.writers.values()))
