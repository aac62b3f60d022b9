"""What this project needs of torch FSDP's private interface, in one place.

tests/test_private_interfaces.py fails when one of these moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1Module
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor, Shard

from shardproof.shard.arena import Arena

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """A tensor's name without the parts that wrappers put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def fsdp2_params(root: nn.Module) -> Iterator[Any]:
    """Every FSDPParam under `root`."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in _fsdp2_groups(module):
                yield from group.fsdp_params


def _fsdp2_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several from torch 2.12 on
    return list(groups) if groups is not None else [g for g in [state._fsdp_param_group] if g is not None]


def sum_gradients(root: nn.Module) -> None:
    """Make FSDP add gradients up over ranks instead of averaging them, whatever the backend.

    A parameter that a micro-batch does not use takes part with zeros, so that ranks never reduce different sets.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            if dist.get_world_size() > 1:  # on one rank, dividing by one would be a pass over every gradient
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True, recurse=False)
        elif isinstance(module, FSDP1Module):
            module._gradient_predivide_factor = 1
            module._gradient_postdivide_factor = 1


_adding: WeakSet[Any] = WeakSet()  # FSDPParams whose gradients are added up in place


def add_up_in_place(root: nn.Module) -> None:
    """On one rank: add every gradient to its parameter's the moment it is there, and leave FSDP2 nothing to reduce.

    With no other rank to reduce with, FSDP2 would still copy all gradients into one buffer and from it into another before
    it adds them. Call this between a forward and a backward pass: the first forward pass makes the gathered parameters
    that gradients belong to.
    """
    for fsdp_param in fsdp2_params(root):
        if fsdp_param not in _adding and hasattr(fsdp_param, "_unsharded_param"):
            _adding.add(fsdp_param)
            if fsdp_param.sharded_param.requires_grad:
                fsdp_param._unsharded_param.register_post_accumulate_grad_hook(_adder(fsdp_param))
    for module in root.modules():
        if isinstance(module, FSDPModule) and hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(False, recurse=False)


def _adder(fsdp_param: Any) -> Callable[[torch.Tensor], None]:
    @torch.no_grad()
    def add(gathered: torch.Tensor) -> None:
        grad, gathered.grad = gathered.grad, None
        assert grad is not None
        param, reduced = fsdp_param.sharded_param, fsdp_param.reduce_dtype
        if reduced is not None and reduced.itemsize < grad.dtype.itemsize:
            grad = grad.to(reduced)  # as it would have been rounded on its way to the other ranks
        if param.grad is None:
            param.grad = fsdp_param.to_sharded_dtensor(grad.to(param.dtype))
        else:
            param.grad._local_tensor.add_(grad)

    return add


def reshard(root: nn.Module) -> None:
    """Give up gathered parameters. After a forward without gradients the root's stay gathered.

    While they are, FSDP2's `named_parameters` gives whole tensors that no optimizer may hold and no export may read, and
    FSDP1's next forward reads them whatever its shards have become.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FSDP1Module):
            _reshard_fsdp1(module)


def _reshard_fsdp1(module: FSDP1Module) -> None:
    handle = module._handle
    if handle is None:
        return
    if not handle.uses_sharded_strategy:
        # Where FSDP1 does not shard, backward leaves a frozen unit's parameters registered as plain tensors.
        handle._use_unsharded_views(as_params=True)
        return
    # Before the first forward there is nothing to gather into; inside of `summon_full_params` they are to stay.
    is_idle = handle._training_state == HandleTrainingState.IDLE
    if is_idle and hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():
        _reshard(module, handle, free_unsharded_flat_param=True)


@contextmanager
def staying_gathered(root: nn.Module) -> Iterator[None]:
    """FSDP2's parameters, once gathered, stay so until the end; no shard may be written meanwhile.

    After an error nothing stays gathered either: the next forward would use it in place of the shards.
    """
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    try:
        _set_reshard(root, units, False)
        yield
    finally:
        _set_reshard(root, units, True)
        reshard(root)


def _set_reshard(root: nn.Module, units: Sequence[FSDPModule], after_use: bool) -> None:
    for unit in units:
        if unit is not root:  # FSDP2 keeps the root gathered from forward to backward in any case
            unit.set_reshard_after_forward(after_use, recurse=False)
        unit.set_reshard_after_backward(after_use, recurse=False)


def forget_partial_sums(root: nn.Module) -> None:
    """Drop gradients that FSDP2 holds back until the replicas' all-reduce; a step that ends early leaves them behind."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in _fsdp2_groups(module):
                group._partial_reduce_output = None


