"""The run's folder: whose it is, what is kept in it, and where a run goes on."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from shardproof.config.load import to_json
from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange
from shardproof.export.folders import list_checkpoints
from shardproof.export.pretrained import save_pretrained
from shardproof.export.state import resume, save_checkpoint
from shardproof.rl.checks import CONFIG_NAME, check_folder
from shardproof.rl.experience import Experience
from shardproof.rl.loggers import EVENTS_NAME, SAMPLES_NAME, append_line
from shardproof.rl.report import write_report
from shardproof.rl.setup import Run

_POLICY, _CRITIC, _MODEL = "checkpoints", "critic", "model"


def claim_folder(folder: Path, recipe: Recipe) -> None:
    """Make the run's folder, or check that it is this recipe's. Only rank 0 writes."""
    check_folder(recipe)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: the other ranks may be reading it.
        partial = folder / f"{CONFIG_NAME}.partial"
        partial.write_text(to_json(recipe))
        partial.replace(folder / CONFIG_NAME)


def go_on(run: Run, folder: Path) -> int:
    """Load the last checkpoint, if there is one; returns the number of steps taken. Collective: every rank."""
    checkpoints = folder / _POLICY
    found = list_checkpoints(checkpoints) if checkpoints.is_dir() else []
    if not any(exchange(bool(found))):
        return 0
    policy, critic = run.policy, run.critic
    extra = resume(checkpoints, policy.model, policy.optimizer, policy.scheduler)
    if critic is not None:
        name = f"step-{extra['step']:08d}"
        resume(folder / _CRITIC, critic.model, critic.optimizer, critic.scheduler, name)
    run.stream.position = extra["position"]
    return int(extra["step"])


def save(run: Run, folder: Path, step: int) -> None:
    """Checkpoint everything. The policy's is written last: it is the one that says a step is complete.

    Collective: every rank.
    """
    keep, policy, critic = run.recipe.output.keep, run.policy, run.critic
    if critic is not None:
        save_checkpoint(
            folder / _CRITIC, critic.model, critic.optimizer, critic.scheduler, step=step, keep=keep + 1
        )
    extra = {"step": step, "position": run.stream.position}
    save_checkpoint(
        folder / _POLICY, policy.model, policy.optimizer, policy.scheduler, extra, step=step, keep=keep
    )


def save_model(run: Run, folder: Path, step: int) -> None:
    """Write the final model, once a run is complete. Collective: every rank."""
    name = run.recipe.output.model_dtype
    dtype = "checkpoint" if name is None else getattr(torch, name)
    note(folder, step, "receipt", str(save_pretrained(run.policy.model, folder / _MODEL, dtype)))


def report(folder: Path) -> None:
    if dist.get_rank() == 0:
        write_report(folder)


def write_samples(run: Run, experience: Experience, folder: Path, step: int) -> None:
    """Keep some of the step's completions with their rewards."""
    if dist.get_rank() != 0:
        return
    lines = [
        {"step": step, "prompt": group.prompt.text, "completion": text, "reward": reward, "rewards": parts}
        for group in experience.groups
        for text, reward, parts in zip(group.texts, group.rewards, group.parts, strict=True)
    ]
    for line in lines[: run.recipe.output.samples_per_step]:
        append_line(folder / SAMPLES_NAME, line)


def note(folder: Path, step: int, kind: str, text: str) -> None:
    """Add an event: a receipt, a finding, a skipped step, a reward that failed."""
    if dist.get_rank() == 0:
        append_line(folder / EVENTS_NAME, {"step": step, "kind": kind, "text": text})
