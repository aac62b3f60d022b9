"""The loop: sample, score, update, sync, log. It reads from top to bottom."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.config.load import to_json
from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.errors import fail
from shardproof.export.pretrained import save_pretrained
from shardproof.export.state import list_checkpoints, resume, save_checkpoint
from shardproof.export.stream import WeightStream
from shardproof.rl.algorithms import ALGORITHMS, make_loss
from shardproof.rl.experience import Experience, collect, sample_groups
from shardproof.rl.loggers import (
    EVENTS_NAME,
    SAMPLES_NAME,
    JsonLines,
    Logger,
    Progress,
    TensorBoard,
    append_line,
)
from shardproof.rl.report import write_report
from shardproof.rl.setup import Run, set_up
from shardproof.rollout.engine import Request, Sampling
from shardproof.train.batching import Batch, weigh
from shardproof.train.loss import value
from shardproof.train.score import logprobs
from shardproof.train.step import StepResult, train_step

CONFIG_NAME = "config.json"
_CANARY_TOKENS = 8
# Settings that may change between the parts of one run.
_MAY_CHANGE = {("train", "steps"), ("train", "ranks"), ("output", "save_every"), ("output", "keep")}


def train(recipe: Recipe, loggers: Sequence[Logger] = ()) -> dict[str, float]:
    """Run a recipe on this rank, from its start or from its last checkpoint; returns the last step's metrics.

    Collective: every rank.
    """
    run = set_up(recipe)
    folder = Path(recipe.output.folder)
    with together("output"):
        _claim_folder(folder, recipe)
    step = _resume(run, folder)
    outputs = [*loggers, *_make_loggers(recipe, folder, step)] if dist.get_rank() == 0 else []
    _note(folder, step, "receipt", str(run.policy.model.receipt))
    sync(run, step, folder)
    stop = _StopFlag()
    metrics: dict[str, float] = {}
    try:
        while step < recipe.train.steps:
            metrics = one_step(run, step, folder)
            step += 1
            if recipe.output.eval_every and step % recipe.output.eval_every == 0:
                metrics |= evaluate(run, step)
            for output in outputs:
                output.log(step, metrics)
            stopping = any(exchange(stop.set))
            if stopping or (recipe.output.save_every and step % recipe.output.save_every == 0):
                _save(run, folder, step)
            if stopping:
                break
    finally:
        run.rewards.close()
        for output in outputs:
            output.close()
    _finish(run, folder, step)
    return metrics


def one_step(run: Run, step: int, folder: Path) -> dict[str, float]:
    """One batch of experience and the updates from it. Collective: every rank."""
    started = time.perf_counter()
    experience = collect(run, step)
    generated = time.perf_counter()
    results = update(run, experience)
    updated = time.perf_counter()
    metrics = experience.metrics | sync(run, step + 1, folder)
    metrics |= _step_metrics(results)
    seconds = time.perf_counter() - started
    tokens = sum(exchange(sum(experience.batch.lengths))) / run.policy.model.sequence_parallel
    metrics |= {
        "tokens_per_s": tokens / seconds,
        "time/step": seconds,
        "time/rollout": generated - started,
        "time/update": updated - generated,
    }
    for result in results:
        if not result.stepped:
            _note(folder, step + 1, "skip", f"{result.reason}: rank {result.rank}, {result.tensor}")
    _write_samples(run, experience, folder, step + 1)
    return metrics


def update(run: Run, experience: Experience) -> list[StepResult]:
    """The step's updates of policy and critic. Collective: every rank."""
    settings, train_settings = run.recipe.algorithm, run.recipe.train
    loss, facts = make_loss(settings), ALGORITHMS[settings.name]
    results = []
    for part in _mini_batches(run, experience):
        share = run.policy.model.sequence_parallel
        constant = None
        if facts.weights == "constant":
            constant = float(sum(exchange(len(part))) / share * run.sampling.max_new_tokens)
        weighed = weigh(part, facts.weights, constant=constant, share=share)
        options: dict[str, Any] = {
            "micro_batch_tokens": train_settings.micro_batch_tokens,
            "max_grad_norm": run.recipe.optimizer.max_grad_norm,
            "max_consecutive_skips": train_settings.max_consecutive_skips,
        }
        if any(exchange(len(weighed))):
            results.append(
                train_step(
                    run.policy.model,
                    weighed,
                    run.policy.optimizer,
                    run.policy.scheduler,
                    loss=loss,
                    temperature=run.sampling.temperature,
                    router_coef=settings.router_coef,
                    **options,
                )
            )
            if run.critic is not None:
                critic = run.critic
                train_step(
                    critic.model,
                    weighed,
                    critic.optimizer,
                    critic.scheduler,
                    loss=value(settings.value_clip),
                    **options,
                )
    return results


def _mini_batches(run: Run, experience: Experience) -> list[Batch]:
    """The batch split by prompts, in a way that does not depend on the number of ranks."""
    num = run.recipe.algorithm.updates_per_batch
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
    receipt = run.engine.load_weights(WeightStream(policy, policy.settings.compute_dtype))
    for finding in receipt.findings:
        _note(folder, step, "finding", str(finding))
    synced = time.perf_counter()
    gap = canary(run)
    tolerance = run.recipe.rollout.canary_tolerance
    if gap > tolerance:
        message = f"their log-probs of the canary differ by {gap:.3g}, allowed is {tolerance:g}."
        raise fail("R503", "sync", f"after version {policy.version} {message}")
    return {"time/sync": synced - started, "canary/gap": gap, "version": float(policy.version)}


