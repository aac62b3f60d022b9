"""The doctor's report on a terminal and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardproof.doctor.results import Buffer, Examination, Report
from shardproof.text import printable

ESTIMATED = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "export",
    "load_peak",
    "step_peak",
)
MAX_BUFFERS, MAX_RANKS = 6, 8  # more than these are shown by the first and the last ones


def print_report(report: Report, console: Console | None = None) -> None:
    """Facts, stages and buffers of each layout, then every finding with its fix."""
    console = console or Console(width=None if Console().is_terminal else 140)
    console.print(Text.assemble(("shardproof doctor ", "bold"), plain(report.label)))
    console.print(plain(", ".join(f"{name} {value}" for name, value in report.facts.items()), "dim"))
    for examination in report.examinations:
        console.print()
        console.print(stage_table(examination))
        if examination.refused is not None:
            console.print(plain(f"refused with an error: {examination.refused}", "yellow"))
        if examination.buffers:
            console.print(buffer_table(examination.buffers))
    print_findings(report, console)


def print_matrix(report: Report, console: Console | None = None) -> None:
    """One line per layout: safe, refused by name, or what was found."""
    console = console or Console(width=None if Console().is_terminal else 140)
    table = Table(title=plain(f"layouts of {report.label}"), title_justify="left")
    for head in ("layout", "verdict", "seconds", "peak MiB", "why"):
        table.add_column(head, justify="right" if head in ("seconds", "peak MiB") else "left")
    for row in report.examinations:
        verdict, colour = verdict_of(row)
        seconds = sum(stage.seconds for stage in row.stages)
        peak = max((stage.peak_bytes for stage in row.stages), default=0)
        why = (
            row.refused.message if row.refused is not None else "; ".join(f.message for f in row.findings[:2])
        )
        table.add_row(
            plain(row.layout),
            plain(verdict, colour),
            f"{seconds:.1f}",
            f"{peak / 2**20:.0f}",
            plain(why),
        )
    console.print(table)
    print_findings(report, console)


def verdict_of(examination: Examination) -> tuple[str, str]:
    """(word, colour) for one layout."""
    if examination.findings:
        return ", ".join(dict.fromkeys(finding.code for finding in examination.findings)), "red"
    return (f"refused ({examination.refused.code})", "yellow") if examination.refused else ("safe", "green")


def print_findings(report: Report, console: Console) -> None:
    console.print()
    for examination in report.examinations:
        for finding in examination.findings:
            console.print(plain(finding, "red"))
            console.print(plain(f"  in {examination.layout}", "dim"))
    count = report.num_findings
    colour = "red" if count else "green"
    console.print(f"[{colour}]{count} findings[/] in {report.seconds:.1f} s")


def stage_table(examination: Examination) -> Table:
    table = Table(title=plain(examination.layout), title_justify="left")
    for head in ("stage", "seconds", "peak MiB", "findings", "what"):
        table.add_column(head, justify="right" if head in ("seconds", "peak MiB") else "left")
    for stage in examination.stages:
        colour = "red" if stage.findings else "green"
        peak = f"{stage.peak_bytes / 2**20:.1f}"
        table.add_row(
            plain(stage.name), f"{stage.seconds:.2f}", peak, plain(stage.verdict, colour), plain(stage.note)
        )
    return table


def buffer_table(buffers: Sequence[Buffer]) -> Table:
    """The buffers of every rank, as the reproducer of SkyRL issue 1709 prints them."""
    names = list(dict.fromkeys(buffer.name for buffer in buffers))
    shown = shorten(names, MAX_BUFFERS)
    ranks = shorten(sorted({buffer.rank for buffer in buffers}), MAX_RANKS)
    left_out = len(names) - len(shown)
    table = Table(
        title=f"buffers{f', {left_out} more in the JSON' if left_out else ''}", title_justify="left"
    )
    for head in ("buffer", "rank", "dtype", "shape", "NaN", "first five"):
        table.add_column(head, overflow="fold")
    for buffer in sorted(buffers, key=lambda buffer: (names.index(buffer.name), buffer.rank)):
        if buffer.name in shown and buffer.rank in ranks:
            colour = "red" if buffer.num_nan else "default"
            table.add_row(
                plain(buffer.name),
                str(buffer.rank),
                plain(buffer.dtype),
                plain(tuple(buffer.shape)),
                plain(buffer.num_nan, colour),
                first_values(buffer),
            )
    return table


def print_estimates(label: str, layout: str, num_tokens: int, rows: Sequence[Any]) -> None:
    """Bytes of one rank by kind; a column for each number of ranks."""
    console = Console(width=None if Console().is_terminal else 140)
    unit, size = ("GiB", 2**30) if max(row.peak for row in rows) >= 2**30 else ("MiB", 2**20)
    title = f"{label}: {unit} per rank, {layout}, micro-batches of {num_tokens} tokens"
    table = Table(title=plain(title), title_justify="left")
    table.add_column("ranks")
    for row in rows:
        table.add_column(str(row.ranks), justify="right")
    for name in ESTIMATED:
        cells = [f"{getattr(row, name) / size:.2f}" for row in rows]
        table.add_row(name.replace("_", " "), *cells, style="bold" if name.endswith("peak") else None)
    console.print(table)
    if not rows[0].counted:
        console.print("activations are estimated from the config: this model cannot run on the meta device")


def plain(text: object, style: str = "") -> Text:
    """Text that the console shows as it is: no escape sequence, no markup and no highlighting in it takes effect."""
    return Text(printable(text), style)


def shorten(items: Sequence[Any], limit: int) -> list[Any]:
    """All of them, or the first and the last ones."""
    return list(items) if len(items) <= limit else [*items[: limit - limit // 4], *items[-(limit // 4) :]]


def first_values(buffer: Buffer) -> str:
    return ", ".join(f"{value:.6g}" for value in buffer.first)


def write_json(report: Report, path: Path) -> None:
    """The whole report; values that JSON cannot express become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_plain(report.to_json()), indent=2, allow_nan=False) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
