"""The command line: `shardproof train recipe.toml [key=value ...]`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Annotated

import typer

from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.config.schema import Recipe
from shardproof.doctor.commands import CountingCommand, doctor, estimate
from shardproof.errors import ConfigError, ShardproofError
from shardproof.rl.stopping import STOP_EXIT_CODES, STOP_SIGNALS, Stopped

_EXPLAINED = (2, 3)  # exit codes of ranks that print their findings
_STOPPED = "stopped by a signal; the same command goes on"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command(cls=CountingCommand)(doctor)
app.command(cls=CountingCommand)(estimate)


@app.callback()
def main() -> None:
    """Sharded RL post-training in which every rank can prove what it holds."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="a recipe, TOML")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    dry_run: Annotated[bool, typer.Option(help="resolve and check everything, train nothing")] = False,
    nnodes: Annotated[str, typer.Option(help="as torchrun's")] = "1",
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT, for several nodes")] = None,
    rdzv_id: Annotated[
        str | None, typer.Option(help="a secret of the run, for several nodes", envvar="SHARDPROOF_RDZV_ID")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="starts after a rank was lost")] = 0,
) -> None:
    """Train a recipe. The same command resumes it."""
    try:
        checked = load_recipe(recipe, overrides or [])
        if dry_run:
            _dry_run(checked, nnodes)
        elif "RANK" in os.environ:  # started by torchrun
            run_rank(to_json(checked))
        else:
            _launch(checked, nnodes, rdzv_endpoint, rdzv_id, max_restarts)
    except ShardproofError as error:
        print(error, file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None


def exit_code_of(error: ShardproofError) -> int:
    """2 for a recipe or data that cannot be used, 3 for a run that a finding stopped."""
    unusable, stopped = _EXPLAINED
    return unusable if isinstance(error, ConfigError) else stopped


def _dry_run(recipe: Recipe, nnodes: str) -> None:
    """Print the resolved recipe; check its folder, data, rewards, checkpoint and layout. Nothing is written."""
    from shardproof.rl.checks import check_folder, check_inputs, check_model

    print(to_json(recipe))
    check_folder(recipe)
    inputs = check_inputs(recipe)
    num_nodes, num_ranks = int(nnodes.partition(":")[0]), _num_ranks(recipe)
    check_model(recipe, inputs.config, num_nodes * num_ranks)
    found = f"{len(inputs.prompts)} prompts, {len(inputs.held_out)} held out"
    print(f"{found}; {num_nodes} x {num_ranks} ranks; nothing is wrong", file=sys.stderr)


def _num_ranks(recipe: Recipe) -> int:
    import torch

    return recipe.train.ranks or max(torch.cuda.device_count(), 1)


def _launch(recipe: Recipe, nnodes: str, endpoint: str | None, run_id: str | None, max_restarts: int) -> None:
    """Start this node's ranks. Signals reach them through the agent, which waits until they have saved."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from shardproof.dist.launch import RankFailed, RanksKilled, start_ranks

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_said_enough)
    try:
        start_ranks(
            run_rank,
            to_json(recipe),
            num_ranks=_num_ranks(recipe),
            nnodes=nnodes,
            rdzv_endpoint=endpoint,
            rdzv_id=run_id,
            max_restarts=max_restarts,
            # A rank that a signal ended is not lost, and a recipe that cannot be used will not become usable.
            final_exit_codes=(_EXPLAINED[0], *STOP_EXIT_CODES, *(-number for number in STOP_SIGNALS)),
            loopback_only=not recipe.rollout.vllm.allow_remote,
        )
    except SignalException as error:
        print(_STOPPED, file=sys.stderr)
        raise SystemExit(128 + error.sigval) from None
    except RanksKilled:
        print("interrupted again; the same command goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except RankFailed as error:
        if error.exit_code in STOP_EXIT_CODES:  # a signal to a rank, or to another node
            print(_STOPPED, file=sys.stderr)
        elif error.exit_code not in _EXPLAINED:
            print(f"rank {error.rank} failed with {error}", file=sys.stderr)
        raise SystemExit(error.exit_code if error.exit_code > 0 else 1) from None


def _said_enough(record: logging.LogRecord) -> bool:
    """False for the agent's report of a rank that has said itself what was wrong, or was stopped."""
    return not any(f"(exitcode: {code})" in record.getMessage() for code in (*_EXPLAINED, *STOP_EXIT_CODES))


def run_rank(recipe_json: str) -> dict[str, float]:
    """One rank's run."""
    import torch.distributed as dist

    from shardproof.dist.launch import shut_down
    from shardproof.rl.loop import train as run_recipe

    try:
        return run_recipe(from_json(recipe_json))
    except Stopped as stop:
        # An exit, not a return: an agent that got a signal too no longer reads what its ranks return.
        raise SystemExit(128 + stop.number) from None
    except ShardproofError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(error, file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None
    finally:
        shut_down()