def canary(run: Run) -> float:
    """The largest difference between the engine's and the trainer's log-probs of a few sampled tokens, over ranks.

    Collective: every rank.
    """
    prompt = run.prompts[0].tokens
    sampling = Sampling(_CANARY_TOKENS, run.sampling.temperature)
    (completion,) = run.engine.generate([Request(prompt, seed=run.recipe.train.seed)], sampling)
    (trained,) = logprobs(run.policy.model, [[*prompt, *completion.tokens]], run.sampling.temperature)
    gap = (trained.cpu()[len(prompt) - 1 :] - torch.tensor(completion.logprobs)).abs().max()
    return max(exchange(float(gap)))


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Mean reward and pass@k on held-out prompts, greedy or sampled. Collective: every rank."""
    samples = run.recipe.output.eval_samples
    if not run.eval_prompts:
        return {}
    temperature = 0.0 if samples == 1 else run.sampling.temperature
    sampling = Sampling(run.sampling.max_new_tokens, temperature, run.sampling.top_p, run.sampling.stop_ids)
    mine = list(enumerate(run.eval_prompts))[run.data_rank :: run.data_size]
    # A step number that training never has keeps evaluation's draws apart from training's.
    groups = sample_groups(run, mine, -1 - step, samples, sampling)
    rows = exchange([group.rewards for group in groups])[:: run.policy.model.sequence_parallel]
    rewards = [group for row in rows for group in row]
    flat = [reward for group in rewards for reward in group]
    return {
        "eval/reward": sum(flat) / len(flat),
        f"eval/pass@{samples}": sum(max(group) >= 1.0 for group in rewards) / len(rewards),
    }


def _step_metrics(results: Sequence[StepResult]) -> dict[str, float]:
    if not results:
        return {"skipped": 0.0, "updates": 0.0}
    last = results[-1]
    return {
        **last.metrics,
        "loss/total": last.loss,
        "grad_norm": last.grad_norm,
        "lr": last.lr,
        "updates": float(sum(result.stepped for result in results)),
        "skipped": float(sum(not result.stepped for result in results)),
    }


def _make_loggers(recipe: Recipe, folder: Path, step: int) -> list[Logger]:
    loggers: list[Logger] = [JsonLines(folder, step), Progress(recipe.train.steps, step)]
    return [*loggers, TensorBoard(folder)] if recipe.output.tensorboard else loggers


def _claim_folder(folder: Path, recipe: Recipe) -> None:
    """Make the run's folder, or check that it is this recipe's. Only rank 0 writes."""
    import json

    path = folder / CONFIG_NAME
    if path.exists():
        before, now = json.loads(path.read_text()), json.loads(to_json(recipe))
        odd = [
            f"{section}.{key}"
            for section in now
            for key in (now[section] if isinstance(now[section], dict) else [])
            if (section, key) not in _MAY_CHANGE and (before.get(section) or {}).get(key) != now[section][key]
        ]
        if odd:
            raise fail("C006", "output", f"{folder} was begun with other settings: {', '.join(odd)}.")
    elif dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(recipe))


def _resume(run: Run, folder: Path) -> int:
    """Go on from the last checkpoint, if there is one; returns the number of steps taken. Collective: every rank."""
    checkpoints = folder / "checkpoints"
    found = list_checkpoints(checkpoints) if checkpoints.is_dir() else []
    if not any(exchange(bool(found))):
        return 0
    extra = resume(checkpoints, run.policy.model, run.policy.optimizer, run.policy.scheduler)
    if run.critic is not None:
        resume(
            folder / "critic",
            run.critic.model,
            run.critic.optimizer,
            run.critic.scheduler,
            f"step-{extra['step']:08d}",
        )
    run.stream.position = extra["position"]
    return int(extra["step"])


def _save(run: Run, folder: Path, step: int) -> None:
    """Checkpoint everything. The policy's is written last: it is the one that says a step is complete."""
    keep = run.recipe.output.keep
    if run.critic is not None:
        critic = run.critic
        save_checkpoint(
            folder / "critic", critic.model, critic.optimizer, critic.scheduler, step=step, keep=keep + 1
        )
    extra = {"step": step, "position": run.stream.position}
    policy = run.policy
    save_checkpoint(
        folder / "checkpoints", policy.model, policy.optimizer, policy.scheduler, extra, step=step, keep=keep
    )


def _finish(run: Run, folder: Path, step: int) -> None:
    if step >= run.recipe.train.steps and run.recipe.output.save_model:
        _save(run, folder, step)
        receipt = save_pretrained(run.policy.model, folder / "model")
        _note(folder, step, "receipt", str(receipt))
    if dist.get_rank() == 0:
        write_report(folder)


def _write_samples(run: Run, experience: Experience, folder: Path, step: int) -> None:
    if dist.get_rank() != 0:
        return
    shown = 0
    for group in experience.groups:
        for text, reward, parts in zip(group.texts, group.rewards, group.parts, strict=True):
            if shown >= run.recipe.output.samples_per_step:
                return
            shown += 1
            line = {
                "step": step,
                "prompt": group.prompt.text,
                "completion": text,
                "reward": reward,
                "rewards": parts,
            }
            append_line(folder / SAMPLES_NAME, line)


def _note(folder: Path, step: int, kind: str, text: str) -> None:
    if dist.get_rank() == 0:
        append_line(folder / EVENTS_NAME, {"step": step, "kind": kind, "text": text})


class _StopFlag:
    """Set by SIGTERM or SIGINT; the loop then saves and stops at the end of its step."""

    def __init__(self) -> None:
        self.set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._raise_flag)

    def _raise_flag(self, *_: Any) -> None:
        self.set = True
