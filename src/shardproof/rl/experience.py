"""From prompts to experience: completions, rewards, advantages, and the columns of a batch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist.collectives import exchange, raise_together
from shardproof.findings import Finding
from shardproof.rl import advantages as adv
from shardproof.rl.algorithms import ALGORITHMS
from shardproof.rl.data import Prompt, sample_seed
from shardproof.rl.reward_failures import result_together
from shardproof.rl.rewards import PendingRewards
from shardproof.rl.setup import Run
from shardproof.rl.templates import panics_as_errors
from shardproof.rollout.engine import Request, Sampling, answers
from shardproof.rollout.trajectory import Trajectory
from shardproof.train.batching import Batch
from shardproof.train.score import logprobs, values

_MAX_ROUNDS = 4  # of sampling, when groups without a signal are dropped
_MAX_ERRORS = 3  # of rewards that a rank reports in a step


@dataclass(frozen=True)
class Completion:
    """What the policy wrote after a prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    version: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> Completion:
        last = trajectory.segments[-1]
        assert last.logprobs is not None and last.version is not None
        return cls(last.tokens, last.logprobs, trajectory.finished, last.version)


@dataclass
class Group:
    """A prompt's completions and what they are worth."""

    index: int  # of the prompt in the global batch
    prompt: Prompt
    completions: list[Completion]
    texts: list[str]
    # What follows is empty until rewards are awaited.
    totals: list[float] = field(default_factory=list)  # as the reward functions say
    rewards: list[float] = field(default_factory=list)  # the totals, less penalties: what is trained on
    parts: list[dict[str, float]] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)  # nothing is known about these completions
    errors: list[str] = field(default_factory=list)

    def known(self, values: Sequence[Any]) -> list[Any]:
        """Those of the completions' values whose rewards did not fail."""
        return [value for value, failed in zip(values, self.failed, strict=True) if not failed]

    @property
    def has_signal(self) -> bool:
        """The reward functions tell its completions apart. Penalties do not count: they would always do."""
        return len(set(self.known(self.totals))) > 1


@dataclass
class Experience:
    """This rank's part of a step's experience, and the metrics of the whole of it."""

    groups: list[Group]
    batch: Batch
    metrics: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # of rewards, the first few of every rank
    order: list[int] = field(default_factory=list)  # the groups of all ranks, by their prompts' indices


def collect(run: Run, step: int) -> Experience:
    """Sample, score and weigh one step's prompts. Collective: every rank."""
    assert run.rewards is not None, "nothing scores these completions"
    settings = run.recipe.algorithm
    drop = settings.dynamic_sampling
    if drop is None:
        drop = ALGORITHMS[settings.name].dynamic_sampling
    wanted = run.recipe.train.prompts_per_step
    seen: list[Group] = []
    num_seen, kept, waited_s = 0, set[int](), 0.0
    batch: Batch | None = None
    for _ in range(_MAX_ROUNDS if drop else 1):
        indices = run.stream.take(wanted)
        mine = [(num_seen + i, run.prompts[row]) for i, row in enumerate(indices)]
        mine = mine[run.data_rank :: run.data_size]
        with run.rewards.start() as pending:
            fresh = sample_groups(run, mine, step, run.recipe.rollout.group_size, run.sampling, pending)
            if not drop:
                # Every group stays, so the models score them all while rewards run.
                batch = _batch(run, fresh)
            waited_s += await_rewards(run, fresh, pending)
        seen += fresh
        num_seen += wanted
        useful = [group.index for group in fresh if not drop or group.has_signal]
        kept.update(index for row in exchange(useful) for index in row)
        if len(kept) >= wanted:
            break
    # The last round may give more than a batch: which groups stay must not depend on the number of ranks.
    order = sorted(kept)[:wanted]
    chosen = set(order)
    groups = [group for group in seen if group.index in chosen]
    metrics = _reward_metrics(run, seen)
    metrics |= {"prompts/kept": len(order) / num_seen, "time/reward": waited_s}
    errors = exchange([error for group in seen for error in group.errors][:_MAX_ERRORS])
    batch = _with_advantages(run, groups, batch if batch is not None else _batch(run, groups))
    return Experience(groups, batch, metrics, sorted({e for row in errors for e in row}), order)


def sample_groups(
    run: Run,
    mine: Sequence[tuple[int, Prompt]],
    step: int,
    size: int,
    sampling: Sampling,
    pending: PendingRewards,
) -> list[Group]:
    """`size` completions of each of this rank's prompts, which `pending` gets as they come. Collective: every rank."""
    seed = run.recipe.train.seed
    requests = [
        Request(Trajectory.of_prompt(p.tokens, i, g), sample_seed(seed, step, i * size + g))
        for i, p in mine
        for g in range(size)
    ]
    prompts = [prompt for _, prompt in mine for _ in range(size)]
    completions, texts = _generate(run, prompts, requests, sampling, pending)
    groups = []
    for k, (index, prompt) in enumerate(mine):
        part = slice(k * size, (k + 1) * size)
        groups.append(Group(index, prompt, completions[part], texts[part]))
    return groups


