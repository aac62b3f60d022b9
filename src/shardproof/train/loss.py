"""Losses as pure functions of what was scored and what the batch says. One value per token; weights are applied later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from shardproof.bounds import require_number
from shardproof.errors import choose, fail
from shardproof.train.corrections import Correction, find_correction, importance, mismatch_kl
from shardproof.train.surrogates import (
    CHOOSES,
    PLAIN,
    RATIOS,
    Surrogate,
    SurrogateSettings,
    find_surrogate,
    ratio_of,
    sequence_mean,
)


@dataclass(frozen=True)
class Scored:
    """What the model says about each prediction of a micro-batch, in one row of float32."""

    logps: torch.Tensor
    entropy: torch.Tensor  # empty unless the loss wants it
    values: torch.Tensor  # a critic's; empty otherwise


Columns = Mapping[str, torch.Tensor]
UNCERTAIN = "uncertain"  # a column: 1.0 for tokens whose entropy is among the highest of the batch
LossFunction = Callable[[Scored, Columns], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Loss:
    """A loss, whose function returns (loss per token, {metric: value per token})."""

    name: str
    function: LossFunction
    columns: tuple[str, ...] = ()  # that the batch must have
    metrics: Mapping[str, str] = field(default_factory=dict)  # {name: "mean" | "sum" | "max" | "min" | "ess"}
    want_entropy: bool = False
    role: str = "policy"


def sft(*, reported: bool = False) -> Loss:
    """Cross-entropy of the given tokens; `reported` as the metric `loss/policy`, too."""

    def function(scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -scored.logps, {"loss/policy": -scored.logps.detach()} if reported else {}

    return Loss("sft", function, metrics={"loss/policy": "mean"} if reported else {})


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, kind: str) -> torch.Tensor:
    """KL(policy || reference) from samples of the policy: k1 unbiased, k2 low variance, k3 both and never negative."""
    difference = logps - ref_logps
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    return torch.exp(-difference) + difference - 1.0


def off_policy(logps: torch.Tensor, drawn: torch.Tensor, columns: Columns, limit: float) -> torch.Tensor:
    """1.0 for tokens with a negative advantage in sequences that have become less likely by more than `limit` per token.

    `drawn` are the log-probs with which they were drawn.
    """
    fallen = sequence_mean(drawn - logps, columns) > limit
    return (fallen & (columns["advantages"] < 0)).float()


@dataclass(frozen=True)
class _PolicyGradient:
    """The function of a policy-gradient loss: see `policy_gradient`, which checks these settings."""

    surrogate: Surrogate
    clip_low: float
    clip_high: float
    kl_coef: float
    entropy_coef: float
    kl_estimator: str
    kl_ratio: str | None
    report_kl: bool
    report_entropy: bool
    rollout_whole: bool | None
    correction: Correction | None
    trust_region: str
    off_policy_limit: float | None
    uncertain_only: bool

    def __post_init__(self) -> None:
        for key in ("clip_low", "clip_high", "kl_coef", "entropy_coef"):
            require_number("loss", key, getattr(self, key), at_least=0)
        if self.off_policy_limit is not None:
            require_number("loss", "off_policy_limit", self.off_policy_limit, above=0)
        choose("loss", "kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        choose("loss", "trust_region", self.trust_region, ("proximal", "behaviour"))

    def __call__(self, scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        trainers = columns.get("old_logps", scored.logps.detach())
        old = columns["rollout_logps"] if self.trust_region == "behaviour" else trainers
        ratio = ratio_of(scored.logps, old, columns, "token")
        loss, changed = self.surrogate(scored.logps, old, columns, self.clip_low, self.clip_high)
        metrics = {"ratio/mean": ratio.detach(), "ratio/max": ratio.detach(), "clip_fraction": changed}
        if self.off_policy_limit is not None:
            drawn = columns.get("rollout_logps", old)
            left = off_policy(scored.logps.detach(), drawn, columns, self.off_policy_limit)
            loss = loss * (1.0 - left)
            metrics["off_policy/masked"] = left
        if self.uncertain_only:
            loss = loss * columns[UNCERTAIN]
        if self.rollout_whole is not None:
            gap = trainers - columns["rollout_logps"]
            if self.correction is not None:
                weights, told = self.correction.weigh(gap, columns)
                loss = loss * weights
                metrics |= told
            else:
                metrics["correction/ess"] = importance(gap)
            distance = {
                "mismatch/mean": gap.abs(),
                "mismatch/max": gap.abs(),
                "mismatch/kl": mismatch_kl(gap),
            }
            metrics |= {"loss/policy": loss.detach(), "nucleus/mean": -gap, **distance}
        if self.report_kl:
            kl = kl_estimate(scored.logps, columns["ref_logps"], self.kl_estimator)
            metrics["kl/mean"] = kl.detach()
            if self.kl_coef:
                # Which samples are drawn depends on the weights, too: the ratio brings that into the gradient.
                if self.kl_ratio == "token":
                    kl = kl * ratio
                elif self.kl_ratio is not None:
                    kl = kl * ratio_of(scored.logps, old, columns, self.kl_ratio)
                loss = loss + self.kl_coef * kl
        if self.report_entropy:
            if self.entropy_coef:
                raised = scored.entropy * columns[UNCERTAIN] if self.uncertain_only else scored.entropy
                loss = loss - self.entropy_coef * raised
            metrics["entropy/mean"] = scored.entropy.detach()
        return loss, {name: metrics[name] for name in self.reductions}

    @property
    def reductions(self) -> dict[str, str]:
        """The metrics, and how each is reduced over tokens and ranks."""
        if self.rollout_whole is None:
            found = {"ratio/mean": "mean", "ratio/max": "max", "clip_fraction": "mean"}
        else:
            found = {"loss/policy": "mean", "clip_fraction": "mean", "ratio/max": "max"}
            # Log-probs of a nucleus say how much likelier its tokens were made, not how far two models are apart.
            distance = {"mismatch/mean": "mean", "mismatch/max": "max", "mismatch/kl": "mean"}
            found |= distance if self.rollout_whole else {"nucleus/mean": "mean"}
        if self.correction is not None:
            found |= self.correction.metrics
        elif self.trust_region == "behaviour":  # the ratio has the importance weight in it
            found |= {"correction/ess": "ess"}
        found |= {"off_policy/masked": "mean"} if self.off_policy_limit is not None else {}
        found |= {"kl/mean": "mean"} if self.report_kl else {}
        return found | ({"entropy/mean": "mean"} if self.report_entropy else {})


def policy_gradient(
    clip_low: float = 0.2,
    clip_high: float | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    *,
    surrogate: str | Surrogate = "clipped",
    surrogate_settings: SurrogateSettings = PLAIN,
    kl_estimator: str = "k3",
    kl_ratio_correction: bool | str = False,
    report_kl: bool = False,
    report_entropy: bool = False,
    rollout_whole: bool | None = None,
    correction: str = "tis",
    tis_cap: float | None = None,
    mis_cap: float = 2.0,
    icepop_bounds: tuple[float, float] = (0.5, 5.0),
    trust_region: str = "proximal",
    off_policy_limit: float | None = None,
    uncertain_only: bool = False,
    name: str = "policy",
) -> Loss:
    """A policy gradient: surrogate(r, A) + kl_coef KL - entropy_coef H, with r = exp(logp - old_logp).

    The surrogate is one of train/surrogates.py, by default PPO's -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), or a
    function of yours. The KL to the reference is an estimate (`kl_estimate`); `kl_ratio_correction` multiplies it by r,
    or by the ratio of this level, and the expected gradient of k3 is then that of the KL. `report_kl` measures it where
    kl_coef is 0, too, and `report_entropy` the entropy where entropy_coef is 0.

    `rollout_whole` says that the batch has `rollout_logps`, those that its tokens were drawn with, and whether from the
    whole distribution. Their distance from the trainer's is reported, and without `old_logps` the policy is its own old
    policy.
    The surrogate is multiplied by the weights of a `correction` (train/corrections.py): "tis" with a `tis_cap`, "mis",
    "icepop" or "none". With trust_region="behaviour", r = exp(logp - rollout_logp), and nothing is corrected.

    With an `off_policy_limit` the surrogate is 0 where `off_policy` says so, and with `uncertain_only` surrogate and entropy
    are multiplied by the column `uncertain`.
    """
    high = clip_low if clip_high is None else clip_high
    found = find_correction(correction, tis_cap, mis_cap, icepop_bounds)
    _check_drawn(found, trust_region, rollout_whole)
    function = _PolicyGradient(
        surrogate=find_surrogate(surrogate, surrogate_settings, high),
        clip_low=clip_low,
        clip_high=high,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        kl_estimator=kl_estimator,
        kl_ratio=_level(kl_ratio_correction),
        report_kl=report_kl or bool(kl_coef),
        report_entropy=report_entropy or bool(entropy_coef),
        rollout_whole=rollout_whole,
        correction=found if trust_region == "proximal" else None,
        trust_region=trust_region,
        off_policy_limit=off_policy_limit,
        uncertain_only=uncertain_only,
    )
    columns = _columns(function, surrogate in CHOOSES)
    return Loss(name, function, columns, function.reductions, function.report_entropy)


def _columns(function: _PolicyGradient, chooses: bool) -> tuple[str, ...]:
    """The columns that the batch must have for this loss."""
    wanted = {
        "advantages": True,
        "old_logps": function.rollout_whole is None,
        "rollout_logps": function.rollout_whole is not None,
        "ref_logps": function.report_kl,
        "chosen": chooses,
        UNCERTAIN: function.uncertain_only,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def _level(corrected: bool | str) -> str | None:
    """The level of the ratio that the KL is multiplied by; None: it is not."""
    if isinstance(corrected, str):
        return choose("loss", "kl_ratio_correction", corrected, RATIOS)
    return "token" if corrected else None


def _check_drawn(correction: Correction | None, trust_region: str, whole: bool | None) -> None:
    """Raise for what needs the log-probs that tokens were drawn with, if there are none, or only those of a nucleus."""
    asked = correction.name if correction is not None else None
    asked = trust_region if trust_region == "behaviour" else asked
    if asked is None:
        return
    if whole is None:
        raise fail("C001", "loss", f"{asked!r} needs rollout log-probs.", fix="set rollout_whole")
    if not whole and asked in ("mis", "behaviour"):
        message = (
            f"{asked!r} needs log-probs of the whole distribution, not of a nucleus (rollout_whole=False)."
        )
        raise fail("C001", "loss", message, fix="use tis or icepop, or rollout_whole=True")


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
