"""Optimizers by name, and the memory of an optimizer's first step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shardproof.bounds import require_number
from shardproof.errors import choose, did_you_mean, fail
from shardproof.model.families import num_experts
from shardproof.model.inventory import Inventory
from shardproof.model.roles import HEADS
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import clean_name
from shardproof.train.adamw_8bit import AdamW8bit, Whereabouts
from shardproof.train.muon import Muon, Sharded
from shardproof.train.rounded_adamw import Place, RoundedAdamW
from shardproof.user_code import describe_error, import_named, is_user_name

OPTIMIZERS = ("adamw", "adamw_8bit", "muon")
MOMENTS = ("float32", "bfloat16")
MUON_OPTIONS = ("momentum", "nesterov", "ns_steps", "adjust_lr")
_BETAS = (0.9, 0.95)  # unless they are given
LR_RULES = ("match_rms_adamw", "original")


@dataclass(frozen=True)
class Trainable:
    """A trainable parameter, as what makes an optimizer sees it."""

    param: nn.Parameter  # what this rank holds of it
    shape: tuple[int, ...]  # of the whole
    start: int  # the first element that this rank holds, in the whole's flat order
    is_hidden: bool  # a matrix, or a stack of experts' matrices, that is neither embedding nor head
    is_bias: bool = False  # of a layer, or of each expert of a stack

    @property
    def decays(self) -> bool:
        return len(self.shape) > 1 and not self.is_bias


def make_optimizer(
    policy: ShardedModel,
    lr: float = 1e-6,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    *,
    name: str = "adamw",
    moments: str = "float32",
    **options: Any,
) -> torch.optim.Optimizer:
    """An optimizer of the trainable parameters; norms, biases and other vectors have no weight decay.

    `name` is "adamw", "adamw_8bit", "muon", or your own class or function as `module:name`, which is called as
    `name(groups, lr=lr, **options)`, with betas if it has such a parameter; the groups carry their weight_decay. "muon"
    takes `momentum`, `nesterov`, `ns_steps` and `adjust_lr` as options. `moments="bfloat16"` halves the memory of "adamw":
    its running means are kept in 16 bits, rounded up or down at random. "adamw_8bit" keeps them in 8.

    FSDP1 turns every parameter into a vector, so the shape of the whole tensor decides whether it decays.
    """
    ranges = {shard.name: shard.flat_range for shard in policy.local_shards()}
    infos = {info.name: info for info in policy.inventory.parameters}
    hidden = hidden_matrices(policy.model, policy.inventory)
    trained = []
    for full, param in policy.named_parameters():
        if param.requires_grad:
            held = ranges[full]
            assert held is not None, "FSDP shards into ranges"
            info = infos[full]
            trained.append(Trainable(param, info.shape, held[0], full in hidden, info.is_bias))
    if not trained:
        raise fail("C001", "optimizer", f"the {policy.role} has no trainable parameter.")
    group = policy.mesh.get_group(policy.mesh.ndim - 1)
    return build_optimizer(
        name,
        trained,
        group,
        policy.device,
        lr=lr,
        weight_decay=weight_decay,
        betas=betas,
        eps=eps,
        moments=moments,
        **options,
    )


def build_optimizer(
    name: str,
    trained: Sequence[Trainable],
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    lr: float = 1e-6,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    moments: str = "float32",
    **options: Any,
) -> torch.optim.Optimizer:
    """The optimizer of that name. `group` are the ranks that share each parameter; without it, it cannot step."""
    for key, number in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        require_number("optimizer", key, number, at_least=0)
    for index, beta in enumerate(betas):
        require_number("optimizer", f"betas[{index}]", beta, at_least=0, below=1)
    choose("optimizer", "moments", moments, MOMENTS)
    if moments != "float32" and name != "adamw":
        message = f"moments={moments!r} is only for name='adamw', not for {name!r}."
        raise fail("C001", "optimizer", message, fix="use name='adamw', or moments='float32'")
    if is_user_name(name):
        return _make_user_optimizer(name, _groups(trained, weight_decay), lr, betas, options)
    choose("optimizer", "name", name, OPTIMIZERS)
    if name == "adamw":
        _check_options(name, options, ())
        if moments == "bfloat16":
            places: dict[torch.Tensor, Place] = {
                item.param: Place(number, item.start) for number, item in enumerate(trained)
            }
            return RoundedAdamW(_groups(trained, weight_decay), places, lr=lr, betas=betas, eps=eps)
        return torch.optim.AdamW(_groups(trained, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)
    if name == "adamw_8bit":
        _check_options(name, options, ())
        where: dict[torch.Tensor, Whereabouts] = {
            item.param: Whereabouts(item.shape, item.start) for item in trained
        }
        groups = _groups(trained, weight_decay)
        return AdamW8bit(groups, where, group, device, lr=lr, betas=betas, eps=eps)
    _check_options(name, options, MUON_OPTIONS)
    require_number("optimizer", "momentum", options.get("momentum", 0.95), at_least=0, below=1)
    require_number("optimizer", "ns_steps", options.get("ns_steps", 5), at_least=1, below=100)
    choose("optimizer", "adjust_lr", options.get("adjust_lr", LR_RULES[0]), LR_RULES)
    matrices = [Sharded(item.param, item.shape, item.start) for item in trained if item.is_hidden]
    if not matrices:
        message = "name='muon': no hidden matrix is trained."
        raise fail("C001", "optimizer", message, fix="use name='adamw'")
    rest = _groups([item for item in trained if not item.is_hidden], weight_decay)
    options |= {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
    return Muon(matrices, rest, group, device, **options)


def _groups(trained: Sequence[Trainable], weight_decay: float) -> list[dict[str, Any]]:
    """The parameters that decay, and those that do not."""
    decay = [item.param for item in trained if item.decays]
    rest = [item.param for item in trained if not item.decays]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _check_options(name: str, options: Iterable[str], known: Sequence[str]) -> None:
    for option in options:
        if option not in known:
            message = f"{name!r} has no option {option!r}.{did_you_mean(option, known)}"
            raise fail("C001", "optimizer", message)


def _make_user_optimizer(
    name: str,
    groups: list[dict[str, Any]],
    lr: float,
    betas: tuple[float, float],
    options: dict[str, Any],
) -> torch.optim.Optimizer:
    factory = import_named("optimizer", name)
    try:
        takes_betas = "betas" in inspect.signature(factory).parameters
        if takes_betas:
            options = {"betas": betas} | options
        made = factory(groups, lr=lr, **options)
    except Exception as error:
        message = f"optimizer {name!r} cannot be created: {describe_error(error)}"
        fix = "its constructor must accept (groups, lr=..., **options)"
        raise fail("C001", "optimizer", message, fix=fix) from error
    if not isinstance(made, torch.optim.Optimizer):
        message = f"optimizer {name!r} returned a {type(made).__name__}, not a torch.optim.Optimizer."
        raise fail("C001", "optimizer", message, fix="return a torch.optim.Optimizer")
    if not takes_betas and tuple(betas) != _BETAS:
        message = f"betas={list(betas)}: {name!r} has no parameter of that name, so they would not be used."
        raise fail("C001", "optimizer", message, fix="remove betas, or set in options what it takes")
    return made


def hidden_matrices(model: PreTrainedModel, inventory: Inventory) -> set[str]:
    """Names of the matrices between embeddings and heads, and of stacks of experts' matrices."""
    head = model.get_output_embeddings()
    apart = HEADS + tuple(
        clean_name(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or module is head
    )
    experts = num_experts(model.config)
    return {
        info.name
        for info in inventory.parameters
        if (len(info.shape) == 2 or (len(info.shape) == 3 and info.shape[0] == experts))
        and not info.is_bias
        and "lora_embedding" not in info.name
        and not any(name.startswith(f"{module}.") for name in info.names for module in apart)
    }


class FirstState:
    """State that an optimizer would allocate inside its first step, allocated before the ranks decide on that step.

    A rank on which it does not fit can then say so while nothing has changed anywhere. What was allocated is given back
    at the end of the block unless it is kept. An optimizer that cannot be asked for its state allocates it in its step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._held = {param for param, state in optimizer.state.items() if state}
        self._kept = False
        self.problem: str | None = None  # why it does not fit on this rank

    def __enter__(self) -> FirstState:
        try:
            with torch.no_grad():
                for group in self._optimizer.param_groups:
                    if any(param.grad is not None and param not in self._held for param in group["params"]):
                        _allocate(self._optimizer, group)
        except Exception as error:  # whatever an allocator raises, and whatever a step would have raised
            self.problem = f"{type(error).__name__}: {error}"
        return self

    def keep(self) -> None:
        """Leave the state with the optimizer, whose step comes next."""
        self._kept = True

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if not self._kept:
            for param in [param for param in self._optimizer.state if param not in self._held]:
                del self._optimizer.state[param]


def _allocate(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """What torch's optimizers do first in a step: make the missing state of a group, and sort it into lists.

    Of an optimizer from elsewhere it is not known whether a call beside its step changes anything.
    """
    init_group = getattr(type(optimizer), "_init_group", None)
    if init_group is not None and init_group.__module__.startswith(("torch.optim.", "shardproof.train.")):
        _, _, *lists = inspect.signature(init_group).parameters
        init_group(optimizer, group, *([] for _ in lists))
