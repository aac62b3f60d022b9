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
from shardproof.errors import ConfigError, ShardproofError, error_for
from shardproof.findings import Finding
from shardproof.rl.stopping import STOP_EXIT_CODES, STOP_SIGNALS, Stopped
from shardproof.text import printable, sanitise_logging

_EXPLAINED = (2, 3)  # exit codes of ranks that print their findings
_OF_THE_RECIPE = ("L101",)  # what is wrong in a recipe, though it is found where models are loaded
_Resume = tuple[tuple[str, ...], int | None]  # the arguments of `Resume`
_STOPPED = "stopped by a signal; the same command goes on"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command(cls=CountingCommand)(doctor)
app.command(cls=CountingCommand)(estimate)


@app.callback()
def main() -> None:
    """Sharded RL post-training in which every rank can prove what it holds."""
    sanitise_logging()


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="a recipe, TOML")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    dry_run: Annotated[bool, typer.Option(help="resolve and check everything, train nothing")] = False,
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
    try:
        checked = load_recipe(recipe, overrides or [])
        resume = (tuple(allow or ()), from_step)
        if dry_run:
            _dry_run(checked, resume, nnodes)
        elif "RANK" in os.environ:  # started by torchrun
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _require_start(checked, resume, nnodes)
            run_rank(to_json(checked), *resume)
        else:
            _require_start(checked, resume, nnodes)
            _launch(checked, resume, nnodes, rdzv_endpoint, rdzv_id, max_restarts)
    except ShardproofError as error:
        print(error, file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None


def exit_code_of(error: ShardproofError) -> int:
    """2 for a recipe or data that cannot be used, 3 for a run that a finding stopped."""
    unusable, stopped = _EXPLAINED
    return unusable if isinstance(error, ConfigError) or error.code in _OF_THE_RECIPE else stopped


def _dry_run(recipe: Recipe, resume: _Resume, nnodes: str) -> None:
    """Print the resolved recipe, then everything that would stop its start. Nothing is written."""
    from shardproof.dist.launch import node_range
    from shardproof.rl.checks import check_inputs, check_model
    from shardproof.rl.place import check_content, check_folder
    from shardproof.rl.same_run import Resume

    print(to_json(recipe), flush=True)
    num_nodes, num_ranks = node_range(nnodes)[0], _num_ranks(recipe)
    findings = _look_ahead(recipe, resume, nnodes)
    summary = ""
    try:
        inputs = check_inputs(recipe)
        summary = f"{len(inputs.prompts)} prompts, {len(inputs.held_out)} held out; "
        check_model(recipe, inputs.config, num_nodes * num_ranks)
        state = check_folder(recipe, Resume(*resume))
        check_content(state, recipe, inputs.prompts, inputs.held_out, Resume(*resume))
    except ShardproofError as error:
        findings += [finding for finding in error.findings if finding not in findings]
    if findings:
        print(*findings, sep="\n", file=sys.stderr)
        raise SystemExit(_EXPLAINED[0])
    print(f"{summary}{num_nodes} x {num_ranks} ranks; nothing is wrong", file=sys.stderr)


def _look_ahead(recipe: Recipe, resume: _Resume, nnodes: str) -> list[Finding]:
    from shardproof.dist.launch import node_range
    from shardproof.rl.preflight import Start, look_ahead
    from shardproof.rl.same_run import Resume

    num_ranks, num_nodes = _num_ranks(recipe), node_range(nnodes)[1]
    if "RANK" in os.environ:  # torchrun has decided
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return look_ahead(Start(recipe, num_ranks, num_nodes, Resume(*resume)))


def _require_start(recipe: Recipe, resume: _Resume, nnodes: str) -> None:
    """Raise what would stop a start on this machine, before any rank is started."""
    findings = _look_ahead(recipe, resume, nnodes)
    if findings:
        raise error_for(findings)


def _num_ranks(recipe: Recipe) -> int:
    import torch

    return recipe.train.ranks or max(torch.cuda.device_count(), 1)


def _launch(
    recipe: Recipe, resume: _Resume, nnodes: str, endpoint: str | None, run_id: str | None, max_restarts: int
) -> None:
    """Start this node's ranks. Signals reach them through the agent, which waits until they have saved."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from shardproof.dist.launch import RankFailed, RanksKilled, start_ranks

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_is_unexplained)
    try:
        start_ranks(
            run_rank,
            to_json(recipe),
            *resume,
            num_ranks=_num_ranks(recipe),
            nnodes=nnodes,
            rdzv_endpoint=endpoint,
            rdzv_id=run_id,
            max_restarts=max_restarts,
            # A rank that a signal ended is not restarted, nor is a recipe that cannot be used.
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
            print(printable(f"rank {error.rank} failed with {error}"), file=sys.stderr)
        raise SystemExit(error.exit_code if error.exit_code > 0 else 1) from None


def _is_unexplained(record: logging.LogRecord) -> bool:
    """False for the agent's report of a rank that printed its own findings, or was stopped."""
    return not any(f"(exitcode: {code})" in record.getMessage() for code in (*_EXPLAINED, *STOP_EXIT_CODES))


def run_rank(recipe_json: str, allow: tuple[str, ...] = (), from_step: int | None = None) -> dict[str, float]:
    """One rank's run."""
    sanitise_logging()
    import torch.distributed as dist

    from shardproof.dist.launch import shut_down
    from shardproof.rl.loop import train as run_recipe
    from shardproof.rl.same_run import Resume

    try:
        # Ranks that are started again go on from their own newest checkpoint.
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        return run_recipe(from_json(recipe_json), resume=Resume(allow, None if again else from_step))
    except Stopped as stop:
        # An exit, not a return: an agent that got a signal too no longer reads what its ranks return.
        raise SystemExit(128 + stop.number) from None
    except ShardproofError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(error, file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None
    finally:
        shut_down()
