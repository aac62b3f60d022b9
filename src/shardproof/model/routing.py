"""Which experts a model's routers choose: noted while an engine reads tokens, and replayed in an update.

Families compute their routers' scores in many ways: softmax or sigmoid, with biases, in groups, scaled. But all of them
choose with one `topk` over the scores of each token, and take the weights of the chosen experts from what it returns. So
the experts are replaced there, and the family's own code makes weights of the current scores, through which gradients flow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from shardproof.errors import ShardproofError, fail
from shardproof.model import hf_private
from shardproof.model.compiling import routes
from shardproof.model.families import experts_per_token, num_experts

NO_RECORD = -1  # in the place of experts: the router chooses for this token


def check_replayable(config: PretrainedConfig) -> None:
    """Raise for a model without experts; whether those of a family can be replayed is found by running it."""
    if num_experts(config) is None or experts_per_token(config) is None:
        raise _refused(config, "it has no router that chooses among experts")


class Routers:
    """The routers of a model, each known by the number of its layer.

    Parts of a layer that route get another `forward`, which does what the part's own does unless choices are noted or
    replayed. Nothing else in the model changes, and nothing where no `Routers` was made.
    """

    def __init__(self, model: PreTrainedModel):
        check_replayable(model.config)
        self._config = model.config
        self.num_experts = num_experts(model.config) or 0
        self.num_chosen = experts_per_token(model.config) or 0
        self.layers: tuple[int, ...] = ()  # those with a router, once `settle` found them
        self._noted: list[tuple[int, torch.Tensor]] | None = None
        self._replayed: dict[int, torch.Tensor] | None = None
        for number, part in _routing_parts(model):
            part.forward = self._watched(part.forward, number)

    def settle(self, run: Callable[[], Any]) -> None:
        """Find the layers whose routers choose as expected while `run` runs the model; raises C001 by name if none does."""
        with torch.no_grad(), self.noting() as noted:
            run()
        layers = [number for number, _ in noted]
        if not layers:
            raise _refused(self._config, "its routers do not choose with one topk over all experts")
        if len(set(layers)) < len(layers):
            raise _refused(self._config, "a layer of it routes more than once")
        self.layers = tuple(layers)

    @contextmanager
    def noting(self) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """A list that gets (layer, experts [tokens, chosen]) of every router that runs inside, in the order they run."""
        before, self._noted = self._noted, []
        try:
            yield self._noted
        finally:
            self._noted = before

    def replay(self, experts: torch.Tensor | None) -> None:
        """From now on choose these experts, [tokens, layers, chosen], for the tokens of each forward; None: stop that.

        They must stay until the backward pass is over, which may recompute activations.
        """
        if experts is None:
            self._replayed = None
            return
        if experts.shape[1:] != (len(self.layers), self.num_chosen):
            expected = f"[tokens, {len(self.layers)}, {self.num_chosen}]"
            raise fail(
                "C004", "routing", f"experts have the shape {list(experts.shape)}, expected {expected}."
            )
        self._replayed = dict(zip(self.layers, experts.unbind(1), strict=True))

    def _watched(self, forward: Callable[..., Any], number: int) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._noted is None and self._replayed is None:
                return forward(*args, **kwargs)
            with _Choosing(self, number):
                return forward(*args, **kwargs)

        return watched

    def choose(self, number: int, own: torch.Tensor) -> torch.Tensor:
        """The experts [tokens, chosen] of a layer: its own choice, or what is replayed in its place."""
        if self._replayed is not None and number in self._replayed:
            given = self._replayed[number]
            if len(given) != len(own):
                message = (
                    f"layer {number} routes {len(own)} tokens, but experts of {len(given)} are replayed."
                )
                raise fail("R511", "routing", message)
            own = torch.where(given == NO_RECORD, own, given)
        if self._noted is not None:
            self._noted.append((number, own))
        return own

    def is_choice(self, values: torch.Tensor, k: int, dim: int) -> bool:
        """Whether a `topk` chooses experts: of groups of experts, or of keys, it has other sizes."""
        is_last = dim in (-1, values.ndim - 1)
        return is_last and values.ndim == 2 and values.shape[1] == self.num_experts and k == self.num_chosen


class _Choosing(TorchFunctionMode):
    """Inside, a `topk` over a layer's experts asks `Routers.choose` for the experts."""

    def __init__(self, routers: Routers, number: int):
        super().__init__()
        self._routers = routers
        self._number = number

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
        given = dict(zip(("input", "k", "dim"), args, strict=False)) | kwargs
        values, dim = given["input"], given.get("dim", -1)
        if not self._routers.is_choice(values, given["k"], dim):
            return func(*args, **kwargs)
        # Without gradients: a recompute must save the same tensors as the forward, whatever an outer mode does.
        with torch.no_grad():
            own = func(*args, **kwargs).indices
        indices = self._routers.choose(self._number, own)
        return torch.return_types.topk((values.gather(dim, indices), indices))


def _routing_parts(model: PreTrainedModel) -> Iterator[tuple[int, nn.Module]]:
    """(number of the layer, a part of it that routes). Parts, not layers: what is beside them may be compiled."""
    classes = hf_private.block_classes(model)
    for name, module in model.named_modules():
        # A sharded module's class is derived from its own.
        if not any(each.__name__ in classes for each in type(module).__mro__):
            continue
        numbers = re.findall(r"\.(\d+)(?=\.|$)", f".{name}")
        for part in module.children():
            if numbers and any(map(routes, part.modules())):
                yield int(numbers[-1]), part


def _refused(config: PretrainedConfig, why: str) -> ShardproofError:
    message = f"rollout.replay_experts: the experts of {config.model_type!r} cannot be replayed: {why}."
    return fail("C001", "routing", message, fix="set rollout.replay_experts to false")
