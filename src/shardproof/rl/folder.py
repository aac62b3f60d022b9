"""The run's folder: whose it is, what is kept in it, and where a run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.checkpoints.folders import checkpoint_name
from shardproof.checkpoints.resume import read_files, resume
from shardproof.checkpoints.save import save_checkpoint
from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.errors import ShardproofError, error_for, fail
from shardproof.export.pretrained import save_pretrained
from shardproof.files import FolderLock, append_line, current_folder, replace_folder
from shardproof.report.page import write_report
from shardproof.report.read import EVENTS_NAME
from shardproof.rl.buffer import Buffer
from shardproof.rl.data import Prompt
from shardproof.rl.hub import publish
from shardproof.rl.loggers import LINES, JsonLines, Logger, Progress, supersede
from shardproof.rl.place import (
    ADAPTER,
    CHECKPOINTS,
    CRITIC,
    MODEL,
    State,
    check_content,
    check_folder,
    checkpoint_steps,
    write_settings,
)
from shardproof.rl.proofs import proving
from shardproof.rl.run_facts import take_facts, write_facts
from shardproof.rl.same_run import Resume, take_digests
from shardproof.rl.saved_rounds import FILE_PREFIX, buffer_files, describe_buffer, restore_buffer
from shardproof.rl.trackers import Trackers
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.trainer import Trainer

logger = logging.getLogger(__name__)

SUPERSEDED = "superseded-"  # checkpoints and models that a run went back behind
_DAMAGED = ("E407", "E409")


class RunFolder:
    """One run's claim on its folder, and what rank 0 writes there.

    Rank 0 alone writes lines, so an error of its disk must not end it alone: `problem` keeps the first one until
    `end_step` tells every rank.
    """

    def __init__(self, recipe: Recipe, resume: Resume | None = None):
        self.recipe, self.resume = recipe, resume or Resume()
        self.path = Path(recipe.output.folder)
        self.problem: str | None = None
        self.outputs: list[Logger] = []
        self.trackers = Trackers(self.path, self.note)
        self.step = 0  # the last one that was taken, or that the run resumes from
        self._state = State()
        self._facts: dict[str, Any] = {}
        self._lock: FolderLock | None = None

    def claim(self) -> None:
        """Check that the folder is this run's, or may be, and lock it. Only rank 0 looks and writes."""
        if dist.get_rank() != 0:
            return
        lock = FolderLock(self.path)
        try:
            check_folder(self.recipe, self.resume)
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire("output")
            self._lock = lock
            # Once more: until now another run may have been at work here.
            self._state = check_folder(self.recipe, self.resume)
            if self.resume.from_step is not None:
                self._rewind(self.resume.from_step)
            if self.resume.from_step == 0 or not self._state.steps:
                self._supersede(-1)  # nothing that is there belongs to a run that begins, not even its step 0
            if not self._state.is_used:
                write_settings(self.path, self.recipe, {})
            self.step = (
                max(self._state.steps, default=0) if self.resume.from_step is None else self.resume.from_step
            )
            self._facts = take_facts(self.recipe)
            write_facts(self.path, self._facts, "running", self.step)
        except OSError as error:
            message = f"{self.path} cannot be written: {error.strerror or error}."
            raise fail("C007", "output", message, fix="use an output.folder that you can write to") from error

    def check_content(self, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
        """Raise if data or models hold other things than when the run was begun. Only rank 0 looks."""
        if dist.get_rank() == 0:
            check_content(self._state, self.recipe, prompts, held_out, self.resume)

    def begin(
        self, prompts: Sequence[Prompt], held_out: Sequence[Prompt], step: int, loggers: Sequence[Logger]
    ) -> None:
        """Make the folder this part's: its settings, and its lines up to `step`. Only rank 0 writes."""
        if dist.get_rank() != 0:
            return
        self.outputs = [*loggers]
        try:
            recipe = self.recipe
            self.outputs += [JsonLines(self.path, step), Progress(recipe.train.steps, step)]
            write_settings(self.path, recipe, take_digests(recipe, prompts, held_out))
            is_new = self.resume.from_step is not None or not self._state.is_used
            self.trackers.start(recipe, step, self._state.last_step, is_new)
        except OSError as error:
            raise _unwritten(f"{error.filename or self.path}: {error.strerror or error}") from error

    def _rewind(self, step: int) -> None:
        """Put aside what is later than a step, under names that say so: neither a restart nor a resume prefers it."""
        for root in (self.path / CHECKPOINTS, self.path / CRITIC):
            for later in checkpoint_steps(root):
                if later > step:
                    self._put_aside(step, root / checkpoint_name(later))
        for name in (MODEL, ADAPTER):  # where there is one, a run was complete
            if (self.path / name).is_dir():
                self._put_aside(step, self.path / name)
        self._supersede(step)

    def _put_aside(self, step: int, folder: Path) -> None:
        aside = folder.with_name(f"{SUPERSEDED}{folder.name}")
        replace_folder(current_folder(folder), aside)
        old, new = (path.relative_to(self.path) for path in (folder, aside))
        self.note(step, "superseded", f"{old} is now {new}")

    def _supersede(self, step: int) -> None:
        for name in LINES:
            supersede(self.path / name, step)

    def note(self, step: int, kind: str, text: str, **fields: Any) -> None:
        """Add an event: a proof, a finding, a skipped step, a reward that failed."""
        self.append(EVENTS_NAME, {"step": step, "kind": kind, "text": text, **fields})

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Add a line to one of the run's files. Only rank 0 writes."""
        if dist.get_rank() == 0:
            try:
                append_line(self.path / name, line)
            except OSError as error:
                self._keep(f"{name}: {error.strerror or error}")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Hand a step's metrics to every logger."""
        self.step = step
        for each in self.outputs:
            try:
                each.log(step, metrics)
            except Exception as error:  # a logger may be the user's
                self._keep(f"{type(each).__name__}: {type(error).__name__}: {error}")
        self.trackers.log(step, metrics)

    def end_step(self, number: int, ready: bool = False) -> tuple[int, bool]:
        """(the largest of the ranks' signal numbers, 0 for none; whether all ranks are `ready`).

        Raises if rank 0 could not write the step's lines. Collective: every rank.
        """
        if self._lock is not None and self._lock.is_lost():
            self._keep(f"{self.path} was removed, moved or replaced while the run was using it")
        rows = exchange([number, self.problem, ready])
        problem = next((text for _, text, _ in rows if text is not None), None)
        if problem is not None:
            raise _unwritten(problem)
        return max(each for each, _, _ in rows), all(is_ready for *_, is_ready in rows)

    def close_outputs(self) -> None:
        outputs, self.outputs = self.outputs, []
        for each in outputs:
            try:
                each.close()
            except Exception as error:
                self._keep(f"{type(each).__name__}: {type(error).__name__}: {error}")

    def end(self, status: str, error: BaseException | None = None) -> None:
        """Note how the run ended, and write its page. Only rank 0 writes, and only where the folder is the run's."""
        self.close_outputs()
        if self._lock is None:
            return
        for text in _described(error):
            self.note(self.step, "finding", text)
        try:
            write_facts(self.path, self._facts, status, self.step)
            write_report(self.path)
        except Exception as problem:  # a page that cannot be made costs a line, not the run
            text = f"report.html was not written: {type(problem).__name__}: {problem}"
            self.note(self.step, "report", text)
            logger.warning("%s", text)
        self.trackers.close(status)

    def release(self) -> None:
        """Give the folder up."""
        self.close_outputs()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _keep(self, problem: str) -> None:
        self.problem = self.problem or problem


def _described(error: BaseException | None) -> list[str]:
    """What ended a run, one text per finding."""
    if error is None:
        return []
    if isinstance(error, ShardproofError):
        return [str(finding) for finding in error.findings]
    return [f"{type(error).__name__}: {error}"]


def _unwritten(problem: str) -> ShardproofError:
    fix = "free space or repair the folder, then rerun the same command to resume from the last checkpoint"
    return fail(
        "E408",
        "output",
        f"the run's metrics, samples or events could not be written: {problem}.",
        rank=0,
        fix=fix,
    )


def resume_last(folder: RunFolder, policy: Trainer, critic: Trainer | None, buffer: Buffer) -> int:
    """Load the last checkpoint, or the one that was asked for; returns the number of steps taken.

    Settings of optimizer and schedule stay the recipe's: what the user allowed to change takes effect, at once.

    Collective: every rank.
    """
    chosen = folder.resume.from_step
    found = checkpoint_steps(folder.path / CHECKPOINTS) if chosen is None else (chosen,) * bool(chosen)
    if not any(exchange(bool(found))):
        return 0
    which = "latest" if chosen is None else checkpoint_name(chosen)
    logger.info("resuming from the checkpoint of step %d ...", folder.step)
    with proving(folder, folder.step, "resume") as proof, _naming_older(found):
        extra = _resume(folder.path / CHECKPOINTS, policy, which)
        proof.text = f"resumed from step {extra['step']}"
    if critic is not None:
        with proving(folder, folder.step, "resume", "critic") as proof, _naming_older(found):
            _resume(folder.path / CRITIC, critic, checkpoint_name(extra["step"]))
            proof.text = f"resumed from step {extra['step']}"
    buffer.stream.position = extra["position"]
    if "buffer" in extra:  # not in checkpoints of earlier versions
        _resume_buffer(folder, buffer, extra, found)
    return int(extra["step"])


def _resume(folder: Path, trained: Trainer, which: str) -> dict[str, Any]:
    return resume(folder, trained.model, trained.optimizer, trained.scheduler, which, keep_settings=True)


def _resume_buffer(folder: RunFolder, buffer: Buffer, extra: dict[str, Any], steps: Sequence[int]) -> None:
    """Take over what was begun for later steps. Collective: every rank."""
    with (
        proving(folder, folder.step, "resume", "buffer") as proof,
        _naming_older(steps),
        together("resume"),
    ):
        files = read_files(folder.path / CHECKPOINTS, checkpoint_name(extra["step"]), FILE_PREFIX)
        restore_buffer(buffer, extra["buffer"], files)
        if buffer.rounds:
            num = sum(len(each.known) for each in buffer.rounds)
            proof.text = f"resumed with {num} trajectories that were begun for later steps"


@contextmanager
def _naming_older(steps: Sequence[int]) -> Iterator[None]:
    """Name the older checkpoints that can be taken instead of one that is damaged."""
    try:
        yield
    except ShardproofError as error:
        older = ", ".join(map(str, reversed(steps[:-1])))
        if not older or error.code not in _DAMAGED:
            raise
        fix = f"resume from an older checkpoint with --from STEP; available steps: {older}"
        raise error_for([replace(finding, fix=fix) for finding in error.findings]) from error


def save(folder: RunFolder, policy: Trainer, critic: Trainer | None, buffer: Buffer, step: int) -> None:
    """Checkpoint everything. The policy's is written last: it is the one that says a step is complete.

    Collective: every rank.
    """
    keep, name = folder.recipe.output.keep, checkpoint_name(step)
    files: dict[str, bytes] = {}
    if buffer.rounds:  # on every rank, or on none
        with together("save"):
            files = buffer_files(buffer)
    logger.info("saving the checkpoint of step %d ...", step)
    if critic is not None:
        with proving(folder, step, "checkpoint", "critic", path=f"{CRITIC}/{name}") as proof:
            save_checkpoint(
                folder.path / CRITIC,
                critic.model,
                critic.optimizer,
                critic.scheduler,
                step=step,
                keep=keep + 1,
            )
            proof.text = f"saved the critic after step {step}"
    extra = {"step": step, "position": buffer.stream.position, "buffer": describe_buffer(buffer)}
    with proving(folder, step, "checkpoint", path=f"{CHECKPOINTS}/{name}") as proof:
        save_checkpoint(
            folder.path / CHECKPOINTS,
            policy.model,
            policy.optimizer,
            policy.scheduler,
            extra,
            step=step,
            keep=keep,
            files=files,
        )
        proof.text = f"saved the policy after step {step}"


def save_model(folder: RunFolder, policy: ShardedModel, step: int) -> None:
    """Write the final model, and a LoRA run's adapter beside it, once a run is complete; upload it if that is asked for.

    Collective: every rank. Rank 0 alone uploads.
    """
    name = folder.recipe.output.model_dtype
    dtype = "checkpoint" if name is None else getattr(torch, name)
    receipts = {}
    for place in (MODEL, ADAPTER) if policy.has_lora else (MODEL,):
        logger.info("writing the %s to %s ...", place, folder.path / place)
        is_model = place == MODEL
        with proving(folder, step, "export", path=place) as proof:
            target = folder.path / place
            receipts[place] = save_pretrained(
                policy, target, dtype if is_model else None, merge_lora=is_model
            )
            proof.take(receipts[place])
    problem = publish(folder.path, folder.recipe, receipts) if dist.get_rank() == 0 else None
    if problem is not None:
        logger.warning("%s", problem)
        folder.note(step, "publish", problem)
