"""The loop: sample, score, update, sync, log. It reads from top to bottom."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.dist.deadline import deadline
from shardproof.dist.launch import init_distributed
from shardproof.findings import Finding
from shardproof.model.compiling import is_compiled
from shardproof.rl.agreement import agree_on
from shardproof.rl.conversations.measures import NAME
from shardproof.rl.drift import require_exact
from shardproof.rl.evaluation import RunningEvaluation, evaluate
from shardproof.rl.experience import Experience, collect
from shardproof.rl.folder import RunFolder
from shardproof.rl.handover import hand_over
from shardproof.rl.loggers import Logger
from shardproof.rl.proofs import prove_tokens, proving
from shardproof.rl.same_run import Resume
from shardproof.rl.samples import write_samples
from shardproof.rl.saves import resume_last, save, save_model
from shardproof.rl.setup import Run, set_up
from shardproof.rl.sft import held_out_loss, sft_batch
from shardproof.rl.stopping import StopFlag, Stopped
from shardproof.rl.updates import Update, step_metrics, update
from shardproof.rollout.engine import Request, Sampling, events_of
from shardproof.rollout.trajectory import Trajectory
from shardproof.train.trainer import default_deadline
from shardproof.user_code import is_user_name

logger = logging.getLogger(__name__)


def train(recipe: Recipe, loggers: Sequence[Logger] = (), resume: Resume | None = None) -> dict[str, float]:
    """Run a recipe on this rank, from its start or from its last checkpoint; returns the last step's metrics.

    SIGTERM, SIGINT and SIGHUP save and raise `Stopped` on every rank; the same recipe then goes on.

    Collective: every rank.
    """
    seconds = recipe.train.deadline_s
    init_distributed(timeout_s=seconds)
    with deadline("start", seconds=seconds):
        hosts = agree_on(recipe, resume)
    folder = RunFolder(recipe, resume, hosts)
    try:
        # Whatever a rank waits for in a run, a host that is lost ends all of them in this time.
        with deadline("run", seconds=seconds):
            folder.claim()
            metrics = _run(recipe, folder, loggers)
        folder.end("finished")
        return metrics
    except BaseException as error:
        is_stop = isinstance(error, Stopped)
        folder.end("stopped" if is_stop else "failed", None if is_stop else error)
        raise
    finally:
        folder.release()


def _run(recipe: Recipe, folder: RunFolder, loggers: Sequence[Logger]) -> dict[str, float]:
    with StopFlag() as stop:
        run = set_up(recipe, folder, folder.step)
        gc.freeze()  # what exists now stays; garbage collection need not scan it in every step
        try:
            return _train(run, folder, stop, loggers)
        finally:
            gc.unfreeze()
            run.close()


def _train(run: Run, folder: RunFolder, stop: StopFlag, loggers: Sequence[Logger]) -> dict[str, float]:
    output = run.recipe.output
    with together("output"):
        folder.check_content(run.prompts, run.held_out)
    step = saved = resume_last(folder, run.policy, run.critic, run.buffer)
    if step >= run.recipe.train.steps:
        message = "nothing is left to train: step %d is saved and train.steps is %d; raise train.steps"
        logger.warning(message, step, run.recipe.train.steps)
    logger.info("sending the weights to the engine and comparing its log-probs ...")
    metrics = _sync(run, step, folder)
    if step < run.recipe.train.steps and is_compiled(run.policy.model.model):
        logger.info(
            "the first step takes longer: it compiles kernels, which are then cached on this machine ..."
        )
    folder.begin(run.prompts, run.held_out, step, loggers)
    evaluations = _Evaluations(run, folder)
    if step == 0 and output.eval_every and (found := evaluations.after(step)):
        folder.log(step, found)
    stopping = 0
    try:
        while step < run.recipe.train.steps and not stopping:
            metrics = one_step(run, step, folder)
            step += 1
            metrics |= evaluations.after(step)
            folder.log(step, metrics)
            stopping, evaluations.are_ready = folder.end_step(stop.number, evaluations.ready)
            if stopping or (output.save_every and step % output.save_every == 0):
                save(folder, run.policy, run.critic, run.buffer, step)
                saved = step
    finally:
        folder.close_outputs()
    if stopping:
        evaluations.give_up(step)
        raise Stopped(stopping, step)
    if output.save_model:
        if saved < step:
            save(folder, run.policy, run.critic, run.buffer, step)
        save_model(folder, run.policy.model, step)
    return metrics


def one_step(run: Run, step: int, folder: RunFolder) -> dict[str, float]:
    """One batch of experience and the updates from it. Collective: every rank."""
    started = time.perf_counter()
    experience = _experience(run, step)
    proved = _prove_tokens(run, experience, step + 1, folder)
    generated = time.perf_counter()
    updates = _update(run, experience)
    updated = time.perf_counter()
    measured = step_metrics(run.algorithm, updates)
    if run.recipe.rollout.exact:
        require_exact(step + 1, measured)
    metrics = experience.metrics | proved | _sync(run, step + 1, folder) | measured
    _warn(folder, step + 1, run.drift.see(step + 1, metrics))
    seconds = time.perf_counter() - started
    tokens = sum(run.share.once(exchange(sum(experience.batch.lengths))))
    metrics |= {
        "tokens_per_s": tokens / seconds,
        "time/step": seconds,
        "time/rollout": generated - started,
        "time/update": updated - generated,
    }
    for result in (step for each in updates for step in each.steps):
        if not result.stepped:
            folder.note(step + 1, "skip", f"{result.reason}: rank {result.rank}, {result.tensor}")
    for error in experience.errors:
        folder.note(step + 1, NAME if error.startswith(f"{NAME}: ") else "reward", error)
    for event in events_of(run.sampler.engine):
        folder.note(step + 1, "engine", event)
    write_samples(folder, experience, step + 1, run.sampler.tokenizer)
    return metrics


def _experience(run: Run, step: int) -> Experience:
    train = run.recipe.train
    if not run.algorithm.spec.samples:
        return sft_batch(run.prompts, run.stream, train.prompts_per_step, run.share)
    experience = collect(run.buffer, run.scorers, run.algorithm, step=step)
    if run.background is not None:
        run.background.engine.check_drawn()
    if run.sleeps:
        run.sampler.engine.sleep()
    return experience


def _prove_tokens(run: Run, experience: Experience, step: int, folder: RunFolder) -> dict[str, float]:
    """Prove that the batch has just the tokens that were sampled. The proof ledger gets a line at some steps.

    Collective: every rank.
    """
    if not run.algorithm.spec.samples:
        return {}
    output = run.recipe.output
    regular = any(every and step % every == 0 for every in (output.eval_every, output.save_every))
    return prove_tokens(
        folder,
        step,
        run.buffer.ledger,
        experience.batch,
        experience.trajectories,
        run.share,
        # Only a user's algorithm may leave out single tokens of a turn.
        whole_turns=not is_user_name(run.recipe.algorithm.name),
        noted=regular or step == 1 or step == run.recipe.train.steps,
    )


def _update(run: Run, experience: Experience) -> list[Update]:
    recipe = run.recipe
    return update(
        run.policy,
        run.critic,
        run.algorithm,
        experience,
        recipe.algorithm.updates_per_batch,
        temperature=recipe.rollout.temperature,
        router_coef=recipe.algorithm.router_coef,
        micro_batch_tokens=recipe.train.micro_batch_tokens,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        max_consecutive_skips=recipe.train.max_consecutive_skips,
        deadline_s=_step_seconds(run),
    )


def _step_seconds(run: Run) -> float:
    """How long a rank waits for the others in an update; the first one may compile, whatever the recipe says."""
    seconds = run.recipe.train.deadline_s
    if run.policy.num_steps == 0 and is_compiled(run.policy.model.model):
        return max(seconds, default_deadline(run.policy.model))
    return seconds


def _sync(run: Run, step: int, folder: RunFolder) -> dict[str, float]:
    """Bring the policy's weights to the engine, where there is one that samples. Collective: every rank."""
    version = {"version": float(run.policy.model.version)}
    if not run.algorithm.spec.samples:
        run.sampler.versions.hand_over(run.policy.model.version)  # evaluations sample from the policy itself
        return version
    if run.sleeps:
        run.sampler.engine.wake()
    request = Request(Trajectory.of_prompt(run.canary), run.recipe.train.seed)
    tolerance = run.recipe.canary_tolerance
    with proving(folder, step, "sync", tolerance=tolerance) as proof:
        metrics = hand_over(run.sampler.engine, run.weights, request, run.sampling, tolerance, proof)
    run.sampler.versions.hand_over(run.policy.model.version)
    _warn(folder, step, proof.findings)
    return metrics | version


