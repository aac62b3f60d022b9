"""Surrogates: what a policy gradient makes of ratios and advantages. One value per token; weights are applied later."""

from __future__ import annotations

import math
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
_FAR, _LEAST = 20.0, math.log(1e-8)  # of VESPO's log-ratios, as in TRL


def ratio_of(logps: torch.Tensor, old: torch.Tensor, columns: Columns, level: str) -> torch.Tensor:
    """The ratio of new to old probability, for each token.

    "token": its own. "sequence": the geometric mean of its sequence's, as in GSPO. "product": the product of its
    sequence's, which is the ratio of the whole completion. The gradient of the last two reaches every token.
    """
    return _ratio(logps - old, columns, level)


def _ratio(log_ratio: torch.Tensor, columns: Columns, level: str) -> torch.Tensor:
    if level == "token":
        return _exp(log_ratio)
    return _exp((sequence_sum if level == "product" else sequence_mean)(log_ratio, columns))


def sequence_sum(values: torch.Tensor, columns: Columns) -> torch.Tensor:
    """The sum over the counted tokens of each one's sequence, for each token."""
    sequence = columns["sequence"].long()
    # As many as tokens: an upper bound of the number of sequences that needs no wait for the device.
    sums = torch.zeros(len(values), device=values.device)
    return sums.index_add(0, sequence, values * columns["mask"])[sequence]


def sequence_mean(values: torch.Tensor, columns: Columns) -> torch.Tensor:
    """The mean over the counted tokens of each one's sequence, for each token."""
    counts = sequence_sum(torch.ones_like(columns["mask"]), columns)
    return sequence_sum(values, columns) / counts.clamp(min=1.0)


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio.clamp(max=_MOST))


def _changed(bounded: torch.Tensor, plain: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """1.0 for the tokens whose loss a bound changed: that of a token without an advantage is 0 with any bound."""
    return ((bounded != plain) & (advantages != 0)).float()


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
        return -weight * columns["advantages"] * logps, _changed(weight, ratio, columns["advantages"])


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


@dataclass(frozen=True)
class Gamma:
    """VESPO: -stop_gradient(phi(w)) A logp, with phi(w) = w^k exp(lambda (1 - w)) and w the ratio of the whole sequence.

    phi is 1 at w = 1 and falls on both sides of its peak at k / lambda; `positive` and `negative` are (k, lambda) by the
    sign of A.
    """

    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)

    def __call__(
        self, logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
    ) -> Found:
        advantages = columns["advantages"]
        log_w = sequence_sum((logps.detach() - old).clamp(-_FAR, _FAR), columns).clamp(_LEAST, _FAR)
        k, rate = (
            torch.where(advantages >= 0, plus, minus)
            for plus, minus in zip(self.positive, self.negative, strict=True)
        )
        phi = _exp(rate + k * log_w - rate * torch.exp(log_w))
        return -phi * advantages * logps, torch.zeros_like(phi)


def geometric_mean(
    logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
) -> Found:
    """GMPO: -A times the geometric mean of the completion's ratios, each clipped within exp(-low) and exp(high).

    As in PPO, the clip holds back what would raise the objective, and nothing else.
    """
    advantages, log_ratio = columns["advantages"], logps - old
    bounded = log_ratio.clamp(-low, high)
    nearer = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    changed = _changed(nearer.detach(), log_ratio.detach(), advantages)
    return -_ratio(nearer, columns, "sequence") * advantages, changed


@dataclass(frozen=True)
class Divergence:
    """DPPO: -stop_gradient(r) A logp, and 0 for tokens whose probability has moved too far to where A would move it.

    How far is the divergence of two coins, one that shows the token and one that does not: by "tv" the difference p - q of
    new and old probability, by "kl" KL(q || p). With a `most`, larger ratios count as this.
    """

    kind: str = "tv"
    most: float = 0.0  # 0: no such bound

    def __call__(
        self, logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float
    ) -> Found:
        advantages, now = columns["advantages"], logps.detach()
        ratio = ratio_of(now, old, columns, "token")
        moved = torch.exp(now) - torch.exp(old)
        distance = moved.abs() if self.kind == "tv" else coin_kl(old, now)
        too_far = torch.where(advantages > 0, (moved > 0) & (distance > high), (moved < 0) & (distance > low))
        weight = torch.where(too_far, 0.0, ratio.clamp(max=self.most) if self.most else ratio)
        return -weight * advantages * logps, _changed(weight, ratio, advantages)


def coin_kl(logq: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """KL(q || p) of two coins that show heads with the probabilities exp(logq) and exp(logp)."""
    q, p = (torch.exp(x).clamp(max=1.0) for x in (logq, logp))  # rounding may lift log-probs above 0
    tiny = 1e-8  # a token that is certain leaves nothing for the other side
    return q * (logq - logp) + (1.0 - q) * torch.log((1.0 - q + tiny) / (1.0 - p + tiny))


def clip_cov(logps: torch.Tensor, old: torch.Tensor, columns: Columns, low: float, high: float) -> Found:
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
    "vespo": Gamma(),
    "clip_cov": clip_cov,
    "kl_cov": HeldBack(),
    "geo_mean": geometric_mean,
    "dppo_tv": Divergence("tv"),
    "dppo_kl": Divergence("kl"),
}
CHOOSES = ("clip_cov", "kl_cov")  # those that need the column `chosen`
_DIVERGENCES = {"dppo_tv": "tv", "dppo_kl": "kl"}


@dataclass(frozen=True)
class SurrogateSettings:
    """What surrogates have besides their clip range."""

    ratio: str = "token"
    dual_clip: float = 0.0  # of DPPO: the largest ratio that counts
    temperatures: tuple[float, float] = (1.0, 1.05)  # of SAPO: where the advantage is positive, and where not
    cov_kl_coef: float = 0.1
    # Of VESPO: (k, lambda) where the advantage is not negative, and where it is.
    gammas: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0))


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
        if surrogate not in ("clipped", *_DIVERGENCES):
            raise fail("C001", "loss", f"dual_clip is for surrogate='clipped', not for {surrogate!r}.")
        least = 1.0 + high if surrogate == "clipped" else 1.0
        require_number("loss", "dual_clip", settings.dual_clip, above=least)
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
    if surrogate == "vespo":
        for number in (number for pair in settings.gammas for number in pair):
            require_number("loss", "gammas", number, above=0)
        return Gamma(*settings.gammas)
    if surrogate in _DIVERGENCES:
        return Divergence(_DIVERGENCES[surrogate], settings.dual_clip)
    if surrogate == "kl_cov":
        return HeldBack(require_number("loss", "cov_kl_coef", settings.cov_kl_coef, at_least=0))
    return found
