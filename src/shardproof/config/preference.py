"""The section about losses of preference data: pairs (`dpo`) and labelled completions (`kto`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardproof.config.numbers import Bound, Fraction, Limit
from shardproof.config.section import Section

PairLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
]
LabelLoss = Literal["kto", "apo_zero_unpaired"]
# Losses of the difference of two scores, which an f-divergence may make of log-ratios.
OF_SCORES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
Loss = Literal[PairLoss, LabelLoss]
Weight = Annotated[float, Bound(ge=0.0, le=1e6)]


class Preference(Section):
    """Losses of preference data. docs/preferences.md has the formulas."""

    loss: list[Loss] = Field(default_factory=list)
    """Losses whose weighted sum is minimised. For `dpo`: `sigmoid` (the default), `sigmoid_norm`, `hinge`, `ipo`,
    `robust`, `exo_pair`, `nca_pair`, `bco_pair`, `sppo_hard`, `aot`, `aot_unpaired`, `apo_zero`, `apo_down`,
    `discopop`, `sft`. For `kto`: one of `kto` (the default) and `apo_zero_unpaired`."""
    loss_weights: list[Weight] = Field(default_factory=list)
    """The weight of each loss. By default 1."""
    beta: Limit = 0.1
    """How strongly the policy is held to the reference: the factor of log-ratios, and tau of `ipo`."""
    label_smoothing: Annotated[float, Bound(ge=0.0, lt=0.5)] = 0.0
    """The probability that a label is wrong, for `sigmoid` (then cDPO), `robust`, `exo_pair` (which needs it), `aot` and
    `aot_unpaired`."""
    reference_free: bool = False
    """Take all log-probs of the reference as 0; no reference is loaded."""
    precompute: bool = False
    """Score all rows with the reference once, before the first step, and keep no reference in memory. For `dpo`."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """The f-divergence from the reference that regularises the policy."""
    divergence_alpha: Annotated[float, Bound(gt=0.0, le=1e3)] = 0.5
    """Order of `divergence = "alpha"`."""
    ld_alpha: Fraction | None = None
    """How much a token counts that lies beyond the length of the pair's shorter completion (LD-DPO). By default as much
    as any other."""
    discopop_tau: Limit = 0.05
    """Temperature of `discopop`: how sharply it blends its two losses."""
    desirable_weight: Weight = 1.0
    """Factor of the loss of desirable completions, for `kto`."""
    undesirable_weight: Weight = 1.0
    """Factor of the loss of undesirable completions, for `kto`."""

    @model_validator(mode="before")
    @classmethod
    def _one_or_several(cls, data: Any) -> Any:
        """One loss may be given as text, and one weight as a number."""
        if not isinstance(data, dict):
            return data
        one = {key: data[key] for key in ("loss", "loss_weights") if key in data}
        return {**data, **{key: value if isinstance(value, list) else [value] for key, value in one.items()}}

    @model_validator(mode="after")
    def _fits_together(self) -> Preference:
        problem = _problem_of(self)
        if problem is not None:
            raise ValueError(problem)
        return self

    def losses(self, default: str) -> dict[str, float]:
        """Each loss with its weight; `default` where none is named."""
        names = [str(name) for name in self.loss] or [default]
        return dict(zip(names, self.loss_weights or [1.0] * len(names), strict=True))


def _problem_of(preference: Preference) -> str | None:
    names = preference.loss or ["sigmoid"]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        return f"loss names {twice[0]!r} twice: give it one weight"
    if preference.loss_weights and len(preference.loss_weights) != len(names):
        return f"loss_weights has {len(preference.loss_weights)} numbers for {len(names)} losses"
    if preference.loss_weights and not any(preference.loss_weights):
        return "loss_weights are all 0: nothing would be learned"
    deaf = [name for name in names if name not in SMOOTHED]
    if preference.label_smoothing and len(deaf) == len(names):
        return f"label_smoothing is for {', '.join(SMOOTHED)}; {names[0]!r} does not know it"
    if "exo_pair" in names and not preference.label_smoothing:
        return "loss 'exo_pair' needs label_smoothing above 0, such as 1e-3: the logarithm of 0 is infinite"
    fields = Preference.model_fields
    for key, needed, is_read in (
        ("discopop_tau", "loss = 'discopop'", "discopop" in names),
        ("divergence_alpha", "divergence = 'alpha'", preference.divergence == "alpha"),
    ):
        if not is_read and getattr(preference, key) != fields[key].default:
            return f"{key} is for {needed}: set it, or remove the key"
    odd = [name for name in names if name not in OF_SCORES]
    if preference.divergence != "reverse_kl" and odd:
        return f"divergence={preference.divergence!r} has no meaning for loss {odd[0]!r}; use one of {', '.join(OF_SCORES)}"
    if preference.reference_free and preference.precompute:
        return "precompute scores the reference, and reference_free has none: remove one of them"
    return None
