"""Losses of preference data: pairs of completions (DPO and its variants), and labelled completions (KTO).

A pair is a conversation of two sequences in one micro-batch; its loss stands on each of its counted tokens, and weights
that sum to the same for every pair make the mean over pairs of it. Shapes: T predictions, U units (pairs or sequences).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from shardproof.bounds import require_number
from shardproof.errors import choose, fail
from shardproof.train.loss import Columns, Loss, Scored

_MAX_EXPONENT = 80.0  # of an alpha divergence: exp of more is not a float32
PAIR_METRICS = dict.fromkeys(
    (
        "loss/policy",
        "reward/chosen",
        "reward/rejected",
        "reward/margin",
        "reward/accuracy",
        "logps/chosen",
        "logps/rejected",
    ),
    "mean",
)
LABEL_METRICS = dict.fromkeys(
    ("loss/policy", "reward/chosen", "reward/rejected", "logps/chosen", "logps/rejected", "kl/mean"), "mean"
)


@dataclass(frozen=True)
class Pairs:
    """What the losses of pairs are functions of, one value per pair."""

    chosen_U: torch.Tensor  # log-ratios: of the policy to the reference
    rejected_U: torch.Tensor
    chosen_scores_U: torch.Tensor  # what an f-divergence makes of them
    rejected_scores_U: torch.Tensor
    chosen_tokens_U: torch.Tensor  # numbers of counted tokens
    rejected_tokens_U: torch.Tensor

    @property
    def delta_U(self) -> torch.Tensor:
        return self.chosen_scores_U - self.rejected_scores_U

    @property
    def delta_per_token_U(self) -> torch.Tensor:
        """The difference of scores per token."""
        chosen = self.chosen_scores_U / self.chosen_tokens_U.clamp(min=1.0)
        return chosen - self.rejected_scores_U / self.rejected_tokens_U.clamp(min=1.0)


@dataclass(frozen=True)
class PairSettings:
    """The numbers in losses of pairs."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    divergence: str = "reverse_kl"
    divergence_alpha: float = 0.5
    discopop_tau: float = 0.05
    reference_free: bool = False

    def score(self, ratios_U: torch.Tensor) -> torch.Tensor:
        """f'(u) of the divergence's f at u = exp(log-ratio), without its constants that cancel in differences."""
        if self.divergence == "forward_kl":
            return 1.0 - torch.exp(-ratios_U)
        if self.divergence == "js":
            return math.log(2.0) + logsigmoid(ratios_U)
        power = self.divergence_alpha - 1.0
        if self.divergence == "alpha" and abs(power) >= 1e-6:
            return (torch.exp((power * ratios_U).clamp(max=_MAX_EXPONENT)) - 1.0) / power
        return ratios_U  # reverse KL, to which alpha leads at 1


def _smoothed(logits_U: torch.Tensor, epsilon: float) -> torch.Tensor:
    return -(1.0 - epsilon) * logsigmoid(logits_U) - epsilon * logsigmoid(-logits_U)


