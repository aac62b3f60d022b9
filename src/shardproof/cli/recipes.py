"""`shardproof recipes`: the recipes that come with the package, copied to where you can edit them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from shardproof.cli.shipped import shipped


def built_in_recipes() -> Path:
    """The folder of the built-in recipes."""
    return shipped("recipes", "recipes")


def recipes(
    folder: Annotated[
        Path, typer.Argument(file_okay=False, help="where to copy them; existing files are kept")
    ] = Path("recipes"),
) -> None:
    """Copy the built-in recipes, with the demo's model and data, into a folder."""
    source = built_in_recipes()
    try:
        for path in sorted(source.rglob("*")):
            target = folder / path.relative_to(source)
            if path.is_file() and "__pycache__" not in path.parts and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    except OSError as error:
        typer.echo(f"{error.filename or folder} cannot be written: {error.strerror or error}", err=True)
        raise SystemExit(2) from None
    for path in sorted(folder.glob("*.toml")):
        typer.echo(f"{path}: {_title(path)}")


def _title(path: Path) -> str:
    """The first sentence of a recipe's opening comment."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line.removeprefix("#").strip() for line in text.partition("\n\n")[0].splitlines()]
    return " ".join(line for line in lines if line).partition(". ")[0].rstrip(".")
