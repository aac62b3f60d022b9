"""The sections about the update: algorithm, optimizer, and how much is trained on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from shardproof.config.algorithms import SPECS
from shardproof.config.numbers import (
    MAX_TOKENS,
    Bound,
    Coefficient,
    Count,
    Decay,
    Fraction,
    LearningRate,
    Limit,
    Processes,
    Seconds,
    Steps,
    StepsOrNever,
    Tokens,
)
from shardproof.config.section import Section, known_or_users
from shardproof.user_code import is_user_name

OPTIMIZERS = ("adamw", "muon")
_OPTIMIZER_KEYS = ("name", "lr", "weight_decay", "betas")  # that every optimizer is given
TIS_CAP = 2.0
_OF_CORRECTIONS = {"tis_cap": "tis", "mis_cap": "mis", "icepop_bounds": "icepop"}


class Algorithm(Section):
    """The training algorithm and its coefficients. docs/algorithms.md has the formulas."""

    name: str = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `ppo`, `gspo`, `cispo`, `sft`, or your own class as
    `module:name`."""
    clip_low: Annotated[float, Bound(gt=0.0, le=1.0)] = 0.2
    """How far the ratio of new to old probability may fall below 1 before it is clipped."""
    clip_high: Limit | None = None
    """How far the ratio may rise above 1 before it is clipped. By default the algorithm's own: 0.28 for
    `dapo` and `cispo`, `clip_low` for the others."""
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
    updates_per_batch: Count = 1
    """Optimizer updates per step: the step's prompts are split into this many equal parts.
    `train.prompts_per_step` must be divisible by it."""
    gamma: Fraction = 1.0
    """Discount per token of later rewards, for `ppo` and `reinforce_pp`."""
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
    """Drop prompts whose completions all have the same reward and sample others instead, up to four rounds
    per step. By default on for `dapo` only."""
    overlong_from: Annotated[int, Bound(ge=0, le=MAX_TOKENS)] | None = None
    """Completion length in tokens from which reward is subtracted, growing to 1 at `rollout.max_new_tokens`.
    By default nothing is subtracted."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further settings for your own algorithm (`module:name`)."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return known_or_users(name, SPECS)

    @model_validator(mode="after")
    def _has_options(self) -> Algorithm:
        if self.options and not is_user_name(self.name):
            raise ValueError(f"options are only for your own algorithm (module:name), not for {self.name!r}")
        return self

    @model_validator(mode="after")
    def _corrects_in_one_way(self) -> Algorithm:
        low, high = self.icepop_bounds
        if not low < high:
            raise ValueError(f"icepop_bounds: the first must be below the second, not ({low}, {high})")
        if self.trust_region == "behaviour" and self.correction in ("mis", "icepop"):
            raise ValueError(
                f"trust_region='behaviour' measures the ratio from the engine's own log-probs, so correction="
                f"{self.correction!r} has nothing to correct: remove one of them"
            )
        for key, owner in _OF_CORRECTIONS.items():
            correction = "tis" if self.correction == "auto" else self.correction
            if correction != owner and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for correction={owner!r}, not for {correction!r}")
        return self


class Optimizer(Section):
    """The optimizer and its learning-rate schedule."""

    name: str = "adamw"
    """`adamw`, `muon`, or your own class as `module:name`, such as `torch.optim:SGD`."""
    lr: LearningRate = 1e-6
    """Learning rate after warm-up. With LoRA, 10 to 100 times the default is common."""
    weight_decay: Coefficient = 0.0
    """Weight decay of matrices. Norms and biases never decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's two running means. Muon uses AdamW, and these, for embeddings, heads and
    vectors."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """In what AdamW keeps its two running means. `"bfloat16"` halves their memory; they are rounded up or down
    at random, so that small changes are not lost on average."""
    momentum: Decay | None = None
    """Momentum of Muon. By default 0.95."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further arguments for your own optimizer (`module:name`), such as `{ nesterov = true }`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or a cosine that falls to `final_ratio` of `lr` at the last
    step."""
    warmup_steps: StepsOrNever = 0
    """Number of updates during which the learning rate rises linearly to `lr`."""
    final_ratio: Fraction = 0.0
    """Fraction of `lr` at which the cosine schedule ends."""
    max_grad_norm: Limit | None = 1.0
    """Clip the norm of the whole gradient to this. Set it to `none` to disable clipping."""

    @model_validator(mode="after")
    def _fits_its_name(self) -> Optimizer:
        is_ours = not is_user_name(known_or_users(self.name, OPTIMIZERS))
        if self.momentum is not None and self.name != "muon":
            raise ValueError(f"momentum is only for name='muon', not for {self.name!r}")
        if self.moments != "float32" and self.name != "adamw":
            raise ValueError(f"moments={self.moments!r} is only for name='adamw', not for {self.name!r}")
        if self.options and is_ours:
            raise ValueError(f"options are only for your own optimizer (module:name), not for {self.name!r}")
        taken = sorted(self.options.keys() & set(_OPTIMIZER_KEYS))
        if taken:
            raise ValueError(f"options.{taken[0]}: set optimizer.{taken[0]} instead")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """What `make_optimizer` takes by keyword."""
        given: dict[str, Any] = {} if self.momentum is None else {"momentum": self.momentum}
        if self.moments != "float32":
            given["moments"] = self.moments
        return self.options | given | {key: getattr(self, key) for key in _OPTIMIZER_KEYS}


class Train(Section):
    """How long to train, and on how much at a time."""

    steps: Steps
    """Number of steps. Each step samples completions, scores them, updates the policy and syncs the engine.
    """
    prompts_per_step: Count = 32
    """Prompts per step over all ranks. A step trains on this many times `rollout.group_size` completions."""
    micro_batch_tokens: Tokens = 8192
    """Tokens that each rank runs through the model at a time. Lower it if an update runs out of memory; the
    result is the same, unless `algorithm.router_coef` is above 0."""
    seed: Annotated[int, Bound(ge=0, lt=2**63)] = 0
    """Seed of the order of prompts and of sampling. The same seed gives the same run."""
    ranks: Processes | None = None
    """Processes on this machine. By default one per GPU, or 1 without GPUs."""
    max_consecutive_skips: Count = 3
    """Stop the run after this many updates in a row that were skipped because a loss or gradient was not
    finite."""
    deadline_s: Seconds = 600.0
    """Seconds that a rank waits for the others in one stage (loading, a step, a sync, a checkpoint) before the run ends
    with an error that names the ranks and hosts that did not answer."""
