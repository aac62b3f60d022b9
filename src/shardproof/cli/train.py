"""`shardproof train recipe.toml [key=value ...]`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardproof import __version__
from shardproof.cli.options import Options, exit_code_of, is_rank, with_scheduler
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
    nnodes: Annotated[
        str | None,
        typer.Option(
            help="number of hosts, or a range such as 1:4; 1, or what the scheduler says",
            envvar="SHARDPROOF_NNODES",
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where several hosts meet", envvar="SHARDPROOF_RDZV_ENDPOINT"),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(help="shared secret of the run, for several hosts", envvar="SHARDPROOF_RDZV_ID"),
    ] = None,
    local_addr: Annotated[
        str | None,
        typer.Option(help="this host's own address; default: the one that reaches the endpoint"),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="how many times to restart after a rank or a host was lost")
    ] = 0,
    lost_after: Annotated[
        float, typer.Option(min=5, help="seconds without a sign of life after which a host is lost")
    ] = 30.0,
    host_wait: Annotated[
        float,
        typer.Option(
            min=0, help="seconds to wait for more hosts, once there are enough for --nnodes MIN:MAX"
        ),
    ] = 30.0,
    rdzv_timeout: Annotated[
        float, typer.Option(min=1, help="seconds to wait for enough hosts, at the start and after a loss")
    ] = 600.0,
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
    options = Options(
        tuple(allow or ()),
        from_step,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        quiet=quiet,
        on=on,
        local_addr=local_addr,
        lost_after_s=lost_after,
        host_wait_s=host_wait,
        rdzv_timeout_s=rdzv_timeout,
    )
    with attached(quiet, rank=int(os.environ.get("RANK", "0"))) as terminal:
        try:
            if on is not None:
                choose("train", "--on", on, ["ray"])
            options = with_scheduler(options, nnodes)
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
            return
        (launch_on_ray if options.on == "ray" else launch)(recipe, options, terminal)


def _describe(recipe: Recipe, path: str) -> str:
    """What starts, in a line."""
    num = recipe.train.ranks
    ranks = f"{num} rank{'s' * (num > 1)}" if num else "one rank per GPU"
    return (
        f"shardproof {__version__}: {path}: {recipe.algorithm.name} on {recipe.model.path}, {ranks}, "
        f"{recipe.train.steps} steps, output in {recipe.output.folder}"
    )
