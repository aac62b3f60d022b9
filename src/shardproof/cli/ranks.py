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
from shardproof.cli.options import UNUSABLE, Options, exit_code_of
from shardproof.cli.readiness import count_ranks
from shardproof.dist.signals import SIGNALLED
from shardproof.errors import ShardproofError
from shardproof.terminal import LIBRARIES, Terminal, attached
from shardproof.text import sanitise_logging

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

logger = logging.getLogger(__name__)


def launch(recipe: Recipe, options: Options, terminal: Terminal) -> None:
    """Start this node's ranks and end with the footer of the run.

    Signals reach the ranks through the agent, which waits until they have saved.
    """
    num_ranks = count_ranks(recipe)
    part = Part.begin(recipe, options.from_step)
    logger.info("starting %d rank%s ...", num_ranks, "s" * (num_ranks > 1))
    terminal.pause()  # rank 0 draws from here on
    try:
        code = start_and_wait(recipe, options, num_ranks, run_rank)
    except ShardproofError as error:  # the hosts could not meet, or lost one another
        terminal.show(str(error))
        code = exit_code_of(error)
    show_footer(part, code, terminal)
    if code:
        raise SystemExit(code)


def start_and_wait(
    recipe: Recipe, options: Options, num_ranks: int, function: Callable[[str, Options], Any]
) -> int:
    """The exit code of the ranks, once they have ended. Each calls `function` with the recipe as JSON."""
    from shardproof.config.load import to_json
    from shardproof.dist.start import RankFailed, RanksKilled, RanksStopped, start_ranks
    from shardproof.rl.run_facts import COMMAND
    from shardproof.rl.stopping import STOP_SIGNALS

    os.environ[COMMAND] = shlex.join(["shardproof", *sys.argv[1:]])  # ranks have arguments of their own
    try:
        start_ranks(
            function,
            to_json(recipe),
            options,
            num_ranks=num_ranks,
            together=options.together,
            stop_signals=STOP_SIGNALS,
            refused_code=UNUSABLE,
            loopback_only=not recipe.rollout.vllm.allow_remote,
        )
    except RanksStopped as error:
        return SIGNALLED + error.number
    except RanksKilled:
        logger.warning("interrupted again: the ranks were killed before they could save")
        return SIGNALLED + signal.SIGINT
    except RankFailed as error:
        if not error.was_shown:
            if error.rank is not None:
                logger.error("rank %d failed with %s", error.rank, error)
            else:
                level = logging.ERROR if error.code else logging.INFO  # 0: there is nothing left to do
                logger.log(level, "host %s: %s", error.host, error.message)
        return error.code
    return 0


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
            show_footer(part, code, terminal)


def show_footer(part: Part, code: int, terminal: Terminal) -> None:
    """Show how this part of the run ended, what to look at and what to do next."""
    lines = part.footer(interrupted=code > SIGNALLED)
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
    work: Callable[[Recipe], dict[str, float]] | None = None,
) -> dict[str, float]:
    """One rank's run, in a process whose terminal is attached. `first` is called before it, on every rank.

    `work` is done in place of training.
    """
    # The loop reports each step, with its rewards; the trainer's own line per update would repeat it.
    logging.getLogger("shardproof.train.trainer").setLevel(logging.WARNING)
    logger.info("importing torch and transformers ...")
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
        return run_recipe(recipe, resume=resume) if work is None else work(recipe)
    except Stopped as stop:
        # An exit, not a return: an agent that got a signal too no longer reads what its ranks return.
        raise SystemExit(SIGNALLED + stop.number) from None
    except ShardproofError as error:
        if _is_first_to_say(str(error)):
            terminal.show(str(error))
        raise SystemExit(exit_code_of(error)) from None
    finally:
        shut_down()


def _is_first_to_say(text: str) -> bool:
    """Whether this rank is the first of its host to come here, and so the one that shows the finding.

    Every rank has it, but some may have died, or wait for a rank that did: whoever is first knows the most.
    """
    from shardproof.dist.agent import FINDING_FILE

    path = os.environ.get(FINDING_FILE)
    if path is None:  # started by another launcher
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError:  # the disk is full: a finding that is said twice is better than none
        pass
    return True
