"""The section about the algorithm and its coefficients."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shardproof.config.algorithm_dynamics import Dynamics
from shardproof.config.algorithms import SPECS, preset_values
from shardproof.config.numbers import Coefficient, Fraction, Limit
from shardproof.config.preference import Preference
from shardproof.config.switches import Switches
from shardproof.user_code import is_user_name

TIS_CAP = 2.0
_OF_CORRECTIONS = {"tis_cap": "tis", "mis_cap": "mis", "icepop_bounds": "icepop"}
_OF_THE_KL = ("kl_in", "kl_estimator", "kl_ratio_correction")


class Algorithm(Dynamics, Switches):
    """The training algorithm and its coefficients. docs/algorithms.md has the formulas."""

    kl_coef: Coefficient = 0.0
    """Weight of the KL divergence from the reference model. 0 disables it, and no reference is loaded."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes: added to the loss, or subtracted from the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL is estimated per token, with d the difference of the log-probs: k1 = d, k2 = d²/2, k3 =
    exp(-d) + d - 1. k1 works in the reward only."""
    kl_ratio_correction: bool = False
    """Multiply k3 in the loss by the probability ratio, so that its gradient is an unbiased estimate of the
    KL's gradient."""
    entropy_coef: Coefficient = 0.0
    """Weight of the entropy bonus. Raise it slightly if the policy's completions become all alike too early.
    """
    teacher_coef: Coefficient = 1.0
    """Weight of the teacher's part of the advantages beside that of the rewards, for `distillation`."""
    teacher_gamma: Fraction = 0.0
    """Discount per token of the teacher's opinion of later tokens, for `distillation`. 0: each token counts for itself;
    1: for all that follows it, too."""
    center_rewards_coef: Coefficient = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores around 0, for `reward_model` (TRL's
    `center_rewards_coefficient`)."""
    router_coef: Coefficient = 0.0
    """Weight of the load-balancing loss of a mixture of experts. Models without a router accept 0 only."""
    correction: Literal["auto", "tis", "mis", "icepop", "none"] = "auto"
    """How tokens count that the engine drew with another probability than the trainer's. `"tis"`: by their
    importance weight, at most `tis_cap`. `"mis"`: by that of the whole sequence, not at all above `mis_cap`.
    `"icepop"`: by their weight, not at all outside of `icepop_bounds`. `"none"`: all alike. `"auto"`: `"tis"`
    if `trust_region` is `"proximal"`."""
    tis_cap: Limit | None = TIS_CAP
    """Upper bound of a token's importance weight, for `correction = "tis"`. Set it to `none` to disable the
    correction."""
    mis_cap: Limit = 2.0
    """Largest importance weight of a sequence that is trained on, for `correction = "mis"`."""
    icepop_bounds: tuple[Limit, Limit] = (0.5, 5.0)
    """Smallest and largest importance weight of a token that is trained on, for `correction = "icepop"`."""
    trust_region: Literal["auto", "proximal", "behaviour"] = "auto"
    """The policy that the clipped ratio is measured from. `"proximal"`: the weights at the beginning of the
    step, with `correction` for what the engine drew. `"behaviour"`: the policy that drew the tokens, without a
    correction. `"auto"`: `"behaviour"` if `rollout.ahead` is above 0, without a nucleus, FP8 or a correction
    of yours, else `"proximal"`."""
    gamma: Fraction = 1.0
    """Discount per token of later rewards, for `ppo`, `reinforce_pp` and `remax`."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """What algorithms that compare a group compare in conversations of several turns: `"trajectory"` the
    whole conversations, so that all turns of one have the same advantage, `"turn"` the first turns with each
    other, the second turns, and so on, by the rewards from that turn on."""
    turn_gamma: Fraction = 1.0
    """Discount per turn of later rewards, in conversations of several turns."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation, for `ppo`. Lower values trust the critic more."""
    value_clip: Limit | None = 0.2
    """How far the critic's new value may move from the old one before its loss is clipped, for `ppo`. Set it
    to `none` to disable clipping."""
    dynamic_sampling: bool | None = None
    """Drop prompts whose completions all have the same reward and sample others instead, up to
    `dynamic_sampling_rounds` rounds per step. By default on for `dapo` only."""
    preference: Preference = Preference()
    """Losses of preference data, for `dpo` and `kto`."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further settings for your own algorithm (`module:name`)."""

    @model_validator(mode="after")
    def _has_options(self) -> Algorithm:
        if self.options and not is_user_name(self.name):
            raise ValueError(f"options are only for your own algorithm (module:name), not for {self.name!r}")
        return self

    @model_validator(mode="after")
    def _has_a_kl_where_it_says_how(self) -> Algorithm:
        """A coefficient of 0 that somebody wrote switches the KL off; one that nobody wrote was forgotten."""
        spec = SPECS.get(self.name)
        if spec is None or not spec.samples or "kl_coef" in self.model_fields_set:
            return self
        given = {key: value for key, value in self.model_dump().items() if value is not None}
        values = preset_values(spec, self.preset, given)
        for key in _OF_THE_KL:
            asked, default = getattr(self, key), type(self).model_fields[key].default
            if asked not in (default, values.get(key, default)):
                raise ValueError(
                    f"{key}={asked!r} needs the weight of the KL: set kl_coef, or remove the key"
                )
        return self

    @model_validator(mode="after")
    def _corrects_in_one_way(self) -> Algorithm:
        low, high = self.icepop_bounds
        if not low < high:
            raise ValueError(f"icepop_bounds: the first must be below the second, not ({low}, {high})")
        if self.trust_region == "behaviour" and self.correction not in ("auto", "none"):
            raise ValueError(
                f"trust_region='behaviour' measures the ratio from the engine's own log-probs, so correction="
                f"{self.correction!r} has nothing to correct: remove one of them"
            )
        kind = self.correction
        if kind == "auto":
            kind = "none" if self.trust_region == "behaviour" else "tis"
        for key, owner in _OF_CORRECTIONS.items():
            if kind != owner and getattr(self, key) not in (type(self).model_fields[key].default, None):
                why = f"not for {kind!r}"
                if self.trust_region == "behaviour":
                    why = "and trust_region='behaviour' corrects nothing: remove one of them"
                raise ValueError(f"{key} is for correction={owner!r}, {why}")
        return self
