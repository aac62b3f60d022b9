"""What the doctor found: stages of layouts, buffers of ranks, findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardproof.findings import Finding

# An exit code counts findings up to here. Usage errors are above.
MAX_EXIT, USAGE_EXIT = 100, 120


@dataclass(frozen=True)
class Stage:
    """One stage of one layout, over all ranks."""

    name: str
    seconds: float = 0.0  # of the slowest rank
    peak_bytes: int = 0  # rise on the rank that rose most
    note: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> str:
        return ", ".join(dict.fromkeys(finding.code for finding in self.findings)) or "ok"


@dataclass(frozen=True)
class Buffer:
    """A buffer as one rank holds it."""

    name: str
    rank: int
    dtype: str
    shape: tuple[int, ...]
    num_nan: int
    first: tuple[float, ...]


@dataclass(frozen=True)
class Examination:
    """One layout: its stages and buffers, or why it was refused."""

    layout: str
    stages: tuple[Stage, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    refused: Finding | None = None  # an unsupported combination of settings, not a fault of the model

    @property
    def findings(self) -> list[Finding]:
        """Each once: a later stage may see what an earlier one saw."""
        return list(dict.fromkeys(finding for stage in self.stages for finding in stage.findings))


@dataclass(frozen=True)
class Report:
    """Everything the doctor found about a model."""

    label: str
    facts: Mapping[str, str]
    examinations: tuple[Examination, ...]
    seconds: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_findings(self) -> int:
        return sum(len(examination.findings) for examination in self.examinations)

    @property
    def exit_code(self) -> int:
        return min(self.num_findings, MAX_EXIT)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "num_findings": self.num_findings}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        fields = {name: value for name, value in data.items() if name != "num_findings"}
        return cls(**{**fields, "examinations": tuple(_examination(row) for row in data["examinations"])})


def _examination(data: Mapping[str, Any]) -> Examination:
    refused = data["refused"]
    return Examination(
        layout=data["layout"],
        stages=tuple(
            Stage(**{**stage, "findings": tuple(Finding.from_json(item) for item in stage["findings"])})
            for stage in data["stages"]
        ),
        buffers=tuple(
            Buffer(**{**row, "shape": tuple(row["shape"]), "first": tuple(row["first"])})
            for row in data["buffers"]
        ),
        refused=Finding.from_json(refused) if refused is not None else None,
    )
