"""When a run evaluates: before its first step and at each set's own pace, while training waits or goes on."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch.distributed as dist

from shardproof.config.evaluation_sets import HeldOut, held_out_sets
from shardproof.dist.collectives import together
from shardproof.rl.best import Best
from shardproof.rl.evaluation import HeldOutTask, RunningEvaluation, evaluate
from shardproof.rl.experience_metrics import Success
from shardproof.rl.folder import RunFolder
from shardproof.rl.loggers import evaluated_steps
from shardproof.rl.setup import Run

logger = logging.getLogger(__name__)


class Evaluations:
    """A run's evaluations: each is awaited, or runs beside training where sampling runs ahead of it in the background.

    Where the best model is kept, training waits: the weights that were evaluated must still be there.
    """

    def __init__(self, run: Run, folder: RunFolder):
        self._run, self._folder = run, folder
        self._sets = held_out_sets(run.recipe)
        metric = run.recipe.evaluation.best
        self._best = None if metric is None else Best(folder, metric, self._sets)
        self._beside = run.background is not None and run.recipe.rollout.ahead > 0 and metric is None
        self._running: RunningEvaluation | None = None
        self.are_ready = False  # all ranks

    @property
    def ready(self) -> bool:
        """Whether this rank has what an evaluation beside training waits for."""
        return self._running is not None and self._running.ready

    def before(self, step: int) -> dict[str, float]:
        """The metrics that are there before a run, or its part that goes on after this step, takes its first step.

        What ended the last part gave up the evaluation beside training that had begun after this step: it begins again,
        with the same weights. Collective: every rank.
        """
        return self.after(step) if step == 0 or self._was_given_up(step) else {}

    def _was_given_up(self, step: int) -> bool:
        if not self._beside or step >= self._run.recipe.train.steps:
            return False
        with together("output") as told:
            is_first = dist.get_rank() == 0
            told.mine = is_first and step not in evaluated_steps(self._folder.path)
        return bool(told.rows[0])

    def after(self, step: int) -> dict[str, float]:
        """The metrics that are there after a step: of an evaluation that is due, or of an earlier one that is over.

        An evaluation beside training is over before the next one begins, and before the run ends. Collective: every rank.
        """
        found: dict[str, float] = {}
        due = [each for each in self._sets if each.is_due(step)]
        is_last = step >= self._run.recipe.train.steps
        if self._running is not None and (self.are_ready or due or is_last):
            found, self._running, self.are_ready = self._running.result(), None, False
        if not due:
            return found
        for each in due:
            logger.info("evaluating on %d held-out prompts%s ...", self._num_prompts(each), _of(each))
        if not self._beside:
            return self._wait_for(due, step)
        tasks = [_task(self._run, each) for each in due]
        run = self._run
        assert run.background is not None, "the engine answers in the background"
        running = RunningEvaluation(run.background, run.sampler, tasks, step, run.share)
        if not is_last:
            self._running = running
            return found
        if found:  # the names are the same: it gets a line of its own
            self._folder.log(step, found)
        return running.result()

    def _wait_for(self, due: list[HeldOut], step: int) -> dict[str, float]:
        started = time.perf_counter()
        found: dict[str, float] = {}
        for each in due:
            found |= _held_out_metrics(self._run, each, step)
        found["time/evaluation"] = time.perf_counter() - started
        if self._best is not None:
            self._best.see(step, found, self._run.policy.model)
        return found

    def _num_prompts(self, of: HeldOut) -> int:
        return min(len(self._run.held_out[of.name]), of.prompts)

    def give_up(self, step: int) -> None:
        """End an evaluation that is not over when the run is stopped."""
        if self._running is not None:
            self._running.cancel()
            text = f"the evaluation after step {self._running.step} was given up: the run was stopped"
            self._folder.note(step, "evaluation", text)


def _of(each: HeldOut) -> str:
    return f" of {each.name}" if each.name else ""


def _held_out_metrics(run: Run, each: HeldOut, step: int) -> dict[str, float]:
    """What the held-out prompts say. Collective: every rank."""
    found: dict[str, float] = {}
    if run.offline is not None:
        measured = run.offline.held_out(run.held_out[each.name][: each.prompts])
        found = {f"{each.prefix}{name}": value for name, value in measured.items()}
    if run.sampler.rewards is None:
        return found
    return found | evaluate(run.sampler, _task(run, each), step, run.share)


def _task(run: Run, each: HeldOut) -> HeldOutTask:
    return HeldOutTask(
        prompts=run.held_out[each.name][: each.prompts],
        sampling=replace(run.sampling, **each.drawing),
        num_samples=each.samples,
        pass_at=each.pass_at,
        success=Success.by(run.recipe.algorithm, run.sampler.deciding),
        majority=run.recipe.evaluation.majority,
        prefix=each.prefix,
    )
