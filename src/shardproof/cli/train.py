"""`shardproof train recipe.toml [key=value ...]`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from shardproof.cli.options import Options, exit_code_of
from shardproof.errors import ShardproofError


def train(
    recipe: Annotated[str, typer.Argument(help="a recipe, TOML")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything, train nothing")] = False,
    allow: Annotated[
        list[str] | None, typer.Option(help="section.key that may change on resume; may be repeated")
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option("--from", help="go on from this step's checkpoint, not the newest; 0: begin again"),
    ] = None,
    nnodes: Annotated[str, typer.Option(help="as torchrun's")] = "1",
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT, for several nodes")] = None,
    rdzv_id: Annotated[
        str | None, typer.Option(help="a secret of the run, for several nodes", envvar="SHARDPROOF_RDZV_ID")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="starts after a rank was lost")] = 0,
) -> None:
    """Train a recipe. The same command resumes it."""
    options = Options(tuple(allow or ()), from_step, nnodes, rdzv_endpoint, rdzv_id, max_restarts)
    try:
        _train(recipe, overrides or [], options, dry_run)
    except ShardproofError as error:
        print(error, file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None


def _train(path: str, overrides: list[str], options: Options, is_dry: bool) -> None:
    from shardproof.cli.dry_run import dry_run
    from shardproof.cli.ranks import launch, run_rank
    from shardproof.cli.readiness import require_start
    from shardproof.config.load import load_recipe, to_json

    recipe = load_recipe(path, overrides)
    if is_dry:
        dry_run(recipe, options)
    elif "RANK" in os.environ:  # started by torchrun
        if os.environ.get("LOCAL_RANK", "0") == "0":
            require_start(recipe, options)
        run_rank(to_json(recipe), options)
    else:
        require_start(recipe, options)
        launch(recipe, options)
