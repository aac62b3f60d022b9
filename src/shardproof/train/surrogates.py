"""Surrogates: what a policy gradient makes of ratios and advantages. One value per token; weights are applied later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from shardproof.bounds import require_number
from shardproof.errors import choose, fail

Columns = Mapping[str, torch.Tensor]
Found = tuple[torch.Tensor, torch.Tensor]
# (logps, old_logps, columns, clip_low, clip_high) -> (loss per token, 1.0 for each token that the clip changed)
Surrogate = Callable[[torch.Tensor, torch.Tensor, Columns, float, float], Found]

RATIOS = ("token", "sequence", "product")
_MOST = 80.0  # of a log-ratio: exp of 89 is infinite, and the gradient of what a clip cuts off would be NaN instead of 0


def ratio_of(logps: torch.Tensor, old: torch.Tensor, columns: Columns, level: str) -> torch.Tensor:
    """The ratio of new to old probability, for each token.

    "token": its own. "sequence": the geometric mean of its sequence's, as in GSPO. "product": the product of its
    sequence's, which is the ratio of the whole completion. The gradient of the last two reaches every token.
    """
    if level == "token":
        return _exp(logps - old)
    sequence, counted = columns["sequence"].long(), columns["mask"]
    num = len(logps)  # at least one token each: an upper bound that needs no wait for the device
    sums = torch.zeros(num, device=logps.device).index_add(0, sequence, (logps - old) * counted)
    if level == "product":
        return _exp(sums)[sequence]
    counts = torch.zeros(num, device=logps.device).index_add(0, sequence, counted)
    return _exp(sums / counts.clamp(min=1.0))[sequence]


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio.clamp(max=_MOST))


@dataclass(frozen=True)
class Clip:
    """PPO, GRPO, DAPO: -min(r A, clip(r, 1 - low, 1 + high) A); with `dual` at most dual |A| where A is negative."""

    ratio: str = "token"
    dual: float = 0.0  # 0: no such bound

    def __call__(
        self, logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
    ) -> Found:
        advantages, ratio = columns["advantages"], ratio_of(logps, old, columns, self.ratio)
        plain, bounded = ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages
        # Above 1 + high, so where A is positive the clip is the nearer bound.
        counted = ratio.clamp(max=self.dual) * advantages if self.dual else plain
        value = torch.minimum(counted, bounded)
        return -value, (value != plain).float().detach()


@dataclass(frozen=True)
class Detached:
    """CISPO: -stop_gradient(clip(r, 1 - low, 1 + high)) A logp: no token loses its gradient to the clip."""

    ratio: str = "token"
    has_low: bool = True

    def __call__(
        self, logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
    ) -> Found:
        ratio = ratio_of(logps, old, columns, self.ratio).detach()
        weight = ratio.clamp(min=1.0 - low if self.has_low else None, max=1.0 + high)
        return -weight * columns["advantages"] * logps, (weight != ratio).float()


@dataclass(frozen=True)
class SoftGate:
    """SAPO: -(4 / t) sigmoid(t (r - 1)) A, whose slope at r = 1 is -A, with one t for each sign of A."""

    ratio: str = "token"
    positive: float = 1.0
    negative: float = 1.05

    def __call__(
        self, logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
    ) -> Found:
        advantages, ratio = columns["advantages"], ratio_of(logps, old, columns, self.ratio)
        t = torch.where(advantages > 0, self.positive, self.negative)
        return -torch.sigmoid(t * (ratio - 1.0)) * 4.0 / t * advantages, torch.zeros_like(ratio)


def clip_cov(
    logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip-Cov: PPO's loss without the tokens of the column `chosen`."""
    loss, clipped = Clip()(logps, old, columns, low, high)
    chosen = columns["chosen"]
    return loss * (1.0 - chosen), torch.maximum(clipped, chosen)


@dataclass(frozen=True)
class HeldBack:
    """KL-Cov: -r A, plus coef |logp - old| for the tokens of the column `chosen`."""

    coef: float = 0.1

    def __call__(
        self, logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
    ) -> Found:
        chosen = columns["chosen"]
        loss = -ratio_of(logps, old, columns, "token") * columns["advantages"]
        return loss + self.coef * chosen * (logps - old).abs(), chosen


SURROGATES: dict[str, Surrogate] = {
    "clipped": Clip(),
    "sequence": Clip("sequence"),
    "detached": Detached(has_low=False),
    "cispo": Detached(),
    "sapo": SoftGate(),
    "clip_cov": clip_cov,
    "kl_cov": HeldBack(),
}
CHOOSES = ("clip_cov", "kl_cov")  # those that need the column `chosen`


@dataclass(frozen=True)
class SurrogateSettings:
    """What surrogates have besides their clip range."""

    ratio: str = "token"
    dual_clip: float = 0.0
    temperatures: tuple[float, float] = (1.0, 1.05)  # of SAPO: where the advantage is positive, and where not
    cov_kl_coef: float = 0.1


PLAIN = SurrogateSettings()


def find_surrogate(surrogate: str | Surrogate, settings: SurrogateSettings, high: float) -> Surrogate:
    """The surrogate with this name and these settings, or the one given, which has its own."""
    choose("loss", "ratio", settings.ratio, RATIOS)
    if not isinstance(surrogate, str):
        if settings != PLAIN:
            raise fail("C001", "loss", "ratio and dual_clip are for surrogates by name, not for your own.")
        return surrogate
    found = SURROGATES[choose("loss", "surrogate", surrogate, SURROGATES)]
    if settings.dual_clip:
        require_number("loss", "dual_clip", settings.dual_clip, above=1.0 + high)
        if surrogate != "clipped":
            raise fail("C001", "loss", f"dual_clip is for surrogate='clipped', not for {surrogate!r}.")
    if surrogate == "clipped":
        return Clip(settings.ratio, settings.dual_clip)
    if surrogate == "cispo":
        return Detached(settings.ratio)
    if surrogate == "sapo":
        positive, negative = (
            require_number("loss", "temperatures", each, above=0) for each in settings.temperatures
        )
        return SoftGate(settings.ratio, positive, negative)
    if settings.ratio != "token":
        raise fail("C001", "loss", f"ratio={settings.ratio!r} is not for surrogate={surrogate!r}.")
    if surrogate == "kl_cov":
        return HeldBack(require_number("loss", "cov_kl_coef", settings.cov_kl_coef, at_least=0))
    return found