def await_rewards(run: Run, groups: Sequence[Group], pending: PendingRewards) -> float:
    """Give the groups their rewards; returns the seconds that were spent waiting. Collective: every rank."""
    started = time.perf_counter()
    scored = iter(result_together(pending))
    waited_s = time.perf_counter() - started
    for group in groups:
        part = [next(scored) for _ in group.completions]
        group.failed = [s.failed for s in part]
        group.totals = [0.0 if s.failed else s.total for s in part]
        penalties = [_overlong(run, completion) for completion in group.completions]
        group.rewards = [total + penalty for total, penalty in zip(group.totals, penalties, strict=True)]
        group.parts = [dict(s.parts) for s in part]
        group.errors = [error for s in part for error in s.errors]
    return waited_s


def _generate(
    run: Run,
    prompts: Sequence[Prompt],
    requests: list[Request],
    sampling: Sampling,
    pending: PendingRewards,
) -> tuple[list[Completion], list[str]]:
    """Completions and their texts; rewards of those that the engine has answered run while it answers the others."""
    completions: list[Completion] = []
    texts: list[str] = []
    with _lending(run):
        for answered in answers(run.engine, requests, sampling):
            asked = [prompts[index] for index, _ in answered]
            fresh = [Completion.of(trajectory) for _, trajectory in answered]
            written = [_text(run, completion) for completion in fresh]
            pending.add([(p.text, text, p.row) for p, text in zip(asked, written, strict=True)])
            completions += fresh
            texts += written
    raise_together(_unusable(run, completions))
    return completions, texts


def _unusable(run: Run, completions: Sequence[Completion]) -> list[Finding]:
    """What forbids to train on completions: older weights than allowed, log-probs that are not numbers."""
    newest, lag = run.policy.model.version, run.recipe.rollout.max_version_lag
    findings = []
    stale = [c.version for c in completions if not newest - lag <= c.version <= newest]
    if stale:
        message = (
            f"completions come from version {stale[:1]}, the policy is {newest}, the lag allowed is {lag}."
        )
        findings.append(Finding("R501", "rollout", message))
    for number, completion in enumerate(completions):
        odd = [k for k, logp in enumerate(completion.logprobs) if logp is None or not math.isfinite(logp)]
        if odd:
            message = f"the engine's log-prob of token {odd[0]} of sequence {number} is {completion.logprobs[odd[0]]}."
            findings.append(Finding("R503", "rollout", message, rank=dist.get_rank()))
            break
    return findings


@contextmanager
def _lending(run: Run) -> Iterator[None]:
    """Lend the policy's device memory to the engine inside the block, if the recipe says so."""
    if not run.recipe.rollout.offload_policy:
        yield
        return
    run.policy.model.offload(run.policy.optimizer)
    try:
        yield
    finally:
        run.policy.model.onload()


def _text(run: Run, completion: Completion) -> str:
    tokens = completion.tokens[:-1] if completion.finished else completion.tokens
    with panics_as_errors():
        return run.tokenizer.decode(tokens, skip_special_tokens=True)


def _overlong(run: Run, completion: Completion) -> float:
    start = run.recipe.algorithm.overlong_from
    if start is None:
        return 0.0
    return adv.overlong_penalty(len(completion.tokens), start, run.sampling.max_new_tokens)


def _batch(run: Run, groups: Sequence[Group]) -> Batch:
    """Sequences of this rank's groups, and the columns that need no reward. Collective: every rank."""
    sequences, mask, rollout = [], [], []
    for group in groups:
        for completion in group.completions:
            prompt = len(group.prompt.tokens)
            sequences.append([*group.prompt.tokens, *completion.tokens])
            before = [0.0] * (prompt - 1)
            mask.append(before + [1.0] * len(completion.tokens))
            rollout.append([*before, *completion.logprobs])
    columns: dict[str, Any] = {"mask": mask, "rollout_logps": rollout}
    columns |= _scores(run, sequences)
    return Batch(sequences, **columns)


def _scores(run: Run, sequences: list[list[int]]) -> dict[str, Any]:
    """Log-probs of the reference and of the policy before its updates, and the critic's values, where needed."""
    settings, temperature = run.recipe.algorithm, run.sampling.temperature
    size = run.recipe.train.micro_batch_tokens
    found: dict[str, Any] = {}
    if settings.kl_coef > 0:
        # One temperature for policy and reference: a KL between differently scaled distributions means nothing.
        model = run.reference if run.reference is not None else run.policy.model
        adapters = run.reference is not None
        found["ref_logps"] = logprobs(model, sequences, temperature, adapters, micro_batch_tokens=size)
    if settings.updates_per_batch > 1 or (settings.kl_coef > 0 and settings.kl_in == "reward"):
        found["old_logps"] = logprobs(run.policy.model, sequences, temperature, micro_batch_tokens=size)
    if run.critic is not None:
        found["values"] = values(run.critic.model, sequences, micro_batch_tokens=size)
    return found


