"""The estimate of a recipe as tables on a terminal: parts by phase, the verdict, and what would lower memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from shardproof.doctor.report import plain
from shardproof.rl.sizing.advice import Effect
from shardproof.rl.sizing.recipe import Phase, RunEstimate
from shardproof.shard.footprint import MARGIN

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def print_run_estimate(
    label: str, lengths: str, estimate: RunEstimate, effects: Sequence[Effect], together: Effect | None
) -> None:
    """Print everything that is known about a recipe's memory."""
    console = Console(width=None if Console().is_terminal else 140)
    machine = estimate.machine
    count = f"{machine.nodes} x {machine.ranks} ranks" if machine.nodes > 1 else f"{machine.ranks} ranks"
    where = f"GPUs of {size_text(machine.gpu_bytes)}" if machine.gpu_bytes is not None else "CPU"
    console.print(plain(f"{label} on {count}, {where}, {lengths}"))
    kind = "GPU memory" if machine.on_gpu else "memory"
    console.print(_table(f"{kind} per rank, on the rank that holds most", estimate.phases, "device"))
    if any(phase.host for phase in estimate.phases):
        console.print(_table("host memory per rank", estimate.phases, "host"))
    console.print(plain(f"largest: {estimate.fullest.name}, {size_text(estimate.device_bytes)} per rank"))
    for part, size in estimate.shared.items():
        console.print(plain(f"host memory, once on the first node: {part}, {size_text(size)}"))
    for line, fits in verdict(estimate):
        console.print(plain(line, "green" if fits else "bold red"))
    for note in estimate.notes:
        console.print(plain(f"note: {note}", "dim"))
    if effects:
        console.print(_effects_table(effects, estimate))
    if together is not None:
        console.print(
            plain(f"It fits with: {together.text} ({size_text(together.estimate.device_bytes)} per rank)")
        )
    elif not estimate.fits:
        console.print(
            plain("No combination of these settings makes it fit: use a smaller model or more GPUs.")
        )


def verdict(estimate: RunEstimate) -> Iterable[tuple[str, bool]]:
    """(sentence, whether it fits) for the GPU and for the host, where their size is known."""
    machine, usable = estimate.machine, estimate.usable_gpu_bytes
    if usable is not None:
        room = f"{size_text(usable)} ({100 - 100 * MARGIN:.0f}% of {size_text(machine.gpu_bytes or 0)})"
        need = size_text(estimate.device_bytes)
        word = "fits" if estimate.fits_gpu else "does not fit"
        yield f"{word} the GPU: {need} of {room} that tensors can use", estimate.fits_gpu
    if machine.host_bytes is not None:
        need, room = size_text(estimate.host_bytes), size_text(machine.host_bytes)
        word = "fits" if estimate.fits_host else "does not fit"
        yield f"{word} the host: {machine.ranks} ranks take {need} of {room}", estimate.fits_host


def size_text(size: float) -> str:
    """A size as people read it."""
    unit, scale = next(((u, s) for u, s in _UNITS if abs(size) >= s), _UNITS[-1])
    return f"{size / scale:,.1f} {unit}"


def _table(title: str, phases: Sequence[Phase], where: str) -> Table:
    """Parts down, phases across, with a total."""
    columns = {phase.name: phase.device if where == "device" else phase.host for phase in phases}
    totals = {name: sum(parts.values()) for name, parts in columns.items()}
    most = max(totals.values())
    unit, scale = next(((u, s) for u, s in _UNITS if most >= s), _UNITS[-1])
    table = Table(title=plain(f"{title} ({unit})"), title_justify="left")
    table.add_column("part")
    for name in columns:
        table.add_column(name, justify="right")
    for part in dict.fromkeys(part for parts in columns.values() for part in parts):
        cells = [f"{parts[part] / scale:,.2f}" if part in parts else "" for parts in columns.values()]
        table.add_row(part, *cells)
    table.add_section()
    cells = [f"{total / scale:,.2f}{' *' if total == most else ''}" for total in totals.values()]
    table.add_row("total (* = largest)", *cells, style="bold")
    return table


def _effects_table(effects: Sequence[Effect], before: RunEstimate) -> Table:
    on_gpu = before.machine.on_gpu
    needs_host = not on_gpu or (before.fits_gpu and not before.fits_host)
    what = "host memory per node" if needs_host else "GPU memory per rank"
    table = Table(title=plain(f"settings that lower {what}"), title_justify="left")
    for head in ("setting", "then", "saves", "fits", "results"):
        table.add_column(head, justify="left" if head in ("setting", "results") else "right")
    for effect in effects:
        now, then = (
            each.host_bytes if needs_host else each.device_bytes for each in (before, effect.estimate)
        )
        keeps = all(change.keeps_results for change in effect.changes)
        table.add_row(
            plain(effect.text),
            size_text(then),
            size_text(now - then),
            "yes" if effect.estimate.fits else "no",
            "the same" if keeps else "differ",
        )
    return table
