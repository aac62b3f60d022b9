"""Whether a run can start on this machine: the same checks for a start and for a dry run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.cli.options import Options
from shardproof.dist.schedulers import is_rank
from shardproof.errors import error_for
from shardproof.report.read import FACTS_NAME
from shardproof.text import printable

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe
    from shardproof.findings import Finding


def look_ahead(recipe: Recipe, options: Options) -> list[Finding]:
    """Everything that would stop a start on this machine. Nothing is written."""
    from shardproof.dist.start import node_range
    from shardproof.rl import preflight
    from shardproof.rl.same_run import Resume

    num_ranks, num_nodes = count_ranks(recipe), node_range(options.nnodes)[1]
    if is_rank():  # torchrun has decided
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    resume = Resume(options.allow, options.from_step)
    return preflight.look_ahead(preflight.Start(recipe, num_ranks, num_nodes, resume))


def require_start(recipe: Recipe, options: Options) -> None:
    """Raise what would stop a start on this machine, before any rank is started."""
    findings = look_ahead(recipe, options)
    if findings:
        raise error_for(findings)


def says_complete(recipe: Recipe, options: Options) -> str:
    """What to tell a user whose run has nothing left to do; empty if there is something."""
    from shardproof.rl.place import MODEL, read_state

    if options.from_step is not None or options.allow:
        return ""
    folder = Path(recipe.output.folder)
    newest = max(read_state(folder).steps, default=0)
    has_model = (folder / MODEL).is_dir() or not recipe.output.save_model
    if newest < recipe.train.steps or not has_model or not _has_finished(folder, newest):
        return ""
    model = f"Model:   {folder / MODEL}\n" if recipe.output.save_model else ""
    return printable(
        f"This run is complete: {folder} has the checkpoint of step {newest}, and train.steps is "
        f"{recipe.train.steps}.\nReport:  {folder / 'report.html'}\n{model}"
        "Next:    to train longer, raise train.steps; to begin a new run, choose another output.folder"
    )


def _has_finished(folder: Path, step: int) -> bool:
    """Whether a run says that it finished at a step; True where it says nothing.

    One that was killed while it wrote its model may have that of an earlier part, which was to train for fewer steps.
    """
    try:
        facts = json.loads((folder / FACTS_NAME).read_bytes())
    except (OSError, ValueError):
        return True
    return isinstance(facts, dict) and facts.get("status") == "finished" and facts.get("step") == step


def count_ranks(recipe: Recipe) -> int:
    """The ranks of this node: as many as the recipe says, else one per GPU, else one."""
    if recipe.train.ranks:
        return recipe.train.ranks
    import torch

    return max(torch.cuda.device_count(), 1)