def _warn(folder: RunFolder, step: int, findings: Sequence[Finding]) -> None:
    for finding in findings:
        folder.note(step, "finding", str(finding))
        logger.warning("%s", finding)


class _Evaluations:
    """A run's evaluations: each is awaited, or runs beside training where sampling runs ahead of it in the background."""

    def __init__(self, run: Run, folder: RunFolder):
        self._run, self._folder = run, folder
        self._beside = run.background is not None and run.recipe.rollout.ahead > 0
        self._running: RunningEvaluation | None = None
        self.are_ready = False  # all ranks

    @property
    def ready(self) -> bool:
        """Whether this rank has what an evaluation beside training waits for."""
        return self._running is not None and self._running.ready

    def after(self, step: int) -> dict[str, float]:
        """The metrics that are there after a step: of an evaluation that is due, or of an earlier one that is over.

        An evaluation beside training is over before the next one begins, and before the run ends. Collective: every rank.
        """
        recipe, found = self._run.recipe, {}
        is_due = bool(recipe.output.eval_every) and step % recipe.output.eval_every == 0
        is_last = step >= recipe.train.steps
        if self._running is not None and (self.are_ready or is_due or is_last):
            found, self._running, self.are_ready = self._running.result(), None, False
        if not is_due:
            return found
        num = min(len(self._run.held_out), recipe.output.eval_prompts)
        logger.info("evaluating on %d held-out prompts ...", num)
        if not self._beside:
            started = time.perf_counter()
            return _held_out_metrics(self._run, step) | {"time/evaluation": time.perf_counter() - started}
        running = _begin_evaluation(self._run, step)
        if not is_last:
            self._running = running
            return found
        if found:  # the names are the same: it gets a line of its own
            self._folder.log(step, found)
        return running.result()

    def give_up(self, step: int) -> None:
        """End an evaluation that is not over when the run is stopped."""
        if self._running is not None:
            self._running.cancel()
            text = f"the evaluation after step {self._running.step} was given up: the run was stopped"
            self._folder.note(step, "evaluation", text)


def _held_out_metrics(run: Run, step: int) -> dict[str, float]:
    """What the held-out prompts say. Collective: every rank."""
    prompts = run.held_out[: run.recipe.output.eval_prompts]
    found: dict[str, float] = {}
    if not run.algorithm.spec.samples:
        size = run.recipe.train.micro_batch_tokens
        found = held_out_loss(run.policy.model, prompts, size, run.share)
    if run.sampler.rewards is None:
        return found
    num_samples = run.recipe.output.eval_samples
    return found | evaluate(run.sampler, prompts, _eval_sampling(run), num_samples, step, run.share)


def _begin_evaluation(run: Run, step: int) -> RunningEvaluation:
    assert run.background is not None, "the engine answers in the background"
    output = run.recipe.output
    return RunningEvaluation(
        run.background,
        run.sampler,
        run.held_out[: output.eval_prompts],
        _eval_sampling(run),
        output.eval_samples,
        step,
        run.share,
    )


def _eval_sampling(run: Run) -> Sampling:
    return replace(run.sampling, temperature=0.0) if run.recipe.output.eval_samples == 1 else run.sampling
