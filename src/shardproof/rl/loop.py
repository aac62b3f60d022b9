"""The loop: sample, score, update, sync, log. It reads from top to bottom."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.dist.launch import init_distributed
from shardproof.errors import fail
from shardproof.rl.agreement import agree_on
from shardproof.rl.algorithms import ALGORITHMS, make_loss
from shardproof.rl.experience import Experience, await_rewards, collect, sample_groups
from shardproof.rl.folder import claim_folder, go_on, note, report, save, save_model, write_samples
from shardproof.rl.imitation import demonstrate, held_out_loss
from shardproof.rl.loggers import JsonLines, Logger, Progress, TensorBoard
from shardproof.rl.setup import Run, Trained, set_up
from shardproof.rl.stopping import StopFlag, Stopped
from shardproof.rollout.engine import Request, Sampling
from shardproof.train.batching import Batch, weigh
from shardproof.train.loss import value
from shardproof.train.score import logprobs
from shardproof.train.step import StepResult, train_step

_CANARY_TOKENS = 8


def train(recipe: Recipe, loggers: Sequence[Logger] = ()) -> dict[str, float]:
    """Run a recipe on this rank, from its start or from its last checkpoint; returns the last step's metrics.

    SIGTERM and SIGINT save and raise `Stopped` on every rank; the same recipe then goes on.

    Collective: every rank.
    """
    folder = Path(recipe.output.folder)
    init_distributed()
    agree_on(recipe)
    with together("output"):
        claim_folder(folder, recipe)
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


def _train(run: Run, folder: Path, stop: StopFlag, loggers: Sequence[Logger]) -> dict[str, float]:
    output = run.recipe.output
    step = saved = go_on(run, folder)
    outputs = [*loggers, *_make_loggers(run.recipe, folder, step)] if dist.get_rank() == 0 else []
    note(folder, step, "receipt", str(run.policy.model.receipt))
    metrics = sync(run, step, folder)
    stopping = 0
    try:
        while step < run.recipe.train.steps and not stopping:
            metrics = one_step(run, step, folder)
            step += 1
            if output.eval_every and step % output.eval_every == 0:
                metrics |= evaluate(run, step)
            for each in outputs:
                each.log(step, metrics)
            stopping = max(exchange(stop.number))
            if stopping or (output.save_every and step % output.save_every == 0):
                save(run, folder, step)
                saved = step
    finally:
        for each in outputs:
            each.close()
    if stopping:
        report(folder)
        raise Stopped(stopping, step)
    if output.save_model:
        if saved < step:
            save(run, folder, step)
        save_model(run, folder, step)
    report(folder)
    return metrics


def one_step(run: Run, step: int, folder: Path) -> dict[str, float]:
    """One batch of experience and the updates from it. Collective: every rank."""
    started = time.perf_counter()
    experience = demonstrate(run) if run.imitates else collect(run, step)
    generated = time.perf_counter()
    updates = update(run, experience)
    updated = time.perf_counter()
    metrics = experience.metrics | sync(run, step + 1, folder)
    metrics |= _step_metrics(updates)
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
            note(folder, step + 1, "skip", f"{result.reason}: rank {result.rank}, {result.tensor}")
    for error in experience.errors:
        note(folder, step + 1, "reward", error)
    write_samples(run, experience, folder, step + 1)
    return metrics


@dataclass(frozen=True)
class Update:
    """What one update did to the policy and, where there is one, to the critic."""

    policy: StepResult
    critic: StepResult | None

    @property
    def steps(self) -> list[StepResult]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]


def update(run: Run, experience: Experience) -> list[Update]:
    """The step's updates of policy and critic. Collective: every rank."""
    settings, train_settings = run.recipe.algorithm, run.recipe.train
    loss, facts = make_loss(settings), ALGORITHMS[settings.name]
    options: dict[str, Any] = {
        "micro_batch_tokens": train_settings.micro_batch_tokens,
        "max_grad_norm": run.recipe.optimizer.max_grad_norm,
        "max_consecutive_skips": train_settings.max_consecutive_skips,
    }
    updates = []
    for part in _mini_batches(run, experience):
        num_sequences = sum(exchange(len(part))) / run.policy.model.sequence_parallel
        if not num_sequences:
            continue
        constant = num_sequences * run.sampling.max_new_tokens
        weighed = weigh(part, facts.weights, constant=constant, share=run.policy.model.sequence_parallel)
        weighed = _with_signal(run, weighed)
        stepped = _step(
            run.policy,
            weighed,
            loss=loss,
            temperature=run.sampling.temperature,
            router_coef=settings.router_coef,
            **options,
        )
        critic = None
        if run.critic is not None:
            critic = _step(run.critic, weighed, loss=value(settings.value_clip), **options)
        updates.append(Update(stepped, critic))
    return updates


