"""`shardproof import-config`: a recipe from a config of TRL, verl or SkyRL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardproof.cli.options import UNUSABLE
from shardproof.errors import ShardproofError

if TYPE_CHECKING:
    from shardproof.config.imported.convert import Imported


def import_config(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="the config: .yaml, .yml or .json, or a .sh script that starts verl or SkyRL"
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="settings of the other library that the file lacks"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="write the recipe to this file, which must not exist"),
    ] = None,
    library: Annotated[
        str | None, typer.Option(help="whose config it is: trl, verl or skyrl; by default its keys say")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(help="TRL's trainer: grpo, rloo, dpo, kto, sft or reward; by default the keys say"),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="processes that TRL was started with: its batch sizes are per process; by default num_processes of the config, or 1",
        ),
    ] = None,
) -> None:
    """Make a recipe from a config of TRL, verl or SkyRL, and say what has no counterpart.

    The recipe goes to the terminal, or to a file with --output; what is to be checked goes to standard error.
    """
    from shardproof.config.imported.convert import LIBRARIES
    from shardproof.config.imported.convert import import_config as convert
    from shardproof.config.imported.trl import TRAINERS
    from shardproof.errors import choose

    try:
        if library is not None:
            choose("config", "--library", library, LIBRARIES)
        if trainer is not None:
            choose("config", "--trainer", trainer, TRAINERS)
        imported = convert(file, overrides or [], library=library, trainer=trainer, ranks=ranks)
    except ShardproofError as error:
        typer.echo(str(error), err=True)
        raise SystemExit(UNUSABLE) from None
    if output is None:
        typer.echo(imported.text, nl=False)
    else:
        _write(output, imported.text)
    for line in told(imported, output):
        typer.echo(line, err=True)


def _write(output: Path, text: str) -> None:
    from shardproof.files import write_atomic

    if output.exists():
        typer.echo(f"{output} exists already; remove it, or choose another name", err=True)
        raise SystemExit(UNUSABLE)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, text)
    except OSError as error:
        typer.echo(f"{output} cannot be written: {error.strerror or error}", err=True)
        raise SystemExit(UNUSABLE) from None


def told(imported: Imported, output: Path | None) -> list[str]:
    """What the user should know about the recipe, in lines."""
    from shardproof.config.imported.convert import UNSURE

    draft = imported.draft
    lines = [f"{len(draft.origins)} settings taken over{f' into {output}' if output else ''}."]
    if draft.to_fill:
        lines += ["", "To fill in:", *(f"  {key}: {what}" for key, what in draft.to_fill.items())]
    if imported.notes:
        lines += ["", UNSURE, *(f"  {note}" for note in imported.notes)]
    if draft.gaps:
        lines += ["", "Without a counterpart:", *(f"  {key}: {why}" for key, why in draft.gaps.items())]
    if draft.unneeded:
        lines += ["", "Not needed here:", *(f"  {key}: {why}" for key, why in draft.unneeded.items())]
    if draft.idle:
        what = "At the library's default, or part of something that is not used:"
        lines += ["", what, f"  {', '.join(draft.idle)}"]
    if imported.problem is not None:
        lines += ["", f"The recipe cannot be used as it is: {imported.problem}"]
    elif output is not None:
        lines += ["", f"Next: shardproof train {output} --dry-run"]
    return lines
