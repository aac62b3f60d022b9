"""`shardproof train recipe.toml [key=value ...]`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardproof import __version__
from shardproof.cli.options import Options, exit_code_of
from shardproof.errors import ShardproofError
from shardproof.terminal import Terminal, attached
from shardproof.user_code import find_modules_in

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

logger = logging.getLogger(__name__)


def train(
    recipe: Annotated[str, typer.Argument(help="the recipe, a TOML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value: change a key of the recipe")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check the recipe, the data and this machine without training")
    ] = False,
    show_recipe: Annotated[
        bool, typer.Option("--show-recipe", help="print every setting as JSON without training")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="allow this section.key to differ from the run that is resumed; can be repeated"),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from", help="resume from this step's checkpoint instead of the newest; 0 starts over"
        ),
    ] = None,
    nnodes: Annotated[str, typer.Option(help="number of nodes, or a range such as 1:4")] = "1",
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT, for several nodes")] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(help="shared secret of the run, for several nodes", envvar="SHARDPROOF_RDZV_ID"),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="how many times to restart after a rank was lost")
    ] = 0,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="show only warnings, errors and the final summary")
    ] = False,
) -> None:
    """Train a model from a recipe. Rerun the same command to resume."""
    options = Options(tuple(allow or ()), from_step, nnodes, rdzv_endpoint, rdzv_id, max_restarts, quiet)
    with attached(quiet, rank=int(os.environ.get("RANK", "0"))) as terminal:
        try:
            checked = _load_recipe(recipe, overrides or [], show_recipe)
            if dry_run or not show_recipe:
                _train(checked, options, dry_run, terminal)
        except ShardproofError as error:
            terminal.show(str(error))
            raise SystemExit(exit_code_of(error)) from None


def _load_recipe(path: str, overrides: list[str], show: bool) -> Recipe:
    from shardproof.config.load import load_recipe, to_json

    recipe = load_recipe(path, overrides)
    find_modules_in(Path(path).parent)
    if show:
        print(to_json(recipe), flush=True)
    logger.info("%s", _describe(recipe, path))
    return recipe


def _train(recipe: Recipe, options: Options, is_dry: bool, terminal: Terminal) -> None:
    from shardproof.cli.dry_run import dry_run
    from shardproof.cli.ranks import launch, run_under_torchrun
    from shardproof.cli.readiness import require_start, says_complete

    if is_dry:
        dry_run(recipe, options, terminal)
    elif "RANK" in os.environ:  # started by torchrun
        if os.environ.get("LOCAL_RANK", "0") == "0":
            require_start(recipe, options)
        run_under_torchrun(recipe, options, terminal)
    else:
        logger.info("checking the recipe and this machine ...")
        require_start(recipe, options)
        complete = says_complete(recipe, options)
        if complete:
            terminal.show(complete)
            return
        launch(recipe, options, terminal)


def _describe(recipe: Recipe, path: str) -> str:
    """What starts, in a line."""
    num = recipe.train.ranks
    ranks = f"{num} rank{'s' * (num > 1)}" if num else "one rank per GPU"
    return (
        f"shardproof {__version__}: {path}: {recipe.algorithm.name} on {recipe.model.path}, {ranks}, "
        f"{recipe.train.steps} steps, output in {recipe.output.folder}"
    )
