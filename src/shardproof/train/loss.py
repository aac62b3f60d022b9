"""Losses as pure functions of what was scored and what the batch says. One value a token; weights are applied later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from shardproof.bounds import require_number
from shardproof.errors import choose, fail


@dataclass(frozen=True)
class Scored:
    """What the model says about each prediction of a micro-batch, in one row of float32."""

    logps: torch.Tensor
    entropy: torch.Tensor  # empty unless the loss wants it
    values: torch.Tensor  # a critic's; empty otherwise


Columns = Mapping[str, torch.Tensor]
LossFunction = Callable[[Scored, Columns], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Loss:
    """A loss: its function returns (loss of each token, {metric: value of each token})."""

    name: str
    function: LossFunction
    columns: tuple[str, ...] = ()  # that the batch must have
    metrics: Mapping[str, str] = field(default_factory=dict)  # {name: "mean" | "sum" | "max" | "min"}
    want_entropy: bool = False
    role: str = "policy"


def sft() -> Loss:
    """Cross-entropy of the given tokens."""
    return Loss("sft", lambda scored, columns: (-scored.logps, {}))


def policy_gradient(
    clip_low: float = 0.2,
    clip_high: float | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    *,
    kl_ratio_correction: bool = False,
) -> Loss:
    """Clipped policy gradient: -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef KL - entropy_coef H.

    r = exp(logp - old_logp). The KL to the reference is the k3 estimate, exp(d) - d - 1 with d = ref_logp - logp.
    With `kl_ratio_correction` it is multiplied by r, and its expected gradient is then that of the KL.
    """
    high = clip_low if clip_high is None else clip_high
    require_number("loss", "clip_low", clip_low, at_least=0)
    require_number("loss", "clip_high", high, at_least=0)
    require_number("loss", "kl_coef", kl_coef, at_least=0)
    require_number("loss", "entropy_coef", entropy_coef, at_least=0)

    def function(scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        advantage = columns["advantages"]
        ratio = torch.exp(scored.logps - columns["old_logps"])
        clipped = ratio.clamp(1.0 - clip_low, 1.0 + high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        metrics = {
            "ratio/mean": ratio.detach(),
            "ratio/max": ratio.detach(),
            "clip_fraction": (clipped * advantage < ratio * advantage).float(),
        }
        if kl_coef:
            difference = columns["ref_logps"] - scored.logps
            kl = torch.exp(difference) - difference - 1.0
            loss = loss + kl_coef * (kl * ratio if kl_ratio_correction else kl)
            metrics["kl/mean"] = kl.detach()
        if entropy_coef:
            loss = loss - entropy_coef * scored.entropy
            metrics["entropy/mean"] = scored.entropy.detach()
        return loss, metrics

    reductions = {"ratio/mean": "mean", "ratio/max": "max", "clip_fraction": "mean"}
    reductions |= {"kl/mean": "mean"} if kl_coef else {}
    reductions |= {"entropy/mean": "mean"} if entropy_coef else {}
    columns = ("advantages", "old_logps") + (("ref_logps",) if kl_coef else ())
    return Loss("policy", function, columns, reductions, want_entropy=bool(entropy_coef))


def value(clip: float | None = None) -> Loss:
    """Half the squared error of a critic's values against `returns`, clipped around the old `values` if asked."""
    if clip is not None:
        require_number("loss", "clip", clip, above=0)

    def function(scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        error = (scored.values - columns["returns"]) ** 2
        if clip is not None:
            near = columns["values"] + (scored.values - columns["values"]).clamp(-clip, clip)
            error = torch.maximum(error, (near - columns["returns"]) ** 2)
        return 0.5 * error, {"value/mean": scored.values.detach()}

    columns = ("returns",) if clip is None else ("returns", "values")
    return Loss("value", function, columns, {"value/mean": "mean"}, role="critic")


LOSSES: dict[str, Callable[[], Loss]] = {"sft": sft, "policy": policy_gradient, "value": value}


def find_loss(loss: str | Loss) -> Loss:
    """A loss by its registered name, with default settings, or the one given."""
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, str):
        raise fail("C001", "loss", f"loss={loss!r} is neither a name nor a shardproof Loss.")
    return LOSSES[choose("loss", "loss", loss, LOSSES)]()
