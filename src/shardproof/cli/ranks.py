"""The ranks of `shardproof train`: how they are started, what each runs, and how their end is told."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING

from shardproof.cli.options import EXPLAINED, UNUSABLE, Options, exit_code_of
from shardproof.cli.readiness import count_ranks
from shardproof.errors import ShardproofError
from shardproof.text import printable, sanitise_logging

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

_STOPPED = "stopped by a signal; the same command goes on"


def launch(recipe: Recipe, options: Options) -> None:
    """Start this node's ranks. Signals reach them through the agent, which waits until they have saved."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from shardproof.config.load import to_json
    from shardproof.dist.launch import RankFailed, RanksKilled, start_ranks
    from shardproof.rl.run_facts import COMMAND
    from shardproof.rl.stopping import STOP_EXIT_CODES, STOP_SIGNALS

    os.environ[COMMAND] = shlex.join(["shardproof", *sys.argv[1:]])  # ranks have arguments of their own
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_is_unexplained)
    try:
        start_ranks(
            run_rank,
            to_json(recipe),
            options,
            num_ranks=count_ranks(recipe),
            nnodes=options.nnodes,
            rdzv_endpoint=options.rdzv_endpoint,
            rdzv_id=options.rdzv_id,
            max_restarts=options.max_restarts,
            # A rank that a signal ended is not restarted, nor is a recipe that cannot be used.
            final_exit_codes=(UNUSABLE, *STOP_EXIT_CODES, *(-number for number in STOP_SIGNALS)),
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
        elif error.exit_code not in EXPLAINED:
            print(printable(f"rank {error.rank} failed with {error}"), file=sys.stderr)
        raise SystemExit(error.exit_code if error.exit_code > 0 else 1) from None


def _is_unexplained(record: logging.LogRecord) -> bool:
    """False for the agent's report of a rank that printed its own findings, or was stopped."""
    from shardproof.rl.stopping import STOP_EXIT_CODES

    return not any(f"(exitcode: {code})" in record.getMessage() for code in (*EXPLAINED, *STOP_EXIT_CODES))


def run_rank(recipe_json: str, options: Options) -> dict[str, float]:
    """One rank's run; returns the last step's metrics."""
    sanitise_logging()
    import torch.distributed as dist

    from shardproof.config.load import from_json
    from shardproof.dist.launch import shut_down
    from shardproof.rl.loop import train as run_recipe
    from shardproof.rl.same_run import Resume
    from shardproof.rl.stopping import Stopped

    try:
        # Ranks that are started again go on from their own newest checkpoint.
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        resume = Resume(options.allow, None if again else options.from_step)
        return run_recipe(from_json(recipe_json), resume=resume)
    except Stopped as stop:
        # An exit, not a return: an agent that got a signal too no longer reads what its ranks return.
        raise SystemExit(128 + stop.number) from None
    except ShardproofError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(error, file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None
    finally:
        shut_down()
