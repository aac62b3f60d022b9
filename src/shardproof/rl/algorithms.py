"""Algorithms: which advantages, which loss, which weights. Each is a row of a table and a loss of a few lines."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardproof.config.schema import Algorithm as Settings
from shardproof.rl.advantages import kl_estimate
from shardproof.train.loss import Columns, Loss, Scored


@dataclass(frozen=True)
class Facts:
    """What distinguishes an algorithm from the others."""

    advantages: str  # "normalised" | "centred" | "leave_one_out" | "batch" | "gae" | "none"
    weights: str  # "token_mean" | "sequence_mean" | "constant"
    ratio: str = "clipped"  # "clipped" | "sequence" | "detached"
    clip_high: float | None = None  # None: as clip_low
    dynamic_sampling: bool = False


ALGORITHMS: dict[str, Facts] = {
    "grpo": Facts("normalised", "sequence_mean"),
    "dr_grpo": Facts("centred", "constant"),
    "dapo": Facts("normalised", "token_mean", clip_high=0.28, dynamic_sampling=True),
    "rloo": Facts("leave_one_out", "token_mean"),
    "reinforce_pp": Facts("batch", "token_mean"),
    "ppo": Facts("gae", "token_mean"),
    "gspo": Facts("normalised", "sequence_mean", ratio="sequence"),
    "cispo": Facts("normalised", "token_mean", ratio="detached", clip_high=0.28),
    "sft": Facts("none", "token_mean"),
}


def make_loss(settings: Settings, top_p: float = 1.0) -> Loss:
    """The policy's loss: the algorithm's surrogate, truncated importance weights, KL and entropy terms.

    With `top_p` below 1 the engine's log-probs are those of the nucleus, and their distance from the trainer's says how
    much likelier its tokens were made, not how far the two are apart.
    """
    if settings.name == "sft":
        return Loss("sft", _cross_entropy, metrics={"loss/policy": "mean"})
    facts = ALGORITHMS[settings.name]
    low = settings.clip_low
    high = settings.clip_high if settings.clip_high is not None else (facts.clip_high or low)
    surrogate = {"clipped": _clipped, "sequence": _sequence_clipped, "detached": _detached}[facts.ratio]
    kl_coef = settings.kl_coef if settings.kl_in == "loss" else 0.0
    reductions = {"loss/policy": "mean", "clip_fraction": "mean", "ratio/max": "max"}
    reductions |= (
        {"mismatch/mean": "mean", "mismatch/max": "max"} if top_p == 1.0 else {"nucleus/mean": "mean"}
    )

    def function(scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # One update a batch needs no second scoring: the policy is its own old policy.
        old = columns.get("old_logps", scored.logps.detach())
        gap = old - columns["rollout_logps"]
        loss, clipped = surrogate(scored.logps, old, columns, low, high)
        if settings.tis_cap is not None:
            loss = loss * torch.exp(gap).clamp(max=settings.tis_cap)
        metrics = {
            "loss/policy": loss.detach(),
            "clip_fraction": clipped,
            "ratio/max": torch.exp(scored.logps.detach() - old),
        }
        if top_p == 1.0:
            metrics |= {"mismatch/mean": gap.abs(), "mismatch/max": gap.abs()}
        else:
            metrics["nucleus/mean"] = -gap
        if "ref_logps" in columns:
            kl = kl_estimate(scored.logps, columns["ref_logps"], settings.kl_estimator)
            metrics["kl/mean"] = kl.detach()
            if settings.kl_ratio_correction:
                # What samples are drawn depends on the weights, too: the ratio brings that into the gradient.
                kl = kl * torch.exp(scored.logps - old)
            loss = loss + kl_coef * kl
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * scored.entropy
            metrics["entropy/mean"] = scored.entropy.detach()
        return loss, metrics

    if settings.kl_coef:
        reductions["kl/mean"] = "mean"
    if settings.entropy_coef:
        reductions["entropy/mean"] = "mean"
    columns = ("advantages", "rollout_logps") + (("ref_logps",) if settings.kl_coef else ())
    return Loss(settings.name, function, columns, reductions, want_entropy=bool(settings.entropy_coef))


def _cross_entropy(scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """SFT: -logp of the given tokens."""
    return -scored.logps, {"loss/policy": -scored.logps.detach()}


def _clipped(
    logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO, GRPO, DAPO: -min(r A, clip(r) A), token by token."""
    return _clip(torch.exp(logps - old), columns["advantages"], low, high)


def _sequence_clipped(
    logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GSPO: one ratio a completion, the geometric mean of its tokens' ratios; the gradient reaches every token."""
    sequence, counted = columns["sequence"].long(), columns["mask"]
    num = len(logps)  # at least one token each: an upper bound that needs no wait for the device
    sums = torch.zeros(num, device=logps.device).index_add(0, sequence, (logps - old) * counted)
    counts = torch.zeros(num, device=logps.device).index_add(0, sequence, counted)
    ratio = torch.exp(sums / counts.clamp(min=1.0))[sequence]
    return _clip(ratio, columns["advantages"], low, high)


def _detached(
    logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO: -stop_gradient(min(r, 1 + high)) A logp: no token loses its gradient to the clip."""
    ratio = torch.exp(logps - old).detach()
    weight = ratio.clamp(max=1.0 + high)
    return -weight * columns["advantages"] * logps, (weight < ratio).float()


def _clip(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return loss, (clipped * advantages < ratio * advantages).float().detach()
