"""The section about the optimizer and its schedule."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from shardproof.config.numbers import (
    Coefficient,
    Decay,
    Epsilon,
    Fraction,
    LearningRate,
    Limit,
    Part,
    Steps,
    StepsOrNever,
)
from shardproof.config.section import Section, known_or_users
from shardproof.user_code import is_user_name

OPTIMIZERS = ("adamw", "adamw_8bit", "muon")
_OPTIMIZER_KEYS = ("name", "lr", "weight_decay", "betas")  # that every optimizer is given
_WSD_KEYS = ("decay_steps", "decay_ratio", "decay_shape")


def phases(
    total: int, warmup_steps: int, warmup_ratio: float, decay_steps: int | None, decay_ratio: float | None
) -> tuple[int, int]:
    """(updates in which the rate rises, updates at the end in which it falls) of so many; ratios are rounded up.

    Where two ratios make a whole, no update counts twice.
    """
    warmup = warmup_steps or math.ceil(total * warmup_ratio)
    if decay_steps is not None or decay_ratio is None:
        return warmup, decay_steps or 0
    decay = math.ceil(total * decay_ratio)
    whole = warmup_ratio > 0 and warmup_ratio + decay_ratio <= 1.0
    return warmup, min(decay, total - warmup) if whole else decay


class Optimizer(Section):
    """The optimizer and its learning-rate schedule."""

    name: str = "adamw"
    """`adamw`, `adamw_8bit` (AdamW with running means in 8 bits: a quarter of their memory), `muon`, or your own
    class as `module:name`, such as `torch.optim:SGD`."""
    lr: LearningRate = 1e-6
    """Learning rate after warm-up. With LoRA, 10 to 100 times the default is common."""
    weight_decay: Coefficient = 0.0
    """Weight decay of matrices. Norms and biases never decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's two running means. Muon uses AdamW, and these, for embeddings, heads and
    vectors."""
    eps: Epsilon = 1e-8
    """What AdamW adds to the root of the second running mean before it divides by it. transformers and TRL use
    1e-8 too. Your own optimizer takes it in `options`."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """In what AdamW keeps its two running means. `"bfloat16"` halves their memory; they are rounded up or down
    at random, so that small changes are not lost on average."""
    momentum: Decay | None = None
    """Momentum of Muon. By default 0.95."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further arguments for your own optimizer (`module:name`), such as `{ nesterov = true }`."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up: constant; a line or a cosine that falls to `final_ratio` of `lr` at the last
    step; or `"wsd"` (warm-up, stable, decay), which stays constant and falls in the last steps."""
    warmup_steps: StepsOrNever = 0
    """Number of updates during which the learning rate rises linearly to `lr`."""
    warmup_ratio: Fraction = 0.0
    """The same as a fraction of the run's updates, rounded up. Give one of the two."""
    warmup_from_zero: bool = False
    """Begin the warm-up at 0, as transformers does: the first update changes nothing. With `"wsd"` it begins at
    `final_ratio` of `lr`, also as there. By default the first of n warm-up updates has 1 / (n + 1) of `lr`."""
    final_ratio: Fraction = 0.0
    """Fraction of `lr` at which a schedule that falls ends. `schedule = "constant"` does not read it."""
    decay_steps: Steps | None = None
    """With `schedule = "wsd"`: number of updates at the end during which the learning rate falls."""
    decay_ratio: Part | None = None
    """The same as a fraction of the run's updates, rounded up. Give one of the two."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "cosine"
    """With `schedule = "wsd"`: how it falls. `"sqrt"` falls fast at first: 1 - sqrt(share of the decay)."""
    max_grad_norm: Limit | None = 1.0
    """Clip the norm of the whole gradient to this. Set it to `none` to disable clipping."""

    @model_validator(mode="after")
    def _fits_its_name(self) -> Optimizer:
        is_ours = not is_user_name(known_or_users(self.name, OPTIMIZERS))
        if self.momentum is not None and self.name != "muon":
            raise ValueError(f"momentum is only for name='muon', not for {self.name!r}")
        if self.moments != "float32" and self.name != "adamw":
            raise ValueError(f"moments={self.moments!r} is only for name='adamw', not for {self.name!r}")
        if self.eps != type(self).model_fields["eps"].default and not is_ours:
            raise ValueError(f"eps is not passed to {self.name!r}: set it in options")
        if self.options and is_ours:
            raise ValueError(f"options are only for your own optimizer (module:name), not for {self.name!r}")
        taken = sorted(self.options.keys() & set(_OPTIMIZER_KEYS))
        if taken:
            raise ValueError(f"options.{taken[0]}: set optimizer.{taken[0]} instead")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Optimizer:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio exclude each other: give one of the two")
        if self.warmup_from_zero and not self.model_fields_set & {"warmup_steps", "warmup_ratio"}:
            raise ValueError("warmup_from_zero is for a warm-up: set warmup_steps or warmup_ratio")
        if self.final_ratio and "schedule" not in self.model_fields_set:
            raise ValueError("final_ratio is for a schedule that falls: set schedule, such as to 'cosine'")
        if self.schedule == "wsd":
            if (self.decay_steps is None) == (self.decay_ratio is None):
                raise ValueError("schedule='wsd' needs one of decay_steps and decay_ratio")
            return self
        for key in _WSD_KEYS:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is only for schedule='wsd', not for {self.schedule!r}")
        return self

    @property
    def schedule_arguments(self) -> dict[str, Any]:
        """What `make_schedule` takes by keyword, but for the number of updates."""
        keys = ("warmup_steps", "warmup_ratio", "warmup_from_zero", "final_ratio", *_WSD_KEYS)
        return {"kind": self.schedule} | {key: getattr(self, key) for key in keys}

    @property
    def arguments(self) -> dict[str, Any]:
        """What `make_optimizer` takes by keyword."""
        given: dict[str, Any] = {} if self.momentum is None else {"momentum": self.momentum}
        if self.moments != "float32":
            given["moments"] = self.moments
        if not is_user_name(self.name):
            given["eps"] = self.eps
        return self.options | given | {key: getattr(self, key) for key in _OPTIMIZER_KEYS}