def _sigmoid(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    """DPO; with label smoothing cDPO."""
    return _smoothed(s.beta * pairs.delta_U, s.label_smoothing)


def _sigmoid_norm(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    return -logsigmoid(s.beta * pairs.delta_per_token_U)


def _hinge(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    return torch.relu(1.0 - s.beta * pairs.delta_U)


def _ipo(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    return (pairs.delta_per_token_U - 1.0 / (2.0 * s.beta)) ** 2


def _robust(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    logits, epsilon = s.beta * pairs.delta_U, s.label_smoothing
    return (-(1.0 - epsilon) * logsigmoid(logits) + epsilon * logsigmoid(-logits)) / (1.0 - 2.0 * epsilon)


def _exo_pair(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    """The reverse KL from the smoothed label to what the policy says about the two."""
    logits = s.beta * pairs.delta_U
    wins = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-s.label_smoothing))
    return wins + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(s.label_smoothing))


def _nca_pair(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    chosen, rejected = s.beta * pairs.chosen_U, s.beta * pairs.rejected_U
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _bco_pair(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    return -logsigmoid(s.beta * pairs.chosen_U) - logsigmoid(-s.beta * pairs.rejected_U)


def _sppo_hard(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    return (pairs.chosen_U - 0.5 / s.beta) ** 2 + (pairs.rejected_U + 0.5 / s.beta) ** 2


def _apo_zero(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    return torch.sigmoid(-s.beta * pairs.chosen_U) + torch.sigmoid(s.beta * pairs.rejected_U)


def _apo_down(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    worse = torch.sigmoid(-s.beta * (pairs.chosen_U - pairs.rejected_U))
    return torch.sigmoid(s.beta * pairs.chosen_U) + worse


def _discopop(pairs: Pairs, s: PairSettings) -> torch.Tensor:
    logits = s.beta * pairs.delta_U
    share = torch.sigmoid(logits / s.discopop_tau)
    return -logsigmoid(logits) * (1.0 - share) + torch.exp(-logits) * share


PAIR_LOSSES: dict[str, Callable[[Pairs, PairSettings], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}
# Not functions of single pairs: `aot` and `aot_unpaired` sort the pairs of the batch, `sft` is a mean over its tokens.
COLUMNS_OF = {"aot": ("aot_reference",), "aot_unpaired": ("aot_other",), "sft": ("sft_weight",)}


@dataclass(frozen=True)
class _PairLoss:
    """The function of a loss of pairs: see `preference`."""

    losses: Mapping[str, float]
    settings: PairSettings

    def __call__(self, scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        s, unit, side, counted = self.settings, columns["conversation"], columns["side"], columns["mask"]
        total_of = _Totals(unit, len(side))
        sides = (counted * (side > 0), counted * (side < 0))
        shares = columns.get("ld_factor", torch.ones_like(counted))
        own_U = [total_of(which) for which in sides]
        logps_U = [total_of(scored.logps * shares * which) for which in sides]
        ratios_U, tokens_U = logps_U, own_U
        if not s.reference_free:
            gap = (scored.logps - columns["ref_logps"]) * shares
            ratios_U = [total_of(gap * which) for which in sides]
        if "partner_tokens" in columns:
            # The other sequence of each pair is in another micro-batch: what is known of it has no gradient.
            partner = _Partner(total_of, columns, own_U)
            logps_U, ratios_U = partner.joined(logps_U, "logps"), partner.joined(ratios_U, "ratio")
            tokens_U = partner.joined(own_U, "tokens")
        pairs = Pairs(*ratios_U, *map(s.score, ratios_U), *tokens_U)
        num_U, own = tokens_U[0] + tokens_U[1], torch.where(side > 0, own_U[0][unit], own_U[1][unit])
        half = num_U[unit] / own.clamp(min=1.0)
        loss = torch.zeros_like(scored.logps)
        for name, weight in self.losses.items():
            if name == "sft":
                loss = loss - weight * columns["sft_weight"] * scored.logps
                continue
            if name == "aot_unpaired":
                ratio = torch.where(side > 0, pairs.chosen_U[unit], pairs.rejected_U[unit])
                each = _smoothed(s.beta * side * (ratio - columns["aot_other"]), s.label_smoothing)
            elif name == "aot":
                delta = (logps_U[0] - logps_U[1])[unit] - columns["aot_reference"]
                each = _smoothed(s.beta * delta, s.label_smoothing)
            else:
                each = PAIR_LOSSES[name](pairs, s)[unit]
            if name == "aot_unpaired" or "partner_tokens" in columns:
                # Of two sequences that meet without each other's gradient, each has half of the loss and all of its own.
                each = (each - 0.5 * each.detach()) * half
            loss = loss + weight * each
        times = 1.0 / num_U.clamp(min=1.0)[unit]
        found = {"loss/policy": loss.detach()} | {
            k: v[unit] for k, v in self._told(ratios_U, logps_U).items()
        }
        return loss, {name: torch.stack([value, times]) for name, value in found.items()}

    def _told(self, ratios_U: list[torch.Tensor], logps_U: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is reported of each pair."""
        chosen_U, rejected_U = (self.settings.beta * each.detach() for each in ratios_U)
        return {
            "reward/chosen": chosen_U,
            "reward/rejected": rejected_U,
            "reward/margin": chosen_U - rejected_U,
            "reward/accuracy": (chosen_U > rejected_U).float(),
            "logps/chosen": logps_U[0].detach(),
            "logps/rejected": logps_U[1].detach(),
        }


@dataclass(frozen=True)
class _Partner:
    """What is known of the other sequence of pairs that are divided among micro-batches."""

    total_of: _Totals
    columns: Columns
    own_U: list[torch.Tensor]  # tokens of each side that are here: one of the two has none

    def joined(self, sides_U: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Both sides' values: those that are here, and the column `partner_NAME` for those that are not."""
        num_U = (self.own_U[0] + self.own_U[1]).clamp(min=1.0)
        other_U = self.total_of(self.columns[f"partner_{name}"] * self.columns["mask"]) / num_U
        return [
            torch.where(own_U > 0, here_U, other_U) for own_U, here_U in zip(self.own_U, sides_U, strict=True)
        ]


class _Totals:
    """Sums of a row of predictions over each unit; units that a micro-batch does not have sum to 0."""

    def __init__(self, unit: torch.Tensor, num: int):
        self._unit, self._num = (
            unit,
            num,
        )  # at least one prediction each: a bound that needs no wait for the device

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self._num, dtype=row.dtype, device=row.device).index_add(0, self._unit, row)


def preference(
    losses: Mapping[str, float] | str = "sigmoid",
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    divergence: str = "reverse_kl",
    divergence_alpha: float = 0.5,
    discopop_tau: float = 0.05,
    reference_free: bool = False,
    name: str = "dpo",
) -> Loss:
    """A weighted sum of losses of pairs, such as {"sigmoid": 1.0, "sft": 0.2}: DPO, and what followed it.

    The batch is one of `rl.pairs.pair_batch` with `ref_logps` and `weights` of which every pair has the same part.
    """
    chosen = {losses: 1.0} if isinstance(losses, str) else dict(losses)
    for each in chosen:
        choose("loss", "loss", each, (*PAIR_LOSSES, *COLUMNS_OF))
    require_number("loss", "beta", beta, above=0)
    require_number("loss", "label_smoothing", label_smoothing, at_least=0)
    if not label_smoothing < 0.5 or ("exo_pair" in chosen and not label_smoothing):
        message = f"label_smoothing={label_smoothing}; expected at least 0 and below 0.5, and above 0 for 'exo_pair'."
        raise fail("C001", "loss", message)
    choose("loss", "divergence", divergence, ("reverse_kl", "forward_kl", "js", "alpha"))
    settings = PairSettings(beta, label_smoothing, divergence, divergence_alpha, discopop_tau, reference_free)
    columns = ["side", *([] if reference_free else ["ref_logps"])]
    columns += [column for each in chosen for column in COLUMNS_OF.get(each, ())]
    return Loss(name, _PairLoss(chosen, settings), tuple(columns), PAIR_METRICS)


@dataclass(frozen=True)
class _LabelLoss:
    """The function of a loss of labelled completions: see `labelled`."""

    kind: str
    beta: float
    desirable: float
    undesirable: float
    reference_free: bool

    def __call__(self, scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        unit, side, counted = columns["conversation"], columns["side"], columns["mask"]
        total_of = _Totals(unit, len(side))
        logps = total_of(scored.logps * counted)[unit]
        ratios = logps
        if not self.reference_free:
            ratios = total_of((scored.logps - columns["ref_logps"]) * counted)[unit]
        kl = columns["kl"] if self.kind == "kto" else torch.zeros_like(ratios)
        weight = torch.where(side > 0, self.desirable, self.undesirable)
        loss = weight * (1.0 - torch.sigmoid(self.beta * side * (ratios - kl)))
        times = counted / total_of(counted)[unit].clamp(min=1.0)
        rewards = self.beta * ratios.detach()
        metrics = {"loss/policy": torch.stack([loss.detach(), times]), "kl/mean": torch.stack([kl, times])}
        for name, sign in (("chosen", 1), ("rejected", -1)):
            of_these = times * (side == sign)
            metrics[f"reward/{name}"] = torch.stack([rewards, of_these])
            metrics[f"logps/{name}"] = torch.stack([logps.detach(), of_these])
        return loss, {each: metrics[each] for each in LABEL_METRICS}


def labelled(
    kind: str = "kto",
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reference_free: bool = False,
    name: str = "kto",
) -> Loss:
    """KTO: completions that are desirable or not, by themselves, against the `kl` of the policy; or unpaired APO-zero.

    The batch has `side` (1 desirable, -1 not), `ref_logps`, for "kto" `kl` (the same for every token), and `weights` of
    which every sequence has the same part.
    """
    choose("loss", "kind", kind, ("kto", "apo_zero_unpaired"))
    require_number("loss", "beta", beta, above=0)
    require_number("loss", "desirable_weight", desirable_weight, at_least=0)
    require_number("loss", "undesirable_weight", undesirable_weight, at_least=0)
    columns = ["side", *([] if reference_free else ["ref_logps"]), *(["kl"] if kind == "kto" else [])]
    function = _LabelLoss(kind, beta, desirable_weight, undesirable_weight, reference_free)
    return Loss(name, function, tuple(columns), LABEL_METRICS)