def set_last_micro_batch(root: nn.Module, is_last: bool) -> None:
    """Tell FSDP2 whether to reduce over replicas now; gradients are reduce-scattered in any case.

    FSDP1 with shards has no such switch and reduces over replicas every time, which gives the same sum. Without shards
    it would reduce the gradients of earlier micro-batches again, so it waits for the last one.
    """
    if isinstance(root, FSDPModule):
        root.set_requires_all_reduce(is_last)
        root.set_is_last_backward(is_last)
    for module in FSDP1Module.fsdp_modules(root):
        if module._handle is not None and not module._handle.uses_sharded_strategy:
            module._sync_gradients = is_last  # type: ignore[assignment]


def allocate_fsdp2(fsdp_params: Sequence[Any], device: torch.device, pin_memory: bool) -> None:
    """Give meta FSDPParams memory, padded as FSDP pads it, on every module that shares them.

    The padding is zeroed; the shards themselves are not written.
    """
    described = [(tuple(p.padded_sharded_param_size), p.sharded_param.dtype) for p in fsdp_params]
    arena = None
    if device.type == "cpu" and not pin_memory:
        arena = Arena(sum(Arena.room(size, dtype) for size, dtype in described))
    for fsdp_param, (size, dtype) in zip(fsdp_params, described, strict=True):
        if arena is not None:
            padded = arena.empty(size, dtype)
        else:
            padded = torch.empty(size, dtype=dtype, device=device, pin_memory=pin_memory)
        length = fsdp_param.sharded_size[0]
        padded[length:].zero_()
        param = nn.Parameter(
            fsdp_param.to_sharded_dtensor(padded[:length]),
            requires_grad=fsdp_param.sharded_param.requires_grad,
        )
        fsdp_param.sharded_param = param
        fsdp_param._sharded_param_data = padded.view(-1)
        fsdp_param._setattr_on_modules(param)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece, outside autograd. `DTensor.to_local` would build an autograd view each time."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, on a GPU with a few kernels for all of them; dtypes may differ."""
    torch._foreach_copy_(list(targets), list(sources))


def dtensor_range(param: DTensor) -> tuple[int, int]:
    """The flat range of the whole tensor that this rank's piece of a dim-0 sharded DTensor is."""
    rows, row = param.shape[0], param.shape[1:].numel()
    shards = [dim for dim, placement in enumerate(param.placements) if isinstance(placement, Shard)]
    if not shards:
        return 0, param.numel()
    (axis,) = shards
    chunk = -(-rows // param.device_mesh.size(axis))
    start = min(param.device_mesh.get_local_rank(axis) * chunk, rows)
    stop = start + local_tensor(param).shape[0]
    return start * row, stop * row


def fsdp1_shards(root: nn.Module) -> Iterator[tuple[str, torch.Size, int, int, torch.Tensor]]:
    """(clean name, shape, start, stop, flat memory) of each original parameter under FSDP1 that this rank holds.

    Parameters without an element on this rank come with an empty range.
    """
    prefixes = {module: name for name, module in root.named_modules()}
    for module in FSDP1Module.fsdp_modules(root):
        handle = module._handle
        if handle is None:
            continue
        flat = handle.flat_param
        sharded = handle.uses_sharded_strategy
        ends = accumulate(flat._numels_with_padding)  # between parameters FSDP1 pads to 16 bytes
        offsets = (
            end - n for end, n, pad in zip(ends, flat._numels_with_padding, flat._is_padding_mask) if not pad
        )
        infos: Any = flat._shard_param_infos if sharded else [None] * len(flat._param_infos)
        for info, shape, shard, offset in zip(flat._param_infos, flat._shapes, infos, offsets, strict=True):
            name = clean_name(f"{prefixes[info.module]}.{info.param_name}".lstrip("."))
            if not sharded:
                yield name, shape, 0, shape.numel(), flat.data[offset : offset + shape.numel()]
            elif shard.in_shard:
                at = shard.offset_in_shard
                start = shard.intra_param_start_idx
                local = flat.data[at : at + shard.numel_in_shard]
                yield name, shape, start, start + shard.numel_in_shard, local
            else:
                yield name, shape, 0, 0, flat.data[:0]


def fsdp1_replica_key(module: FSDP1Module) -> tuple[int, int]:
    """(index, size) of this rank among the ranks that share one copy of the module's parameters."""
    handle = module._handle
    if handle is None or not handle.uses_sharded_strategy:
        return 0, 1
    return handle.rank, handle.world_size


def fsdp1_parameters(unit: FSDP1Module) -> Iterator[tuple[nn.Parameter, tuple[int, ...]]]:
    """(parameter as FSDP1 registers it, shape of the whole) for what one unit itself manages."""
    handle = unit._handle
    if handle is None:
        return
    flat = handle.flat_param
    if flat._params is None:  # use_orig_params=False: the flat parameter is all there is
        yield flat, (handle.flat_param._unpadded_unsharded_size.numel(),)
        return
    for param, shape in zip(flat._params, flat._shapes, strict=True):
        yield param, tuple(shape)
