"""`shardproof data recipe.toml [key=value ...]`: what the model will see, before anything is trained."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardproof.cli.options import exit_code_of
from shardproof.errors import ShardproofError, choose, fail
from shardproof.terminal import LIBRARIES, Terminal, attached
from shardproof.user_code import find_modules_in

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

logger = logging.getLogger(__name__)


def data(
    recipe: Annotated[str, typer.Argument(help="the recipe, a TOML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value: change a key of the recipe")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, max=1000, help="how many rows to show token by token")] = 3,
    split: Annotated[
        str, typer.Option(help="train, evaluation, or the name of a set of evaluation.sets")
    ] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    measure: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="sample this many completions of every prompt and write how often each is solved",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="where --measure writes; by default data.pass_rates, or pass_rates.jsonl"),
    ] = None,
) -> None:
    """Show what the model will see of a recipe's data: tokens, lengths, sources, duplicates. No weights are loaded."""
    with attached(quiet=as_json, rank=0) as terminal:
        try:
            from shardproof.config.load import load_recipe

            _check_options(split, as_json, measure, to)
            checked = load_recipe(recipe, overrides or [])
            find_modules_in(Path(recipe).parent)
            if measure is not None:
                from shardproof.cli.data_measure import measure_rates

                measure_rates(checked, measure, to, terminal)
                return
            _show(checked, Path(recipe).name, rows, split, as_json, terminal)
        except ShardproofError as error:
            terminal.show(str(error))
            raise SystemExit(exit_code_of(error)) from None


def _check_options(split: str, as_json: bool, measure: int | None, to: Path | None) -> None:
    """Raise for an option that would change nothing."""
    problem = None
    if to is not None and measure is None:
        problem = "--to says where --measure writes.", "add --measure N, or leave --to out"
    elif as_json and measure is not None:
        problem = "--measure writes a file, and shows nothing as JSON.", "leave --json out"
    elif split != "train" and measure is not None:
        message = f"--measure samples the rows to train on, not those of --split {split}."
        problem = message, "leave --split out; to measure other rows, name them in data.train"
    if problem is not None:
        raise fail("C001", "data", problem[0], fix=problem[1])


def _show(recipe: Recipe, label: str, rows: int, split: str, as_json: bool, terminal: Terminal) -> None:
    logger.info("importing torch and transformers ...")
    from rich.console import Console

    from shardproof.cli.data_view import View
    from shardproof.rl.checks import check_inputs
    from shardproof.rl.sources.summary import sets_of, summarise

    terminal.adopt(*LIBRARIES)
    logger.info("reading the data ...")
    inputs = check_inputs(recipe)
    choose("data", "--split", split, list(sets_of(inputs)))
    facts = summarise(recipe, inputs, split, rows)
    terminal.pause()
    if as_json:
        print(json.dumps(facts))  # in ASCII, which every terminal and pipe takes
        return
    View(Console()).show(facts, label)
