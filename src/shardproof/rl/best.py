"""The best model of a run so far, by one metric of its evaluations."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from shardproof.config.evaluation_sets import HeldOut, draws_of, owner_of
from shardproof.dist.collectives import broadcast, together
from shardproof.errors import did_you_mean, fail
from shardproof.files import write_atomic
from shardproof.rl.folder import RunFolder
from shardproof.rl.place import BEST, BEST_NAME, read_best
from shardproof.rl.saves import write_model
from shardproof.shard.sharded_model import ShardedModel

logger = logging.getLogger(__name__)


class Best:
    """Keeps the model of the best evaluation in `best/`; `best.json` says which one it is.

    Collective: every rank makes it.
    """

    def __init__(self, folder: RunFolder, metric: str, sets: Sequence[HeldOut]):
        self._folder, self._metric, self._sets = folder, metric, sets
        self._sign = -1.0 if metric.endswith("loss") else 1.0
        # Rank 0 alone knows the step that the run goes on from.
        self._value: float | None = broadcast(_known(folder, metric) if dist.get_rank() == 0 else None)

    def see(self, step: int, metrics: Mapping[str, float], policy: ShardedModel) -> None:
        """Keep the policy if this evaluation is better than all before. Collective: every rank."""
        value = metrics.get(self._metric)
        if value is None:
            self._require_known(metrics)
            return
        if self._value is not None and not self._sign * value > self._sign * self._value:
            return
        if not math.isfinite(value):
            return
        logger.info("best %s so far: %.4f; keeping the model in %s/ ...", self._metric, value, BEST)
        path = self._folder.path / BEST / BEST_NAME
        with together("output"):  # what is replaced only in part is no evaluation's model
            if dist.get_rank() == 0:
                path.unlink(missing_ok=True)
        write_model(self._folder, policy, step, BEST)
        with together("output"):
            if dist.get_rank() == 0:
                drawn = draws_of(self._metric, self._sets)
                note = {"step": step, "metric": self._metric, "value": value, "drawn": drawn}
                write_atomic(path, json.dumps(note) + "\n")
        self._value = value
        self._folder.note(step, "best", f"{self._metric} {value:.4f} is the best so far")

    def _require_known(self, metrics: Mapping[str, float]) -> None:
        """Raise if no evaluation can have the metric: all of its set's names are there, and this one is not."""
        of = owner_of(self._metric, self._sets)
        owners = {name: owner_of(name, self._sets) for name in metrics}
        if of in owners.values():
            names = [name for name, owner in owners.items() if owner is not None]
            message = f"evaluation.best={self._metric!r} is not measured.{did_you_mean(self._metric, names)}"
            raise fail("C001", "evaluation", message, fix=f"use one of {', '.join(sorted(names))}")


def _known(folder: RunFolder, metric: str) -> float | None:
    """The best value of the metric up to the step that the run goes on from; None if there is none.

    A run that begins has none: it evaluates before its first step, and what it finds in its folder is another run's.
    """
    told = read_best(folder.path)
    if told is None or told["metric"] != metric or not folder.step or told["step"] > folder.step:
        return None
    return float(told["value"])
