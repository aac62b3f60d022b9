"""Mixture-of-experts routing: its balancing loss, and its replay when activations are recomputed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from shardproof.errors import fail
from shardproof.model.families import experts_per_token, num_experts


def check_balanced(config: PretrainedConfig, coef: float, stage: str) -> None:
    """Raise for a weight of the balancing loss where a model has no router, or one that is balanced without a loss."""
    if not coef or hasattr(config.get_text_config(), "router_aux_loss_coef"):
        return
    why = "has no router" if num_experts(config) is None else "balances its router without a loss"
    raise fail(
        "C001", stage, f"router_coef={coef}: {config.model_type!r} {why}.", fix="set it to 0, or remove it"
    )


def balancing_statistics(
    router_logits: Any, config: PretrainedConfig, num_tokens: int | None = None
) -> torch.Tensor:
    """[2, experts + 1]: over all layers and tokens, how often each expert was chosen and the sum of its probability.

    Only the first `num_tokens` of each layer are counted: what follows them is padding. The last column counts the
    rows, so that statistics of several ranks can be added up.
    """
    rows = torch.cat(
        [layer.reshape(-1, layer.shape[-1])[:num_tokens] for layer in router_logits if layer is not None]
    )
    probs = torch.softmax(rows.float(), dim=-1)
    chosen = torch.topk(probs, experts_per_token(config) or 1, dim=-1).indices
    counts = torch.zeros_like(probs).scatter_(1, chosen, 1.0).sum(0)
    length = rows.new_full((1,), rows.shape[0], dtype=torch.float32)
    return torch.stack([torch.cat([counts, length]), torch.cat([probs.sum(0), length])])


def balancing_loss(statistics: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """experts * sum(fraction of tokens sent to an expert * its mean probability), as in the Switch Transformer."""
    fractions = statistics[0, :-1] / statistics[0, -1]
    mean_probs = statistics[1, :-1] / statistics[1, -1]
    return (num_experts(config) or 1) * (fractions * mean_probs).sum()


def replay_routing() -> tuple[AbstractContextManager, AbstractContextManager]:
    """A `context_fn` for activation checkpointing: the recompute takes the forward's routing instead of its own.

    Both passes take the chosen values with the same gather, so that they save the same tensors.
    """
    chosen: list[torch.Tensor] = []
    return _Routing(chosen, replays=False), _Routing(chosen, replays=True)


class _Routing(TorchFunctionMode):
    """Notes what `topk` chooses, or repeats what was noted.

    One class for both passes: compiled code looks at the class of the mode it runs in, and a recompute in other
    compiled code than the forward's may save other tensors.
    """

    def __init__(self, chosen: list[torch.Tensor], replays: bool):
        super().__init__()
        self.chosen = chosen
        self.replays = replays
        self.position = 0

    def __enter__(self) -> Any:
        self.position = 0  # a block may be recomputed more than once
        return super().__enter__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        values = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        indices = self._indices(lambda: func(*args, **kwargs).indices)
        return torch.return_types.topk((values.gather(dim, indices), indices))

    def _indices(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.replays:
            self.position += 1
            return self.chosen[self.position - 1]
        with torch.no_grad():  # with gradients on, topk would save a tensor that the recompute does not
            self.chosen.append(compute())
        return self.chosen[-1]
