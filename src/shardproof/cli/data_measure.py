"""`shardproof data --measure N`: the ranks that measure how often each prompt is solved."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.cli.options import Options
from shardproof.cli.ranks import run_attached, start_and_wait
from shardproof.cli.readiness import count_ranks
from shardproof.errors import fail
from shardproof.terminal import Terminal, attached
from shardproof.text import sanitise_logging

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

logger = logging.getLogger(__name__)
_NAME = "pass_rates.jsonl"
_SUFFIXES = (".jsonl", ".json")  # of files with an object per line


def measure_rates(recipe: Recipe, num_samples: int, path: Path | None, terminal: Terminal) -> None:
    """Start the recipe's ranks, which write the file; says what was found."""
    if recipe.reward is None and recipe.environment is None:
        fix = "name a function in reward.functions, with weight=0 if it is only to be measured"
        raise fail(
            "C001", "data", "--measure needs rewards: nothing says which completions are right.", fix=fix
        )
    target = path or Path(recipe.data.pass_rates or _NAME)
    _require_writable(target)
    # What would be read from the file does not decide what is written to it.
    unfiltered = {"pass_rates": None, "pass_rate_between": None, "curriculum": None}
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=unfiltered)})
    num_ranks = count_ranks(recipe)
    logger.info("starting %d rank%s ...", num_ranks, "s" * (num_ranks > 1))
    terminal.pause()
    function = partial(measure_rank, num_samples=num_samples, path=str(target))
    code = start_and_wait(recipe, Options(), num_ranks, function)
    if code:
        raise SystemExit(code)


def _require_writable(target: Path) -> None:
    """Raise if no file of pass rates can be written there, or none that `data.pass_rates` reads."""
    told = f"--to {str(target)!r}"
    if not target.absolute().parent.is_dir():
        raise fail("C001", "data", f"{told}: the folder does not exist.", fix="make it first")
    if target.is_dir():
        raise fail("C001", "data", f"{told} is a folder.", fix="name a file in it")
    if target.suffix not in _SUFFIXES:
        message = (
            f"{told}: an object per line is written, which is read from {' and '.join(_SUFFIXES)} files."
        )
        raise fail("C001", "data", message, fix=f"call it {str(target.with_suffix('.jsonl'))!r}")


def measure_rank(recipe_json: str, options: Options, num_samples: int, path: str) -> dict[str, float]:
    """One rank's part."""
    sanitise_logging()
    rank = int(os.environ.get("RANK", "0"))
    with attached(options.quiet, rank=rank) as terminal:
        from shardproof.rl.measuring import measure_pass_rates

        found = run_attached(
            recipe_json,
            options,
            terminal,
            work=lambda recipe: measure_pass_rates(recipe, num_samples, Path(path)),
        )
        if rank == 0:
            terminal.pause()
            terminal.show(
                f"{path}: {found['prompts']:.0f} prompts, {num_samples} completions each: solved "
                f"{found['mean']:.1%}, never {found['never']:.0f}, always {found['always']:.0f}"
            )
        return found
