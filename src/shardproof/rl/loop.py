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
from shardproof.rl.evaluations import Evaluations
from shardproof.rl.experience import Experience, collect
from shardproof.rl.folder import RunFolder
from shardproof.rl.handover import hand_over
from shardproof.rl.loggers import Logger
from shardproof.rl.proofs import prove_tokens, proving
from shardproof.rl.same_run import Resume
from shardproof.rl.samples import write_samples
from shardproof.rl.saves import resume_last, save, save_model
from shardproof.rl.setup import Run, set_up
from shardproof.rl.sources.measures import shares_of
from shardproof.rl.stopping import StopFlag, Stopped
from shardproof.rl.updates import Schedule, Update, step_metrics, update
from shardproof.rollout.engine import Request, events_of
from shardproof.rollout.trajectory import Trajectory
from shardproof.shard.moving import move_towards
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
    step = saved = resume_last(folder, run.kept)
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
    evaluations = Evaluations(run, folder)
    if found := evaluations.before(step):
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
                save(folder, run.kept, step)
                saved = step
    finally:
        folder.close_outputs()
    if stopping:
        evaluations.give_up(step)
        raise Stopped(stopping, step)
    if saved < step:
        save(folder, run.kept, step)
    if output.save_model:
        save_model(folder, run.policy.model, step)
    return metrics


def one_step(run: Run, step: int, folder: RunFolder) -> dict[str, float]:
    """One batch of experience and the updates from it. Collective: every rank."""
    started = time.perf_counter()
    experience = _experience(run, step)
    proved = _prove_tokens(run, experience, step + 1, folder)
    generated = time.perf_counter()
    updates = _update(run, experience, step)
    updated = time.perf_counter()
    measured = step_metrics(run.algorithm, updates)
    if run.recipe.rollout.exact:
        require_exact(step + 1, measured)
    metrics = experience.metrics | proved | run.controllers.metrics | measured
    _move_reference(run, step + 1, folder)
    metrics |= _sync(run, step + 1, folder)
    _warn(folder, step + 1, run.drift.see(step + 1, metrics))
    seconds = time.perf_counter() - started
    rows = run.share.once(exchange([sum(experience.batch.lengths), len(experience.trajectories)]))
    tokens, num_completions = (sum(column) for column in zip(*rows, strict=True))
    run.controllers.see(measured, num_completions)
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
    if run.offline is not None:
        rows = [run.prompts[row] for row in run.stream.take(train.prompts_per_step)]
        experience = run.offline.take(rows)
        return replace(experience, metrics=experience.metrics | shares_of(rows))
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


def _update(run: Run, experience: Experience, step: int) -> list[Update]:
    recipe, settings = run.recipe, run.recipe.algorithm
    schedule = Schedule(
        settings.updates_per_epoch,
        settings.epochs_per_batch,
        recipe.train.seed,
        trains_policy=step >= settings.critic_warmup_steps,
    )
    return update(
        run.policy,
        run.critic,
        run.algorithm,
        experience,
        schedule,
        step,
        temperature=recipe.rollout.temperature if run.offline is None else 1.0,
        router_coef=settings.router_coef,
        micro_batch_tokens=recipe.train.micro_batch_tokens,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        max_consecutive_skips=recipe.train.max_consecutive_skips,
        deadline_s=_step_seconds(run),
    )


def _move_reference(run: Run, step: int, folder: RunFolder) -> None:
    """Move the reference towards the policy, where a recipe asks for that after this step. Collective: every rank."""
    every, mix = run.recipe.algorithm.reference_sync_every, run.recipe.algorithm.reference_mix
    reference = run.scorers.reference
    if reference is None or not every or step % every:
        return
    with proving(folder, step, "reference", "reference", mix=mix, version=run.policy.model.version) as proof:
        num = move_towards(reference, run.policy.model, mix)
        proof.details["elements"] = num
        proof.text = f"the reference is {mix:g} of the policy and {1 - mix:g} of what it was: {num} elements"


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
