"""The run's folder: whose it is, and what rank 0 writes there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardproof.checkpoints.folders import checkpoint_name
from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.dist.shared_folder import on_host
from shardproof.dist.sharing import Places
from shardproof.errors import ShardproofError, fail
from shardproof.files import append_line, current_folder, replace_folder
from shardproof.report.page import write_report
from shardproof.report.read import EVENTS_NAME
from shardproof.rl.claim import INCOMPLETE, Claim
from shardproof.rl.data import HeldOutPrompts, Prompt
from shardproof.rl.loggers import LINES, JsonLines, Logger, Progress, supersede
from shardproof.rl.place import (
    ADAPTER,
    BEST,
    CHECKPOINTS,
    CRITIC,
    MODEL,
    REFERENCE,
    SETTINGS_NAME,
    State,
    check_content,
    checkpoint_steps,
    is_comparable,
    read_best,
    write_settings,
)
from shardproof.rl.run_facts import take_facts, write_facts
from shardproof.rl.same_run import Digests, Resume, take_digests
from shardproof.rl.trackers import Trackers

logger = logging.getLogger(__name__)

SUPERSEDED = "superseded-"  # checkpoints and models that a run went back behind
_LOST = "was removed, moved or taken over while the run was using it"


class RunFolder:
    """One run's claim on its folder, and what rank 0 writes there.

    Rank 0 alone writes lines, so an error of its disk must not end it alone: `problem` keeps the first one until
    `end_step` tells every rank.
    """

    def __init__(self, recipe: Recipe, resume: Resume | None = None, hosts: Sequence[Mapping[str, Any]] = ()):
        """`hosts` are what the hosts of the run have, where there are several."""
        self.recipe, self.resume, self._hosts = recipe, resume or Resume(), hosts
        self.path = Path(recipe.output.folder)
        self.problem: str | None = None
        self.outputs: list[Logger] = []
        self.trackers = Trackers(self.path, self.note)
        self.step = 0  # the last one that was taken, or that the run resumes from
        self._claim = Claim(recipe, self.resume)
        self._facts: dict[str, Any] = {}

    @property
    def places(self) -> Places:
        """The folders of the hosts, if they share none."""
        return self._claim.places

    @property
    def steps(self) -> tuple[int, ...]:
        """On rank 0: the steps of the checkpoints that the run found, of all hosts together."""
        return self._state.steps

    @property
    def _state(self) -> State:
        return self._claim.state

    def claim(self) -> None:
        """Check that the folder is this run's, or may be, and lock it. Where hosts share none, each has one.

        Collective: every rank.
        """
        self._claim.take()
        with together("output"):
            try:
                if self._claim.is_held:
                    self._open()
            except OSError as error:
                message = f"{on_host()}{self.path} cannot be written: {error.strerror or error}."
                fix = "use an output.folder that you can write to"
                raise fail("C007", "output", message, fix=fix) from error

    def _open(self) -> None:
        """Put aside what the run goes back behind, and note that it runs. One rank of each place."""
        chosen, state = self.resume.from_step, self._state
        for name in self._claim.interrupted:
            self.note(0, "superseded", f"{CHECKPOINTS}/{name} was not finished; it is now {INCOMPLETE}{name}")
        if chosen is not None:
            self._rewind(chosen)
        if dist.get_rank() != 0:
            if not (self.path / SETTINGS_NAME).exists():
                write_settings(self.path, self.recipe, {})
            return
        if chosen == 0 or not state.steps:
            self._supersede(-1)  # nothing that is there belongs to a run that begins, not even its step 0
        if not state.is_used:
            write_settings(self.path, self.recipe, {})
        self.step = max(state.steps, default=0) if chosen is None else chosen
        self._put_aside_best(self.step)
        self._facts = take_facts(self.recipe, self._hosts)
        write_facts(self.path, self._facts, "running", self.step)

    def check_content(self, prompts: Sequence[Prompt], held_out: HeldOutPrompts) -> None:
        """Raise if data or models hold other things than when the run was begun. Only rank 0 looks."""
        if dist.get_rank() == 0:
            check_content(self._state, self.recipe, prompts, held_out, self.resume)

    def begin(
        self, prompts: Sequence[Prompt], held_out: HeldOutPrompts, step: int, loggers: Sequence[Logger]
    ) -> None:
        """Make the folder this part's: its settings, and its lines up to `step`.

        Rank 0 writes; where hosts share no folder, one rank of each notes the settings. Collective: every rank.
        """
        with together("output") as told, _writing(self.path):
            if self._claim.is_lost:
                raise _unwritten(f"{on_host()}{self.path} {_LOST}", dist.get_rank())
            if dist.get_rank() == 0:
                digests = take_digests(self.recipe, prompts, held_out)
                self._begin(step, loggers, digests)
                told.mine = None if self.places.are_shared else digests
        if self.places.are_shared:
            return
        with together("output"), _writing(self.path):
            if self._claim.is_held and dist.get_rank() != 0:
                write_settings(self.path, self.recipe, told.rows[0])

    def _begin(self, step: int, loggers: Sequence[Logger], digests: Digests) -> None:
        self.outputs = [*loggers]
        self.outputs += [JsonLines(self.path, step), Progress(self.recipe.train.steps, step)]
        write_settings(self.path, self.recipe, digests)
        is_new = self.resume.from_step is not None or not self._state.is_used
        self.trackers.start(self.recipe, step, self._state.last_step, is_new)

    def _rewind(self, step: int) -> None:
        """Put aside what is later than a step, under names that say so: neither a restart nor a resume prefers it."""
        for root in (self.path / name for name in (CHECKPOINTS, CRITIC, REFERENCE)):
            for later in checkpoint_steps(root):
                if later > step:
                    self._put_aside(step, root / checkpoint_name(later))
        for name in (MODEL, ADAPTER):  # where there is a model, a run was complete
            if (self.path / name).is_dir():
                self._put_aside(step, self.path / name)
        self._put_aside_best(step)
        self._supersede(step)

    def _put_aside_best(self, step: int) -> None:
        """Put the best model aside if what goes on from this step does not know of it, and might replace it by a worse one.

        It is of a later step, whose evaluation is made again, or was best by another metric, or of other draws.
        """
        best = read_best(self.path)
        is_known = step > 0 and best is not None and best["step"] <= step
        is_same = best is not None and is_comparable(best, self.recipe)
        if not (is_known and is_same) and (self.path / BEST).is_dir():
            self._put_aside(step, self.path / BEST)

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
        """Add a line to one of the run's files. Only rank 0 writes, and only while the folder is the run's."""
        if dist.get_rank() == 0 and not self._claim.is_lost:
            try:
                append_line(self.path / name, line)
            except OSError as error:
                self._keep(f"{name}: {error.strerror or error}")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Hand a step's metrics to every logger."""
        self.step = step
        if self._claim.is_lost:  # these would be lines among another part's; `end_step` tells all ranks
            return
        for each in self.outputs:
            try:
                each.log(step, metrics)
            except Exception as error:  # a logger may be the user's
                self._keep(f"{type(each).__name__}: {type(error).__name__}: {error}")
        self.trackers.log(step, metrics)

    def end_step(self, number: int, ready: bool = False) -> tuple[int, bool]:
        """(the largest of the ranks' signal numbers, 0 for none; whether all ranks are `ready`).

        Raises if rank 0 could not write the step's lines, or a folder is no longer the run's. Collective: every rank.
        """
        if self._claim.is_lost:
            self._keep(f"{self.path} {_LOST}")
        rows = exchange([number, self.problem, ready])
        for rank, (_, problem, _) in enumerate(rows):
            if problem is not None:
                raise _unwritten(problem, rank)
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
        if not self._claim.is_held or dist.get_rank() != 0:
            return
        if self._claim.is_lost:  # what it holds now is another part's, or another run's
            logger.warning("%s is no longer this run's; how it ended is not noted there", self.path)
            self.trackers.close(status)
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
        self._claim.release()

    def _keep(self, problem: str) -> None:
        self.problem = self.problem or f"{on_host()}{problem}"


def _described(error: BaseException | None) -> list[str]:
    """What ended a run, one text per finding."""
    if error is None:
        return []
    if isinstance(error, ShardproofError):
        return [str(finding) for finding in error.findings]
    return [f"{type(error).__name__}: {error}"]


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{on_host()}{error.filename or folder}: {error.strerror or error}"
        raise _unwritten(problem, dist.get_rank()) from error


def _unwritten(problem: str, rank: int) -> ShardproofError:
    fix = "free space or repair the folder, then rerun the same command to resume from the last checkpoint"
    return fail(
        "E408",
        "output",
        f"the run's metrics, samples or events could not be written: {problem}.",
        rank=rank,
        fix=fix,
    )
