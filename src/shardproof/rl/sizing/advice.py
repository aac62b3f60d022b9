"""Which settings would make a run fit, and by how much each of them lowers what a rank holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardproof.config.load import parse_recipe, to_json
from shardproof.config.schema import Recipe
from shardproof.errors import ShardproofError
from shardproof.rl.sizing.recipe import Machine, RunEstimate, estimate_run

_GPUS_PER_NODE = 8  # at most; more ranks take more nodes
_MIN_SAVED = 0.01  # of what a rank holds; less is not worth a line


@dataclass(frozen=True)
class Change:
    """A setting that lowers memory. `keeps_results`: the run computes the same, more slowly or on more devices."""

    text: str  # as it is written on the command line
    values: dict[str, Any]  # {section.key: value}
    machine: Machine | None = None  # instead of the one before
    keeps_results: bool = True


@dataclass(frozen=True)
class Effect:
    """What a run holds after some changes."""

    changes: tuple[Change, ...]
    estimate: RunEstimate

    @property
    def text(self) -> str:
        """The changes as they are written on the command line; of one that was made twice, the last."""
        last = {re.split("[= ]", change.text)[0]: change.text for change in self.changes}
        return " ".join(last.values())


def advise(
    recipe: Recipe, machine: Machine, prompt_lengths: Sequence[int], before: RunEstimate
) -> tuple[list[Effect], Effect | None]:
    """(the effect of each change that helps, the largest first; the changes that together make the run fit).

    The second is None where the run fits already, or no combination makes it fit.
    """
    effects = _effects(recipe, machine, prompt_lengths, before)
    if before.fits:
        return effects, None
    chosen: tuple[Change, ...] = ()
    now, result = before, None
    while not now.fits:
        tried = _effects(recipe, machine, prompt_lengths, now, chosen)
        # What changes the run's results comes last.
        tried = [effect for effect in tried if effect.changes[-1].keeps_results] or tried
        if not tried:
            return effects, None
        result = next((effect for effect in tried if effect.estimate.fits), tried[0])
        chosen, now = result.changes, result.estimate
    return effects, result


def _effects(
    recipe: Recipe,
    machine: Machine,
    prompt_lengths: Sequence[int],
    before: RunEstimate,
    chosen: tuple[Change, ...] = (),
) -> list[Effect]:
    """The effect of one more change, for each that helps where it is needed."""
    found = []
    needs_host = not machine.on_gpu or (before.fits_gpu and not before.fits_host)
    have = before.host_bytes if needs_host else before.device_bytes
    base, place = apply(recipe, machine, chosen)
    for change in _changes(base, place):
        try:
            changed, elsewhere = apply(recipe, machine, (*chosen, change))
            estimate = estimate_run(changed, elsewhere, prompt_lengths)
        except ShardproofError:  # these settings do not go together
            continue
        holds = estimate.host_bytes if needs_host else estimate.device_bytes
        if have - holds > _MIN_SAVED * have:
            found.append((holds, Effect((*chosen, change), estimate)))
    return [effect for _, effect in sorted(found, key=lambda item: item[0])]


def apply(recipe: Recipe, machine: Machine, changes: Sequence[Change]) -> tuple[Recipe, Machine]:
    """The recipe and the machine after the changes. Raises if the recipe does not allow one."""
    data = json.loads(to_json(recipe))
    for change in changes:
        for key, value in change.values.items():
            section, _, leaf = key.partition(".")
            data[section] = (data.get(section) or {}) | {leaf: value} if leaf else value
        machine = change.machine or machine
    return parse_recipe(data, "the changed recipe"), machine


def _changes(recipe: Recipe, machine: Machine) -> Iterator[Change]:
    """Changes that may lower memory and that the recipe does not have yet."""
    model, rollout = recipe.model, recipe.rollout
    if machine.ranks < _GPUS_PER_NODE:
        yield Change(f"--ranks {2 * machine.ranks}", {}, replace(machine, ranks=2 * machine.ranks))
    else:
        yield Change(f"--nodes {2 * machine.nodes}", {}, replace(machine, nodes=2 * machine.nodes))
    if model.checkpoint_activations is False or not isinstance(model.checkpoint_activations, bool | str):
        yield _set("model.checkpoint_activations", True)
    if recipe.train.micro_batch_tokens > 1024:
        yield _set("train.micro_batch_tokens", recipe.train.micro_batch_tokens // 2)
    if rollout.engine in ("embedded", "sharded") and rollout.batch_size > 8:
        yield _set("rollout.batch_size", rollout.batch_size // 2)
    if not rollout.sleep and rollout.engine in ("embedded", "vllm"):
        yield _set("rollout.sleep", True)
    if (
        not rollout.offload_policy
        and rollout.engine != "sharded"
        and machine.on_gpu
        and not model.cpu_offload
    ):
        yield _set("rollout.offload_policy", True)
    if rollout.engine == "embedded":
        yield _set("rollout.engine", "sharded")
    if machine.on_gpu:
        yield from _offloads(recipe)
    if model.lora is None:
        # The policy without its adapters is the reference then.
        yield Change("model.lora.r=16", {"model.lora": {"r": 16}, "reference": None}, keeps_results=False)
    elif model.lora.base is None:
        section = model.lora.model_dump() | {"base": "nf4"}
        yield Change("model.lora.base=nf4", {"model.lora": section}, keeps_results=False)
    if recipe.optimizer.name == "adamw" and recipe.optimizer.moments == "float32":
        yield replace(_set("optimizer.moments", "bfloat16"), keeps_results=False)
        yield replace(_set("optimizer.name", "adamw_8bit"), keeps_results=False)
    if model.param_dtype == "float32":
        yield replace(_set("model.param_dtype", "bfloat16"), keeps_results=False)


def _offloads(recipe: Recipe) -> Iterator[Change]:
    if not recipe.model.cpu_offload:
        yield _set("model.cpu_offload", True)
    for role, section in (("reference", recipe.reference), ("critic", recipe.critic)):
        offloaded = recipe.model.cpu_offload if section is None else section.cpu_offload
        if not offloaded and not (section is None and role == "reference" and recipe.model.lora is not None):
            yield _set(f"{role}.cpu_offload", True)


def _set(key: str, value: Any) -> Change:
    return Change(f"{key}={json.dumps(value) if not isinstance(value, str) else value}", {key: value})
