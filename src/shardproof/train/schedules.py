"""Learning-rate schedules: what share of the learning rate each update has."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from shardproof.bounds import require_number
from shardproof.config.optimizer import phases
from shardproof.errors import choose, fail

SCHEDULES = ("constant", "linear", "cosine", "wsd")
# What is left of the rate, by the share of the decay's steps that are over.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def make_schedule(
    optimizer: torch.optim.Optimizer,
    kind: str = "constant",
    warmup_steps: int = 0,
    total_steps: int | None = None,
    final_ratio: float = 0.0,
    *,
    warmup_ratio: float = 0.0,
    warmup_from_zero: bool = False,
    decay_steps: int | None = None,
    decay_ratio: float | None = None,
    decay_shape: str = "cosine",
) -> LambdaLR:
    """A schedule: linear warm-up, then a constant rate, or one that ends at `final_ratio` of it at `total_steps`.

    "linear" and "cosine" decay from the end of the warm-up on. "wsd" stays until `decay_steps`, or `decay_ratio` of all
    steps, are left, and then decays as `decay_shape` says: "linear", "cosine" or "sqrt". `warmup_ratio` gives the warm-up
    as a share of all steps, rounded up. With `warmup_from_zero` the rates are those of transformers' schedulers.
    """
    choose("schedule", "kind", kind, SCHEDULES)
    choose("schedule", "decay_shape", decay_shape, tuple(_SHAPES))
    require_number("schedule", "warmup_steps", warmup_steps, at_least=0)
    for key, value in (("final_ratio", final_ratio), ("warmup_ratio", warmup_ratio)):
        require_number("schedule", key, value, at_least=0, at_most=1)
    if total_steps is not None:
        require_number("schedule", "total_steps", total_steps, at_least=0)
    if (kind != "constant" or warmup_ratio) and not total_steps:
        what = f"kind={kind!r}" if kind != "constant" else f"warmup_ratio={warmup_ratio}"
        raise fail("C001", "schedule", f"{what} needs total_steps.")
    if warmup_ratio and warmup_steps:
        message = f"warmup_steps={warmup_steps} and warmup_ratio={warmup_ratio} exclude each other."
        raise fail("C001", "schedule", message, fix="give one of the two")
    _check_decay(kind, decay_steps, decay_ratio)
    total = total_steps or 0
    warmup_steps, decay = phases(total, warmup_steps, warmup_ratio, decay_steps, decay_ratio)
    if kind != "wsd":
        decay = total - warmup_steps
    elif warmup_steps + decay > total:
        message = (
            f"kind='wsd': a warm-up of {warmup_steps} and a decay of {decay} updates do not fit into {total}."
        )
        raise fail("C001", "schedule", message, fix="shorten one of them, or train for more steps")
    shape = _SHAPES[decay_shape if kind == "wsd" else "linear" if kind == "constant" else kind]
    begin = 0 if kind == "constant" else max(warmup_steps, total - decay)
    lowest = final_ratio if kind == "wsd" and warmup_from_zero else 0.0  # where a warm-up from zero begins

    def ratio(step: int) -> float:
        if step < warmup_steps:
            done = step / warmup_steps if warmup_from_zero else (step + 1) / (warmup_steps + 1)
            return lowest + (1.0 - lowest) * done
        if kind == "constant" or step < begin:
            return 1.0
        progress = min(1.0, (step - begin) / max(1, decay))
        return final_ratio + (1.0 - final_ratio) * shape(progress)

    return LambdaLR(optimizer, ratio)


def _check_decay(kind: str, steps: int | None, ratio: float | None) -> None:
    """Raise unless the decay is given once where it is to be, and nowhere else."""
    if kind != "wsd":
        for key, value in (("decay_steps", steps), ("decay_ratio", ratio)):
            if value is not None:
                raise fail("C001", "schedule", f"{key}={value} is only for kind='wsd', not for {kind!r}.")
        return
    if (steps is None) == (ratio is None):
        raise fail("C001", "schedule", "kind='wsd' needs one of decay_steps and decay_ratio.")
    if steps is not None:
        require_number("schedule", "decay_steps", steps, at_least=0)
    if ratio is not None:
        require_number("schedule", "decay_ratio", ratio, at_least=0, at_most=1)
