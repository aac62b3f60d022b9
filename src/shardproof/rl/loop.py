"""The loop: sample, score, update, sync, log. It reads from top to bottom."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch

from shardproof.bounds import largest, within
from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.dist.launch import init_distributed
from shardproof.errors import fail
from shardproof.rl.agreement import agree_on
from shardproof.rl.experience import Group, await_rewards, collect, sample_groups
from shardproof.rl.folder import RunFolder, go_on, report, save, save_model, write_samples
from shardproof.rl.imitation import demonstrate, held_out_loss
from shardproof.rl.loggers import Logger
from shardproof.rl.same_run import Resume
from shardproof.rl.setup import Run, set_up
from shardproof.rl.stopping import StopFlag, Stopped
from shardproof.rl.updates import step_metrics, update
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.trajectory import Trajectory
from shardproof.train.score import logprobs

_CANARY_TOKENS = 8


def train(recipe: Recipe, loggers: Sequence[Logger] = (), resume: Resume | None = None) -> dict[str, float]:
    """Run a recipe on this rank, from its start or from its last checkpoint; returns the last step's metrics.

    SIGTERM, SIGINT and SIGHUP save and raise `Stopped` on every rank; the same recipe then goes on.

    Collective: every rank.
    """
    init_distributed()
    agree_on(recipe, options=resume)
    folder = RunFolder(recipe, resume)
    try:
        with together("output"):
            folder.claim()
        return _run(recipe, folder, loggers)
    finally:
        folder.release()


def _run(recipe: Recipe, folder: RunFolder, loggers: Sequence[Logger]) -> dict[str, float]:
    with StopFlag() as stop:
        run = set_up(recipe)
        gc.freeze()  # what is there now stays; looking through it for garbage in every step is in vain
        try:
            return _train(run, folder, stop, loggers)
        finally:
            gc.unfreeze()
            run.engine.close()
            if run.rewards is not None:
                run.rewards.close()


def _train(run: Run, folder: RunFolder, stop: StopFlag, loggers: Sequence[Logger]) -> dict[str, float]:
    output = run.recipe.output
    step = saved = go_on(run, folder)
    folder.note(step, "receipt", str(run.policy.model.receipt))
    metrics = sync(run, step, folder)
    with together("output"):
        folder.begin(run, step, loggers)
    if step == 0 and output.eval_every:
        folder.log(step, evaluate(run, step))
    stopping = 0
    try:
        while step < run.recipe.train.steps and not stopping:
            metrics = one_step(run, step, folder)
            step += 1
            if output.eval_every and step % output.eval_every == 0:
                metrics |= evaluate(run, step)
            folder.log(step, metrics)
            stopping = folder.end_step(stop.number)
            if stopping or (output.save_every and step % output.save_every == 0):
                save(run, folder, step)
                saved = step
    finally:
        folder.close_outputs()
    if stopping:
        report(folder, step)
        raise Stopped(stopping, step)
    if output.save_model:
        if saved < step:
            save(run, folder, step)
        save_model(run, folder, step)
    report(folder, step)
    return metrics


def one_step(run: Run, step: int, folder: RunFolder) -> dict[str, float]:
    """One batch of experience and the updates from it. Collective: every rank."""
    started = time.perf_counter()
    experience = demonstrate(run) if run.imitates else collect(run, step)
    generated = time.perf_counter()
    updates = update(run, experience)
    updated = time.perf_counter()
    metrics = experience.metrics | sync(run, step + 1, folder)
    metrics |= step_metrics(run, updates)
    seconds = time.perf_counter() - started
    tokens = sum(exchange(sum(experience.batch.lengths))) / run.policy.model.sequence_parallel
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
        folder.note(step + 1, "reward", error)
    write_samples(run, experience, folder, step + 1)
    return metrics


def sync(run: Run, step: int, folder: RunFolder) -> dict[str, float]:
    """Send the policy's weights to the engine, and prove on a canary that it samples from them.

    Collective: every rank.
    """
    started = time.perf_counter()
    policy = run.policy.model
    if run.imitates:
        return {"version": float(policy.version)}
    receipt = run.engine.load_weights(run.weights)
    for finding in receipt.findings:
        folder.note(step, "finding", str(finding))
    synced = time.perf_counter()
    gap = run.engine.canary_gap if run.engine.canary_gap is not None else canary(run)
    tolerance = run.recipe.canary_tolerance
    if not within(gap, tolerance):
        message = f"their log-probs of the canary differ by {gap:.3g}, allowed is {tolerance:g}."
        raise fail("R503", "sync", f"after version {policy.version} {message}")
    return {"time/sync": synced - started, "canary/gap": gap, "version": float(policy.version)}


def canary(run: Run) -> float:
    """The largest difference between the engine's and the trainer's log-probs of a few sampled tokens, over ranks.

    Collective: every rank.
    """
    prompt = run.prompts[0].tokens
    sampling = Sampling(min(_CANARY_TOKENS, run.sampling.max_new_tokens), run.sampling.temperature)
    request = Request(Trajectory.of_prompt(prompt), seed=run.recipe.train.seed)
    (made,) = generate(run.engine, [request], sampling)
    (trained,) = logprobs(run.policy.model, [list(made.tokens)], run.sampling.temperature)
    gap = (trained.cpu()[len(prompt) - 1 :] - torch.tensor(made.sampled[-1].logprobs)).abs().max()
    return largest(exchange(float(gap)))


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Mean rewards and pass@k on held-out prompts, greedy or sampled; for SFT also its loss there.

    Rewards are what the functions say: penalties shape what is learned, and say nothing about how good it is.

    Collective: every rank.
    """
    samples = run.recipe.output.eval_samples
    found = held_out_loss(run) if run.imitates else {}
    if run.rewards is None:
        return found
    temperature = 0.0 if samples == 1 else run.sampling.temperature
    sampling = Sampling(run.sampling.max_new_tokens, temperature, run.sampling.top_p, run.sampling.stop_ids)
    mine = list(enumerate(run.eval_prompts))[run.data_rank :: run.data_size]
    # A step number that training never has keeps evaluation's draws apart from training's.
    with run.rewards.start() as pending:
        groups = sample_groups(run, mine, -1 - step, samples, sampling, pending)
        await_rewards(run, groups, pending)
    return found | _evaluation_metrics(run, groups)


def _evaluation_metrics(run: Run, groups: Sequence[Group]) -> dict[str, float]:
    """Means over the held-out completions of all ranks. A prompt is passed if a completion has 1 of the first reward.

    Collective: every rank.
    """
    mine = [[group.known(group.totals), group.known(group.parts), sum(group.failed)] for group in groups]
    rows = exchange(mine)[:: run.policy.model.sequence_parallel]
    every = [group for row in rows for group in row]
    totals = [total for known, _, _ in every for total in known]
    parts = [part for _, known, _ in every for part in known]
    assert run.recipe.reward is not None
    names = [spec.name for spec in run.recipe.reward.functions]
    passed = [any(part[names[0]] >= 1.0 for part in known) for _, known, _ in every]
    num = max(len(totals), 1)
    metrics = {"eval/reward": sum(totals) / num}
    metrics |= {f"eval/{name}": sum(part[name] for part in parts) / num for name in names}
    metrics[f"eval/pass@{run.recipe.output.eval_samples}"] = sum(passed) / len(passed)
    return metrics | {"eval/failed": float(sum(failed for _, _, failed in every))}