def _token_rewards(run: Run, groups: Sequence[Group], batch: Batch) -> list[torch.Tensor]:
    """Each sequence's reward on its last token, less the KL of each token if that belongs to the reward."""
    if not groups:
        return []
    settings = run.recipe.algorithm
    row = torch.zeros(len(batch.flat("mask")))
    last = torch.tensor([length - 1 for length in batch.lengths]).cumsum(0) - 1
    row[last] = torch.tensor([reward for group in groups for reward in group.rewards])
    if settings.kl_coef > 0 and settings.kl_in == "reward":
        kl = adv.kl_estimate(batch.flat("old_logps"), batch.flat("ref_logps"), settings.kl_estimator)
        row -= settings.kl_coef * kl * batch.flat("mask")
    return batch.rows(row)


def _without_failed(groups: Sequence[Group], batch: Batch) -> Batch:
    """The batch in which no token of a completion counts whose reward failed: neither in weights nor in means."""
    failed = [flag for group in groups for flag in group.failed]
    masks = [
        torch.zeros_like(m) if flag else m for m, flag in zip(batch.columns["mask"], failed, strict=True)
    ]
    return batch.with_column("mask", masks)


def _with_advantages(run: Run, groups: Sequence[Group], batch: Batch) -> Batch:
    batch = _without_failed(groups, batch)
    kind = ALGORITHMS[run.recipe.algorithm.name].advantages
    token_rewards = _token_rewards(run, groups, batch)
    if kind == "gae":
        return _gae(run, batch, token_rewards)
    masks = batch.columns["mask"]
    if kind == "batch":
        returns = [
            adv.discounted(row, run.recipe.algorithm.gamma) * m
            for row, m in zip(token_rewards, masks, strict=True)
        ]
        return batch.with_column("advantages", _normalised_over_batch(returns, masks))
    if not groups:
        return batch.with_column("advantages", [])
    function = {
        "normalised": adv.group_normalised,
        "centred": adv.group_centred,
        "leave_one_out": adv.leave_one_out,
    }[kind]
    sequence = batch.sequence_indices()
    totals = torch.zeros(len(batch)).index_add(0, sequence, torch.cat(token_rewards))
    counted = torch.tensor([not flag for group in groups for flag in group.failed])
    size = run.recipe.rollout.group_size
    each = function(totals.view(-1, size), counted.view(-1, size)).flatten()
    return batch.with_column("advantages", batch.rows(each[sequence] * batch.flat("mask")))


def _gae(run: Run, batch: Batch, token_rewards: list[torch.Tensor]) -> Batch:
    settings = run.recipe.algorithm
    advantages, returns = [], []
    for row, value, mask in zip(token_rewards, batch.columns["values"], batch.columns["mask"], strict=True):
        counted = mask.bool()
        a, r = torch.zeros_like(row), torch.zeros_like(row)
        a[counted], r[counted] = adv.gae(row[counted], value[counted], settings.gamma, settings.gae_lambda)
        advantages.append(a)
        returns.append(r)
    batch = batch.with_column("returns", returns)
    return batch.with_column("advantages", _normalised_over_batch(advantages, batch.columns["mask"]))


def _normalised_over_batch(rows: list[torch.Tensor], masks: list[torch.Tensor]) -> list[torch.Tensor]:
    """REINFORCE++ and PPO: (x - mean) / std over the counted tokens of every rank. Collective: every rank."""
    counted = (
        torch.cat([row[mask.bool()] for row, mask in zip(rows, masks, strict=True)])
        if rows
        else torch.empty(0)
    )
    parts = exchange([float(counted.double().sum()), float(counted.double().square().sum()), counted.numel()])
    total, square, number = (sum(part[k] for part in parts) for k in range(3))
    mean = total / max(number, 1)
    std = max(square / max(number, 1) - mean**2, 0.0) ** 0.5
    return [(row - mean) / (std + 1e-8) * mask for row, mask in zip(rows, masks, strict=True)]


def _reward_metrics(run: Run, groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and lengths of the global batch; completions whose reward failed have none. Collective: every rank."""
    mine = {
        "rewards": [reward for group in groups for reward in group.known(group.rewards)],
        "lengths": [len(c.tokens) for group in groups for c in group.completions],
        "finished": [c.finished for group in groups for c in group.completions],
        "spread": [statistics.pstdev(known) for group in groups if (known := group.known(group.rewards))],
        "parts": [part for group in groups for part in group.known(group.parts)],
        "errors": [float(len(group.errors)) for group in groups],
        "failed": [float(sum(group.failed)) for group in groups],
    }
    rows = exchange(mine)[:: run.policy.model.sequence_parallel]
    merged = {key: [value for row in rows for value in row[key]] for key in mine}
    metrics = {
        "reward/mean": _mean(merged["rewards"]),
        "reward/std": statistics.pstdev(merged["rewards"]) if merged["rewards"] else 0.0,
        "reward/group_std": _mean(merged["spread"]),
        "completion/length": _mean(merged["lengths"]),
        "completion/finished": _mean(merged["finished"]),
        "reward/errors": sum(merged["errors"]),
        "reward/failed": sum(merged["failed"]),
    }
    for name in sorted({name for part in merged["parts"] for name in part}):
        metrics[f"reward/{name}"] = _mean([part.get(name, 0.0) for part in merged["parts"]])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
