"""The ranks of `shardproof train`: how they are started, what each runs, and how their end is told."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardproof.cli.footer import Part
from shardproof.cli.options import EXPLAINED, UNUSABLE, Options, exit_code_of
from shardproof.cli.readiness import count_ranks
from shardproof.errors import ShardproofError
from shardproof.terminal import LIBRARIES, Terminal, attached
from shardproof.text import sanitise_logging

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

logger = logging.getLogger(__name__)

_SIGNALLED = 128  # a shell's exit codes for signals begin above it


def launch(recipe: Recipe, options: Options, terminal: Terminal) -> None:
    """Start this node's ranks and end with the footer of the run.

    Signals reach the ranks through the agent, which waits until they have saved.
    """
    num_ranks = count_ranks(recipe)
    part = Part.begin(recipe, options.from_step)
    logger.info("starting %d rank%s ...", num_ranks, "s" * (num_ranks > 1))
    terminal.pause()  # rank 0 draws from here on
    code = start_and_wait(recipe, options, num_ranks, run_rank)
    _show_footer(part, code, terminal)
    if code:
        raise SystemExit(code)


def start_and_wait(
    recipe: Recipe, options: Options, num_ranks: int, function: Callable[[str, Options], Any]
) -> int:
    """The exit code of the ranks, once they have ended. Each calls `function` with the recipe as JSON."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from shardproof.config.load import to_json
    from shardproof.dist.launch import RankFailed, RanksKilled, start_ranks
    from shardproof.rl.run_facts import COMMAND
    from shardproof.rl.stopping import STOP_EXIT_CODES, STOP_SIGNALS

    os.environ[COMMAND] = shlex.join(["shardproof", *sys.argv[1:]])  # ranks have arguments of their own
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_is_unexplained)
    try:
        start_ranks(
            function,
            to_json(recipe),
            options,
            num_ranks=num_ranks,
            nnodes=options.nnodes,
            rdzv_endpoint=options.rdzv_endpoint,
            rdzv_id=options.rdzv_id,
            max_restarts=options.max_restarts,
            # A rank that a signal ended is not restarted, nor is a recipe that cannot be used.
            final_exit_codes=(UNUSABLE, *STOP_EXIT_CODES, *(-number for number in STOP_SIGNALS)),
            loopback_only=not recipe.rollout.vllm.allow_remote,
        )
    except SignalException as error:
        return _SIGNALLED + error.sigval
    except RanksKilled:
        logger.warning("interrupted again: the ranks were killed before they could save")
        return _SIGNALLED + signal.SIGINT
    except RankFailed as error:
        if error.exit_code not in (*EXPLAINED, *STOP_EXIT_CODES):
            logger.error("rank %d failed with %s", error.rank, error)
        return error.exit_code if error.exit_code > 0 else 1
    return 0


def _is_unexplained(record: logging.LogRecord) -> bool:
    """False for the agent's report of a rank that printed its own findings, or was stopped."""
    from shardproof.rl.stopping import STOP_EXIT_CODES

    return not any(f"(exitcode: {code})" in record.getMessage() for code in (*EXPLAINED, *STOP_EXIT_CODES))


def run_under_torchrun(recipe: Recipe, options: Options, terminal: Terminal) -> None:
    """Run the rank that this process is, and end with the footer of the run on rank 0."""
    from shardproof.config.load import to_json

    part, code = Part.begin(recipe, options.from_step), 0
    try:
        run_attached(to_json(recipe), options, terminal)
    except SystemExit as end:
        code = int(end.code or 0)
        raise
    finally:
        if os.environ["RANK"] == "0":
            _show_footer(part, code, terminal)


def _show_footer(part: Part, code: int, terminal: Terminal) -> None:
    lines = part.footer(interrupted=code > _SIGNALLED)
    for line in ["", *lines] if lines else ():
        terminal.show(line)


def run_rank(recipe_json: str, options: Options) -> dict[str, float]:
    """One rank's run; returns the last step's metrics."""
    sanitise_logging()
    with attached(options.quiet, rank=int(os.environ.get("RANK", "0"))) as terminal:
        return run_attached(recipe_json, options, terminal)


def run_attached(
    recipe_json: str,
    options: Options,
    terminal: Terminal,
    first: Callable[[Recipe, Terminal], None] | None = None,
) -> dict[str, float]:
    """One rank's run, in a process whose terminal is attached. `first` is called before it, on every rank."""
    # The loop reports each step, with its rewards; the trainer's own line per update would repeat it.
    logging.getLogger("shardproof.train.trainer").setLevel(logging.WARNING)
    logger.info("importing torch and transformers ...")
    import torch.distributed as dist
    import transformers

    from shardproof.config.load import from_json
    from shardproof.dist.launch import shut_down
    from shardproof.rl.loop import train as run_recipe
    from shardproof.rl.same_run import Resume
    from shardproof.rl.stopping import Stopped

    terminal.adopt(*LIBRARIES)
    transformers.utils.logging.disable_progress_bar()  # ours would be torn by theirs
    try:
        # Ranks that are started again go on from their own newest checkpoint.
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        resume = Resume(options.allow, None if again else options.from_step)
        recipe = from_json(recipe_json)
        if first is not None:
            first(recipe, terminal)
        return run_recipe(recipe, resume=resume)
    except Stopped as stop:
        # An exit, not a return: an agent that got a signal too no longer reads what its ranks return.
        raise SystemExit(_SIGNALLED + stop.number) from None
    except ShardproofError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            terminal.show(str(error))
        raise SystemExit(exit_code_of(error)) from None
    finally:
        shut_down()
