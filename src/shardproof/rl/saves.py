"""What a run saves into its folder, and where it goes on: checkpoints of all it trains, and the final model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from shardproof.checkpoints.folders import checkpoint_name
from shardproof.checkpoints.resume import read_files, resume
from shardproof.checkpoints.save import save_checkpoint
from shardproof.dist.collectives import broadcast, together
from shardproof.errors import ShardproofError, error_for, fail
from shardproof.export.manifest import ExportReceipt
from shardproof.export.pretrained import save_pretrained
from shardproof.rl.buffer import Buffer
from shardproof.rl.controllers import Controllers
from shardproof.rl.drift import MismatchWatch
from shardproof.rl.folder import RunFolder
from shardproof.rl.hub import publish
from shardproof.rl.place import ADAPTER, CHECKPOINTS, CRITIC, MODEL, REFERENCE
from shardproof.rl.proofs import proving
from shardproof.rl.saved_rounds import FILE_PREFIX, buffer_files, describe_buffer, restore_buffer
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.trainer import Trainer

logger = logging.getLogger(__name__)

_DAMAGED = ("E407", "E409")


@dataclass(frozen=True)
class Kept:
    """What a run goes on from."""

    policy: Trainer
    critic: Trainer | None
    buffer: Buffer
    controllers: Controllers
    drift: MismatchWatch
    reference: ShardedModel | None
    moves: bool = False  # the reference, in this run

    @property
    def roles(self) -> dict[str, Trainer | ShardedModel]:
        """What a checkpoint has beside the policy: the critic, and a reference that moves or has moved."""
        found: dict[str, Trainer | ShardedModel] = {} if self.critic is None else {CRITIC: self.critic}
        if self.reference is not None and (self.moves or self.reference.version):
            found[REFERENCE] = self.reference
        return found


def resume_last(folder: RunFolder, kept: Kept) -> int:
    """Load the last checkpoint, or the one that was asked for; returns the number of steps taken.

    Settings of optimizer and schedule stay the recipe's: what the user allowed to change takes effect, at once.

    Collective: every rank.
    """
    chosen = folder.resume.from_step
    found: Sequence[int] = broadcast(list(folder.steps) if chosen is None else [chosen] * bool(chosen))
    if not found:
        return 0
    which = checkpoint_name(found[-1])
    logger.info("resuming from the checkpoint of step %d ...", folder.step)
    with proving(folder, folder.step, "resume") as proof, _naming_older(found):
        extra = _resume(folder, CHECKPOINTS, kept.policy, which)
        proof.text = f"resumed from step {extra['step']}"
    _resume_roles(folder, kept, extra, found)
    kept.buffer.stream.position = extra["position"]
    kept.buffer.stream.restore(extra.get("stream", {}))
    # Not in checkpoints of earlier versions.
    if "controllers" in extra:
        kept.controllers.restore(extra["controllers"])
    kept.drift.restore(extra.get("drift", {}))
    if "buffer" in extra:
        _resume_buffer(folder, kept.buffer, extra, found)
    return int(extra["step"])


def _resume_roles(folder: RunFolder, kept: Kept, extra: dict[str, Any], steps: Sequence[int]) -> None:
    """Load what the checkpoint has beside the policy. A reference that it has not never moved until then.

    Collective: every rank.
    """
    step, ours = extra["step"], {CRITIC: kept.critic, REFERENCE: kept.reference}
    saved = extra.get("roles", list(kept.roles))  # checkpoints of earlier versions do not say
    if kept.critic is not None and CRITIC not in saved:
        message = f"the checkpoint of step {step} has no critic: the run was begun without one."
        fix = "use the old algorithm.name, or another output.folder, where model.path may be a model of this run"
        raise fail("C006", "resume", message, fix=fix)
    for role in saved:
        model = ours.get(role)
        if model is None:
            text = (
                f"the {role} of the checkpoint is not needed with these settings; later checkpoints have none"
            )
            logger.warning("%s", text)
            folder.note(step, "resume", text)
            continue
        with proving(folder, folder.step, "resume", role) as proof, _naming_older(steps):
            _resume(folder, role, model, checkpoint_name(step))
            proof.text = f"resumed from step {step}"


def _resume(folder: RunFolder, name: str, what: Trainer | ShardedModel, which: str) -> dict[str, Any]:
    return resume(
        folder.path / name,
        *_parts(what),
        which,
        keep_settings=True,
        places=folder.places,
    )


def _parts(
    what: Trainer | ShardedModel,
) -> tuple[ShardedModel, torch.optim.Optimizer | None, LRScheduler | None]:
    """The model, and what trains it, if anything does."""
    return (
        (what, None, None) if isinstance(what, ShardedModel) else (what.model, what.optimizer, what.scheduler)
    )


def _resume_buffer(folder: RunFolder, buffer: Buffer, extra: dict[str, Any], steps: Sequence[int]) -> None:
    """Take over what was begun for later steps. Collective: every rank."""
    with proving(folder, folder.step, "resume", "buffer") as proof, _naming_older(steps):
        name = checkpoint_name(extra["step"])
        files = read_files(folder.path / CHECKPOINTS, name, FILE_PREFIX, folder.places)
        with together("resume"):
            restore_buffer(buffer, extra["buffer"], files)
        if buffer.rounds:
            num = sum(len(each.known) for each in buffer.rounds)
            proof.text = f"resumed with {num} trajectories that were begun for later steps"


@contextmanager
def _naming_older(steps: Sequence[int]) -> Iterator[None]:
    """Name the older checkpoints that can be taken instead of one that is damaged.

    Where an error has a fix of its own, the older ones would have the same.
    """
    try:
        yield
    except ShardproofError as error:
        older = ", ".join(map(str, reversed(steps[:-1])))
        if not older or error.code not in _DAMAGED:
            raise
        fix = f"resume from an older checkpoint with --from STEP; available steps: {older}"
        raise error_for([replace(each, fix=each.fix or fix) for each in error.findings]) from error


def save(folder: RunFolder, kept: Kept, step: int) -> None:
    """Checkpoint everything. The policy's is written last: it is the one that says a step is complete.

    Collective: every rank.
    """
    keep, name, buffer = folder.recipe.output.keep, checkpoint_name(step), kept.buffer
    files: dict[str, bytes] = {}
    if buffer.rounds:  # on every rank, or on none
        with together("save"):
            files = buffer_files(buffer)
    logger.info("saving the checkpoint of step %d ...", step)
    for role, model in kept.roles.items():
        with proving(folder, step, "checkpoint", role, path=f"{role}/{name}") as proof:
            save_checkpoint(
                folder.path / role, *_parts(model), step=step, keep=keep + 1, places=folder.places
            )
            proof.text = f"saved the {role} after step {step}"
    extra = {
        "step": step,
        "roles": list(kept.roles),
        "position": buffer.stream.position,
        "stream": buffer.stream.state(),
        "buffer": describe_buffer(buffer),
        "controllers": kept.controllers.state(),
        "drift": kept.drift.state(),
    }
    with proving(folder, step, "checkpoint", path=f"{CHECKPOINTS}/{name}") as proof:
        save_checkpoint(
            folder.path / CHECKPOINTS,
            *_parts(kept.policy),
            extra,
            step=step,
            keep=keep,
            files=files,
            places=folder.places,
        )
        proof.text = f"saved the policy after step {step}"


def save_model(folder: RunFolder, policy: ShardedModel, step: int) -> None:
    """Write the final model, and a LoRA run's adapter beside it, once a run is complete; upload it if that is asked for.

    Collective: every rank. Rank 0 alone uploads.
    """
    receipts = write_model(folder, policy, step)
    problem = publish(folder.path, folder.recipe, receipts) if dist.get_rank() == 0 else None
    if problem is not None:
        logger.warning("%s", problem)
        folder.note(step, "publish", problem)


def write_model(
    folder: RunFolder, policy: ShardedModel, step: int, root: str = ""
) -> dict[str, ExportReceipt]:
    """Write the model, and a LoRA run's adapter beside it, into the run's folder, or into a folder `root` in there.

    Collective: every rank.
    """
    name = folder.recipe.output.model_dtype
    dtype = "checkpoint" if name is None else getattr(torch, name)
    receipts = {}
    for place in (MODEL, ADAPTER) if policy.has_lora else (MODEL,):
        path = f"{root}/{place}" if root else place
        target, is_model = folder.path / path, place == MODEL
        logger.info("writing the %s to %s ...", place, target)
        with proving(folder, step, "export", path=path) as proof:
            receipts[place] = save_pretrained(
                policy, target, dtype if is_model else None, merge_lora=is_model
            )
            proof.take(receipts[place])
    return receipts
