"""Coefficients that follow what is measured: the KL's towards a target KL, the entropy bonus's towards a target entropy.

Both read a step's metrics, which are the same on every rank, so all ranks move alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardproof.errors import fail
from shardproof.rl.algorithms.base import Algorithm

_MAX_COEFFICIENT = 1e3  # as in a recipe
_MAX_ERROR = 0.2  # of a KL from its target, relative to the target


def next_kl_coef(coef: float, kl: float, target: float, horizon: int, num: int) -> float:
    """The KL coefficient after a step of `num` completions: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num / horizon).

    As in "Fine-Tuning Language Models from Human Preferences". A step that is longer than the horizon counts as the
    horizon: the coefficient would change its sign otherwise.
    """
    error = min(max(kl / target - 1.0, -_MAX_ERROR), _MAX_ERROR)
    return min(coef * (1.0 + error * min(num / horizon, 1.0)), _MAX_COEFFICIENT)


def next_entropy_weight(weight: float, entropy: float, target: float, size: float) -> float:
    """The weight of the entropy bonus after a step: `size` more if the entropy is below the target, else less, at least 0."""
    moved = weight + size if entropy < target else weight - size
    return min(max(moved, 0.0), _MAX_COEFFICIENT)


class Controllers:
    """Moves an algorithm's coefficients between steps, where its settings have targets.

    The entropy bonus is as in Skywork-OR1: its weight moves after every step, and the bonus is added in a step only if
    the entropy that was measured before is not above the target.
    """

    def __init__(self, algorithm: Algorithm):
        self._algorithm = algorithm
        self._weight = algorithm.settings.entropy_coef
        _require_followed(algorithm)

    @property
    def metrics(self) -> dict[str, float]:
        """The coefficients of now, of those that move."""
        settings, found = self._algorithm.settings, {}
        if settings.kl_target is not None:
            found["kl/coef"] = self._algorithm.kl_coef
        if settings.entropy_target is not None:
            found["entropy/coef"] = self._algorithm.entropy_coef
        return found

    def see(self, metrics: Mapping[str, float], num_completions: int) -> None:
        """Take over what a step measured. What it did not measure, or what is no number, moves nothing."""
        algorithm, settings = self._algorithm, self._algorithm.settings
        kl, entropy = metrics.get("kl/mean", math.nan), metrics.get("entropy/mean", math.nan)
        if settings.kl_target is not None and math.isfinite(kl):
            algorithm.kl_coef = next_kl_coef(
                algorithm.kl_coef, kl, settings.kl_target, settings.kl_horizon, num_completions
            )
        if settings.entropy_target is not None and math.isfinite(entropy):
            target = settings.entropy_target
            self._weight = next_entropy_weight(self._weight, entropy, target, settings.entropy_step)
            algorithm.entropy_coef = self._weight if entropy <= target else 0.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to keep; JSON-able, and exact: JSON writes a float so that it reads the same back."""
        algorithm, settings = self._algorithm, self._algorithm.settings
        return {
            "kl_coef": algorithm.kl_coef,
            "entropy_weight": self._weight,
            "entropy_coef": algorithm.entropy_coef,
            "begun": {"kl_coef": settings.kl_coef, "entropy_coef": settings.entropy_coef},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the coefficients of a checkpoint; those that do not move stay the recipe's.

        So do those that the recipe lets begin at another number than before: what a user changes takes effect at once.
        """
        algorithm, settings = self._algorithm, self._algorithm.settings
        begun = state.get("begun", {})  # not in checkpoints of earlier versions
        if settings.kl_target is not None and begun.get("kl_coef", settings.kl_coef) == settings.kl_coef:
            algorithm.kl_coef = float(state["kl_coef"])
        is_same = begun.get("entropy_coef", settings.entropy_coef) == settings.entropy_coef
        if settings.entropy_target is not None and is_same:
            self._weight = float(state["entropy_weight"])
            algorithm.entropy_coef = float(state["entropy_coef"])


def _require_followed(algorithm: Algorithm) -> None:
    """Raise if the algorithm's loss is a user's own that would not see a coefficient move."""
    settings = algorithm.settings
    moving = {
        "kl_target": settings.kl_target is not None and settings.kl_in == "loss",
        "entropy_target": settings.entropy_target is not None,
    }
    for key, is_set in moving.items():
        name, before = key.replace("target", "coef"), algorithm.loss
        coef = getattr(algorithm, name)
        setattr(algorithm, name, coef + 1.0)
        follows = algorithm.loss is not before
        setattr(algorithm, name, coef)
        if is_set and not follows:
            message = f"algorithm.{key}: the loss of {settings.name!r} does not read self.{name}, which moves from step to step."
            raise fail("C001", "algorithm", message, fix=f"make the loss from self.{name}, or remove the key")
