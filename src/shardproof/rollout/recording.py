"""Noting the experts that a model in this process chooses while an engine decodes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shardproof.model.routing import Routers
from shardproof.rollout.expert_records import new_record
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.trajectory import Trajectory
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.routing import routers_of


def expert_shape(policy: ShardedModel) -> ExpertShape:
    """What a policy routes; a family whose experts cannot be replayed raises C001 by name.

    Collective: every rank, the first time.
    """
    routers = routers_of(policy)
    return ExpertShape(routers.layers, routers.num_experts, routers.num_chosen)


class Recorder:
    """Notes what the routers of an engine's model choose in each forward that runs through `watch`."""

    def __init__(self, routers: Routers, shape: ExpertShape):
        self.shape = shape
        self._routers = routers
        self._noted: list[tuple[int, torch.Tensor]] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of what `last` returns. Kernels do without unsigned numbers of 16 bits."""
        return torch.uint8 if self.shape.num_experts <= 256 else torch.int16

    def watch(self, forward: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """What `forward` returns; its experts are those of `last` from now on."""
        with self._routers.noting() as self._noted:
            return forward(*args)

    def last(self) -> torch.Tensor:
        """The experts of the last forward's tokens, [tokens, layers, chosen], on the device."""
        found = dict(self._noted)
        return torch.stack([found[layer] for layer in self.shape.layers], 1).to(self.dtype)

    def last_rows(self, num_rows: int) -> np.ndarray:
        """The experts of the last forward's rows of tokens, [rows, tokens per row, layers, chosen]."""
        found = self.last()
        return self.on_host(found.view(num_rows, -1, *found.shape[1:]))

    def on_host(self, experts: torch.Tensor) -> np.ndarray:
        """As numbers that a record holds."""
        return experts.cpu().numpy().astype(self.shape.dtype, copy=False)

    def room(self, tokens: torch.Tensor) -> torch.Tensor:
        """Memory for the experts of tokens [steps, rows]: [steps, rows, layers, chosen]."""
        sizes = len(self.shape.layers), self.shape.num_chosen
        return torch.zeros(*tokens.shape, *sizes, dtype=self.dtype, device=tokens.device)

    def with_records(self, answered: Sequence[Trajectory], chosen: Sequence[np.ndarray]) -> list[Trajectory]:
        """Answers, each with the experts of its tokens; `chosen` has those of all its tokens but the last."""
        found = []
        for trajectory, experts in zip(answered, chosen, strict=True):
            *before, last = trajectory.segments
            asked = replace(trajectory, segments=tuple(before))
            last = replace(last, experts=new_record(asked, experts, self.shape.layers))
            found.append(replace(trajectory, segments=(*before, last)))
        return found


def joined(read: np.ndarray, drawn: Sequence[np.ndarray]) -> np.ndarray:
    """The experts of all tokens of a sequence: [tokens, layers, chosen] of a prompt, and then token by token."""
    return np.concatenate([read, np.stack(drawn)]) if drawn else read
