"""The plan: which modules are sharded as one unit, and where each tensor's bytes will come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from shardproof.errors import fail
from shardproof.model import hf_private
from shardproof.model.hf_private import WeightTransform
from shardproof.model.initial import InitSpec, record_initialisation
from shardproof.model.inventory import Inventory, TensorInfo
from shardproof.model.lora import base_name, is_adapter
from shardproof.model.roles import REWARD, VALUED, value_head
from shardproof.model.skeleton import Skeleton
from shardproof.shard.ledger import Writer
from shardproof.weights.box_tensor import BoxTensor
from shardproof.weights.mapping import CheckpointMap, WholeConversion, check_coverage, map_checkpoint
from shardproof.weights.reader import Checkpoint

Origin = BoxTensor | WholeConversion | InitSpec


@dataclass(frozen=True)
class ShardPlan:
    """What will be written where, before anything is allocated."""

    units: tuple[str, ...]  # module names, each one FSDP unit; the rest belongs to the root
    origins: Mapping[str, Origin]  # canonical tensor name -> where its elements come from
    writers: Mapping[str, Writer]  # the same, in words
    tie_checks: Mapping[str, BoxTensor]  # canonical name -> the checkpoint's other copy of a tied tensor
    seed: int
    used_rules: list[WeightTransform] | None  # conversion rules that the checkpoint needed; None without one
    # Weights that are held in 4 bits, with the shapes that they have for the model.
    packed: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def is_whole(origin: Origin) -> bool:
    """Whether a tensor's values are made all at once, however few of them are wanted."""
    return isinstance(origin, WholeConversion) or (isinstance(origin, InitSpec) and origin.kind == "module")


def plan_shards(
    skeleton: Skeleton,
    inventory: Inventory,
    checkpoint: Checkpoint | None,
    seed: int,
    new_head: bool = False,
) -> ShardPlan:
    """The plan for a skeleton, from a checkpoint or, without one, from the model's own initialisation.

    A critic's head is drawn if the checkpoint has none, a reward model's only with `new_head`.
    """
    origins: dict[str, Origin] = {}
    writers: dict[str, Writer] = {}
    tie_checks: dict[str, BoxTensor] = {}
    found = CheckpointMap()
    if checkpoint is not None:
        found = _map_without_adapters(skeleton, inventory, checkpoint, new_head)
    to_initialise = []
    for info in inventory.stored:
        adapted = next((name for name in info.names if ".base_layer." in name), None)
        if len(info.names) > 1 and adapted is not None:
            message = f"an adapter on {adapted!r} would leave {info.names} tied in the base weights and untied in the adapted model."
            raise fail("L113", "plan", message, tensor=adapted, fix="do not put adapters on tied weights")
        sources = [name for name in info.base_names if name in found] if not info.is_adapter else []
        if not sources:
            to_initialise.append(info)
            continue
        name = sources[0]
        origins[info.name] = found.boxes[name] if name in found.boxes else found.whole[name]
        writers[info.name] = _checkpoint_writer(found, name, checkpoint)
        for other in sources[1:]:
            if other in found.boxes:
                tie_checks[info.name] = found.boxes[other]
    if to_initialise:
        specs = record_initialisation(skeleton.model)
        for info in to_initialise:
            if info.name not in specs:
                raise fail(
                    "L115",
                    "plan",
                    f"{info.name!r} has neither a value in a checkpoint nor an initialisation in the model.",
                    tensor=info.name,
                )
            origins[info.name] = specs[info.name]
            writers[info.name] = Writer("init", f"{specs[info.name]}, seed {seed}")
    used_rules = found.used_rules if checkpoint is not None else None
    return ShardPlan(find_units(skeleton.model, inventory), origins, writers, tie_checks, seed, used_rules)


def _map_without_adapters(
    skeleton: Skeleton, inventory: Inventory, checkpoint: Checkpoint, new_head: bool
) -> CheckpointMap:
    """The checkpoint's map in base names, checked for names and shapes."""
    state = {
        base_name(name): tensor
        for name, tensor in skeleton.model.state_dict().items()
        if not is_adapter(name)
    }
    found = map_checkpoint(skeleton.model, state, checkpoint.tensors)
    needed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    optional: set[str] = set()
    for info in inventory.stored:
        if info.is_adapter:
            continue
        present = [name for name in info.base_names if name in found]
        needed[present[0] if present else info.base_names[0]] = (info.shape, info.dtype)
        if skeleton.role in VALUED:
            head = value_head(skeleton.model)
            optional.update(name for name in info.base_names if name.startswith(f"{head}."))
    if skeleton.role == REWARD and not new_head:
        _require_head([name for name in needed if name in optional and name not in found])
    dropped = _dropped_head(found) if skeleton.role in VALUED else set()
    check_coverage(
        found, skeleton.model, needed, checkpoint.tensors, may_initialise=optional, may_ignore=dropped
    )
    return found


def _require_head(missing: list[str]) -> None:
    """Raise for a reward model without its head: scores of a drawn one would mean nothing."""
    if missing:
        message = f"the checkpoint has no {missing[0]!r}: it is no sequence classifier, so it has no scores."
        fix = (
            "load a reward model; to train one from this checkpoint, use algorithm.name='reward_model', or pass "
            "new_head=True"
        )
        raise fail("L104", "plan", message, tensor=missing[0], fix=fix)


def _dropped_head(found: CheckpointMap) -> set[str]:
    """The language-model head's names in the checkpoint: a critic and a reward model have another in its place."""
    return {
        name
        for name in found.unexpected
        if name.split(".")[-2:-1] in (["lm_head"], ["embed_out"], ["output"])
    }


def _checkpoint_writer(found: CheckpointMap, name: str, checkpoint: Checkpoint | None) -> Writer:
    assert checkpoint is not None
    if name in found.whole:
        sources = [source for names in found.whole[name].sources.values() for source in names]
        return Writer("converted whole", f"{_listed(sources, checkpoint)} through {found.operations[name]}")
    sources = found.boxes[name].sources
    through = f" through {found.operations[name]}" if name in found.operations else ""
    return Writer("checkpoint", f"{_listed(sources, checkpoint)}{through}")


def _listed(sources: list[str], checkpoint: Checkpoint) -> str:
    first = f"{checkpoint.tensors[sources[0]].file}: {sources[0]}"
    return first if len(sources) == 1 else f"{first} and {len(sources) - 1} more"


def find_units(model: PreTrainedModel, inventory: Inventory) -> tuple[str, ...]:
    """Names of the blocks that are gathered as one; tied tensors must not cross them."""
    classes = hf_private.block_classes(model)
    units: list[str] = []
    for name, module in model.named_modules():
        if type(module).__name__ in classes and not any(name.startswith(f"{unit}.") for unit in units):
            units.append(name)
    if not units:
        lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        if lists:
            name, longest = max(lists, key=lambda item: len(item[1]))
            units = [f"{name}.{index}" for index in range(len(longest))]
    for info in inventory.parameters:
        _check_tie_inside(info, units)
    return tuple(units)


def _check_tie_inside(info: TensorInfo, units: list[str]) -> None:
    homes = {next((u for u in units if name.startswith(f"{u}.")), "the root") for name in info.names}
    if len(homes) > 1:
        message = f"{info.name!r} is tied across FSDP units ({', '.join(sorted(homes))})."
        raise fail("S214", "plan", message, tensor=info.name)