def _with_signal(run: Run, batch: Batch) -> Batch:
    """The batch without sequences that cannot move the policy: those of groups whose rewards are all equal.

    Their gradient is zero, so the update is the same and cheaper; weights are those of the whole batch. Where another
    term of the loss counts every token, or no sequence would be left, nothing is dropped. Collective: every rank.
    """
    settings = run.recipe.algorithm
    in_loss = settings.kl_coef if settings.kl_in == "loss" else 0.0
    if run.imitates or run.critic is not None or in_loss or settings.entropy_coef or settings.router_coef:
        return batch
    moving = [i for i, row in enumerate(batch.columns["advantages"]) if bool(row.any())]
    return batch.select(moving) if any(exchange(len(moving))) else batch


def _step(trained: Trained, batch: Batch, **options: Any) -> StepResult:
    return train_step(trained.model, batch, trained.optimizer, trained.scheduler, **options)


def _mini_batches(run: Run, experience: Experience) -> list[Batch]:
    """The batch split by prompts, in a way that does not depend on the number of ranks."""
    num = run.recipe.algorithm.updates_per_batch
    if num == 1:
        return [experience.batch]
    size = run.recipe.rollout.group_size
    parts = []
    for part in range(num):
        chosen = [k for k, group in enumerate(experience.groups) if group.index % num == part]
        parts.append(experience.batch.select([k * size + g for k in chosen for g in range(size)]))
    return parts


def sync(run: Run, step: int, folder: Path) -> dict[str, float]:
    """Send the policy's weights to the engine, and prove on a canary that it samples from them.

    Collective: every rank.
    """
    started = time.perf_counter()
    policy = run.policy.model
    if run.imitates:
        return {"version": float(policy.version)}
    receipt = run.engine.load_weights(run.weights)
    for finding in receipt.findings:
        note(folder, step, "finding", str(finding))
    synced = time.perf_counter()
    gap = run.engine.canary_gap if run.engine.canary_gap is not None else canary(run)
    tolerance = run.recipe.canary_tolerance
    if gap > tolerance:
        message = f"their log-probs of the canary differ by {gap:.3g}, allowed is {tolerance:g}."
        raise fail("R503", "sync", f"after version {policy.version} {message}")
    return {"time/sync": synced - started, "canary/gap": gap, "version": float(policy.version)}


def canary(run: Run) -> float:
    """The largest difference between the engine's and the trainer's log-probs of a few sampled tokens, over ranks.

    Collective: every rank.
    """
    prompt = run.prompts[0].tokens
    sampling = Sampling(min(_CANARY_TOKENS, run.sampling.max_new_tokens), run.sampling.temperature)
    (completion,) = run.engine.generate([Request(prompt, seed=run.recipe.train.seed)], sampling)
    (trained,) = logprobs(run.policy.model, [[*prompt, *completion.tokens]], run.sampling.temperature)
    gap = (trained.cpu()[len(prompt) - 1 :] - torch.tensor(completion.logprobs)).abs().max()
    return max(exchange(float(gap)))


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Mean reward and pass@k on held-out prompts, greedy or sampled; for SFT also its loss there.

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
    rows = exchange([group.rewards for group in groups])[:: run.policy.model.sequence_parallel]
    rewards = [group for row in rows for group in row]
    flat = [reward for group in rewards for reward in group]
    return found | {
        "eval/reward": sum(flat) / len(flat),
        f"eval/pass@{samples}": sum(max(group) >= 1.0 for group in rewards) / len(rewards),
    }


def _step_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """The last update's numbers, and how many updates were made."""
    steps = [step for each in updates for step in each.steps]
    metrics = {
        "updates": float(sum(each.policy.stepped for each in updates)),
        "skipped": float(sum(not step.stepped for step in steps)),
    }
    if updates:
        policy, critic = updates[-1].policy, updates[-1].critic
        metrics |= policy.metrics
        metrics |= {"loss/total": policy.loss, "grad_norm": policy.grad_norm, "lr": policy.lr}
        if critic is not None:
            metrics |= critic.metrics
            metrics |= {"loss/value": critic.loss, "grad_norm/critic": critic.grad_norm}
    return metrics


def _make_loggers(recipe: Recipe, folder: Path, step: int) -> list[Logger]:
    loggers: list[Logger] = [JsonLines(folder, step), Progress(recipe.train.steps, step)]
    return [*loggers, TensorBoard(folder)] if recipe.output.tensorboard else loggers
