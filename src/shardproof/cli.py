"""The command line: `shardproof train recipe.toml [key=value ...]`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.config.schema import Recipe
from shardproof.errors import ShardproofError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Sharded RL post-training in which every rank can prove what it holds."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="a recipe, TOML")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    dry_run: Annotated[bool, typer.Option(help="resolve and check everything, train nothing")] = False,
    nnodes: Annotated[str, typer.Option(help="as torchrun's")] = "1",
    rdzv_endpoint: Annotated[str, typer.Option(help="as torchrun's")] = "localhost:0",
    rdzv_id: Annotated[str, typer.Option(help="as torchrun's")] = "shardproof",
    max_restarts: Annotated[int, typer.Option(help="as torchrun's")] = 0,
) -> None:
    """Train a recipe. The same command resumes it."""
    try:
        checked = load_recipe(recipe, overrides or [])
        if dry_run:
            _dry_run(checked)
        elif "RANK" in os.environ:  # started by torchrun
            run_rank(to_json(checked))
        else:
            _launch(checked, nnodes, rdzv_endpoint, rdzv_id, max_restarts)
    except ShardproofError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _dry_run(recipe: Recipe) -> None:
    """Print the resolved recipe and check its data, rewards and model files."""
    from shardproof.rl.setup import check_data

    print(to_json(recipe))
    _, prompts, held_out = check_data(recipe)
    print(
        f"{len(prompts)} prompts, {len(held_out)} held out; {_num_ranks(recipe)} ranks on this node",
        file=sys.stderr,
    )


def _num_ranks(recipe: Recipe) -> int:
    import torch

    return recipe.train.ranks or max(torch.cuda.device_count(), 1)


def _launch(recipe: Recipe, nnodes: str, endpoint: str, run_id: str, max_restarts: int) -> None:
    """Start the ranks through torch's elastic agent, which also rendezvouses nodes and restarts."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    low, _, high = nnodes.partition(":")
    config = LaunchConfig(
        min_nodes=int(low),
        max_nodes=int(high or low),
        nproc_per_node=_num_ranks(recipe),
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        max_restarts=max_restarts,
    )
    try:
        elastic_launch(config, run_rank)(to_json(recipe))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = f"rank {rank} failed with exit code {failure.exitcode}: {failure.message}"
        print(message, file=sys.stderr)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 1) from None


def run_rank(recipe_json: str) -> dict[str, float]:
    """One rank's run."""
    import torch.distributed as dist

    from shardproof.rl.loop import train as run_recipe

    try:
        return run_recipe(from_json(recipe_json))
    except ShardproofError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(error, file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
