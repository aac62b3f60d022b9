"""`shardproof train recipe.toml [key=value ...]`."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardproof import __version__
from shardproof.cli.host_options import (
    HostWait,
    LocalAddr,
    LostAfter,
    MaxRestarts,
    Nnodes,
    RdzvEndpoint,
    RdzvId,
    RdzvTimeout,
)
from shardproof.cli.options import Options, exit_code_of, with_scheduler
from shardproof.dist.schedulers import is_rank
from shardproof.errors import ShardproofError, choose
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
    nnodes: Nnodes = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    local_addr: LocalAddr = None,
    max_restarts: MaxRestarts = 0,
    lost_after: LostAfter = 30.0,
    host_wait: HostWait = 30.0,
    rdzv_timeout: RdzvTimeout = 600.0,
    on: Annotated[
        str | None,
        typer.Option(
            help="ray: run the ranks on the Ray cluster of RAY_ADDRESS, or on one that is started here"
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="show only warnings, errors and the final summary")
    ] = False,
) -> None:
    """Train a model from a recipe. Rerun the same command to resume."""
    hosts = (rdzv_endpoint, rdzv_id, max_restarts)
    waits = (lost_after, host_wait, rdzv_timeout)
    options = Options(tuple(allow or ()), from_step, "1", *hosts, quiet, on, local_addr, *waits)
    with attached(quiet, rank=int(os.environ["RANK"]) if is_rank() else 0) as terminal:
        try:
            if on is not None:
                choose("train", "--on", on, ["ray"])
            options = with_scheduler(options, nnodes)
            checked = _load_recipe(recipe, overrides or [], show_recipe)
            if dry_run or not show_recipe:
                _train(checked, options, dry_run, terminal)
        except ShardproofError as error:
            terminal.show(str(error))
            if not (dry_run or show_recipe):
                _tell_hosts(options, str(error), exit_code_of(error))
            raise SystemExit(exit_code_of(error)) from None


def _tell_hosts(options: Options, text: str, code: int) -> None:
    """Let the other hosts of the run end with what this one does not start for."""
    from shardproof.dist.start import tell_refusal

    if not is_rank() and options.on is None:
        with contextlib.suppress(ShardproofError):  # it is about the hosts themselves
            tell_refusal(options.together, text, code)


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
    from shardproof.cli.on_ray import launch_on_ray
    from shardproof.cli.ranks import launch, run_under_torchrun
    from shardproof.cli.readiness import require_start, says_complete

    if is_dry:
        dry_run(recipe, options, terminal)
    elif is_rank():
        if os.environ.get("LOCAL_RANK", "0") == "0":
            require_start(recipe, options)
        run_under_torchrun(recipe, options, terminal)
    else:
        if options.on != "ray":  # whose nodes are looked at by their own ranks
            logger.info("checking the recipe and this machine ...")
            require_start(recipe, options)
        complete = says_complete(recipe, options)
        if complete:
            terminal.show(complete)
            _tell_hosts(options, complete, code=0)  # where no folder is shared, the others cannot see it
            return
        (launch_on_ray if options.on == "ray" else launch)(recipe, options, terminal)


def _describe(recipe: Recipe, path: str) -> str:
    """What starts, in a line."""
    num = int(os.environ.get("WORLD_SIZE", "1")) if is_rank() else recipe.train.ranks
    ranks = f"{num} rank{'s' * (num > 1)}" if num else "one rank per GPU"
    return (
        f"shardproof {__version__}: {path}: {recipe.algorithm.name} on {recipe.model.path}, {ranks}, "
        f"{recipe.train.steps} steps, output in {recipe.output.folder}"
    )
