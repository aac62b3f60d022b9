"""From checkpoint names to the model's names, through transformers' own conversion rules."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from shardproof.checkpoint.boxes import BoxTensor, NotSliceable
from shardproof.checkpoint.reader import SliceSource, TensorEntry
from shardproof.errors import error_for, fail, nearest
from shardproof.findings import Finding
from shardproof.model import hf_private
from shardproof.model.hf_private import WeightConverter, WeightTransform

_LISTED = 8


@dataclass(frozen=True)
class WholeConversion:
    """A conversion that cannot be done slice by slice: these sources, through this rule, give one tensor."""

    converter: WeightConverter
    first_target: str
    target: str
    sources: Mapping[str, tuple[str, ...]]  # source pattern -> checkpoint names, in order
    dtype: torch.dtype  # of the sources

    def convert(self, checkpoint: SliceSource, model: PreTrainedModel) -> torch.Tensor:
        """The converted tensor. Memory: its sources and itself, whole."""
        collected = {pattern: [checkpoint.whole(n) for n in names] for pattern, names in self.sources.items()}
        return _run(self.converter, self.first_target, collected, model)[self.target]


@dataclass
class CheckpointMap:
    """For each model tensor, where its elements come from."""

    boxes: dict[str, BoxTensor] = field(default_factory=dict)
    whole: dict[str, WholeConversion] = field(default_factory=dict)
    operations: dict[str, str] = field(default_factory=dict)  # name -> conversion in words
    unexpected: list[str] = field(default_factory=list)
    used_rules: list[WeightTransform] = field(
        default_factory=list
    )  # those that the checkpoint's names matched

    def __contains__(self, name: str) -> bool:
        return name in self.boxes or name in self.whole


def map_checkpoint(
    model: PreTrainedModel, state: dict[str, torch.Tensor], tensors: Mapping[str, TensorEntry]
) -> CheckpointMap:
    """The origin of every tensor of `state` (the model's, in names without adapters) that the checkpoint has.

    Nothing is read.
    """
    renamings, converters = hf_private.conversion_rules(model)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    result = CheckpointMap()
    collected: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}

    rename = _Renamer(renamings, converters, prefix, state)
    for name in tensors:
        renamed, pattern = rename(name)
        if renamed not in state:
            result.unexpected.append(name)
        elif pattern is None:
            entry = tensors[name]
            result.boxes[renamed] = BoxTensor.of_source(name, entry.shape, entry.dtype)
        else:
            _, sources = collected.setdefault(renamed, (by_pattern[pattern], defaultdict(list)))
            sources[pattern].append(name)
    result.unexpected.sort(key=hf_private.dot_natural_key)
    for _, sources in collected.values():
        for names in sources.values():
            names.sort(
                key=_numbers_of
                if len({_NUMBER.sub("0", n) for n in names}) == 1
                else hf_private.dot_natural_key
            )

    for first_target, (converter, sources) in collected.items():
        _convert(result, model, tensors, converter, first_target, sources)
    result.used_rules = [rule for rule in [*renamings, *converters] if rule.was_used()]
    return result


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Stands for the n-th number of a name while the name's pattern is renamed.
_STAND_IN = 900_000_000


def _numbers_of(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


class _Renamer:
    """transformers' renaming of a checkpoint name, done once for names that differ in their numbers alone.

    A checkpoint has tens of thousands of names and a few dozen patterns. Rules that look at numbers, and names whose
    pattern does not lead into the model, go through transformers one by one.
    """

    def __init__(self, renamings: list, converters: list, prefix: str, state: dict[str, torch.Tensor]):
        self._arguments = (renamings, converters, prefix, state)
        sources = [pattern for rule in [*renamings, *converters] for pattern in rule.source_patterns]
        # A digit beside a letter, as in w1, is part of a word.
        self._by_pattern = not any(re.search(r"\\d|(?<![A-Za-z_0-9])\d", pattern) for pattern in sources)
        self._known: dict[str, tuple[str, str | None]] = {}

    def __call__(self, name: str) -> tuple[str, str | None]:
        if self._by_pattern:
            renamed, pattern = self._through_pattern(name)
            if renamed in self._arguments[3]:
                return renamed, pattern
        renamings, converters, prefix, state = self._arguments
        renamed, pattern = hf_private.rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            return hf_private.rename_source_key(name, [], [], prefix, state)
        return renamed, pattern

    def _through_pattern(self, name: str) -> tuple[str, str | None]:
        parts = _NUMBER.split(name)
        shape = "\0".join(parts)
        if shape not in self._known:
            numbered = (f"{_STAND_IN + i}{part}" for i, part in enumerate(parts[1:]))
            stand_in = "".join([parts[0], *numbered])
            self._known[shape] = hf_private.rename_source_key(stand_in, *self._arguments[:2])
        renamed, pattern = self._known[shape]
        if len(parts) > 1:
            numbers = _NUMBER.findall(name)
            renamed = _NUMBER.sub(lambda m: _restored(m[0], numbers), renamed)
        return renamed, pattern


def _restored(number: str, numbers: list[str]) -> str:
    index = int(number) - _STAND_IN
    return numbers[index] if 0 <= index < len(numbers) else number


@dataclass(frozen=True)
class ExportEntry:
    """Checkpoint tensors that are made from the same model tensors.

    `boxes` has them by name, as boxes of model tensors. Where an operation needs values, `whole` makes them.
    """

    sources: tuple[str, ...]
    boxes: Mapping[str, BoxTensor]
    whole: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None


def map_export(
    model: PreTrainedModel,
    state: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    used_rules: Sequence[WeightTransform] | None,
) -> list[ExportEntry]:
    """How the family's checkpoint is made from the model's tensors: the conversion rules, backwards.

    `state` has shape and dtype of each model tensor, in names without adapters, and gives the order. `used_rules`
    are those that loading used; None for a model that was not loaded.
    """
    renamings, converters = hf_private.reversed_rules(model, used_rules)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    groups: dict[str, tuple[WeightConverter | None, dict[str, list[str]]]] = {}
    for name in state:
        renamed, pattern = hf_private.rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            groups[renamed] = (None, {renamed: [name]})
        else:
            _, sources = groups.setdefault(renamed, (by_pattern[pattern], defaultdict(list)))
            sources[pattern].append(name)
    return [_export_entry(model, state, target, rule, sources) for target, (rule, sources) in groups.items()]


def _export_entry(
    model: PreTrainedModel,
    state: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    target: str,
    rule: WeightConverter | None,
    sources: Mapping[str, list[str]],
) -> ExportEntry:
    names = tuple(name for group in sources.values() for name in group)
    if rule is None:
        return ExportEntry(names, {target: BoxTensor.of_source(names[0], *state[names[0]])})
    try:
        lazy = {p: [BoxTensor.of_source(n, *state[n]) for n in group] for p, group in sources.items()}
        return ExportEntry(names, _run(rule, target, lazy, model))
    except NotSliceable:
        meta = {
            p: [torch.empty(state[n][0], dtype=state[n][1], device="meta") for n in group]
            for p, group in sources.items()
        }
        shapes = {n: BoxTensor(t.shape, t.dtype, []) for n, t in _run(rule, target, meta, model).items()}

        def convert(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return _run(rule, target, {p: [values[n] for n in group] for p, group in sources.items()}, model)

        return ExportEntry(names, shapes, convert)


def _convert(
    result: CheckpointMap,
    model: PreTrainedModel,
    tensors: Mapping[str, TensorEntry],
    converter: WeightConverter,
    first_target: str,
    sources: dict[str, list[str]],
) -> None:
    """Add what one rule makes of its sources: as boxes, or as a whole conversion if an operation needs values."""
    operations = ", ".join(type(op).__name__ for op in converter.operations)
    try:
        lazy = {
            pattern: [BoxTensor.of_source(n, tensors[n].shape, tensors[n].dtype) for n in names]
            for pattern, names in sources.items()
        }
        for name, value in _run(converter, first_target, lazy, model).items():
            result.boxes[name] = value
            result.operations[name] = operations
    except NotSliceable:
        # Shapes and names of the outcome come from a dry run on meta tensors.
        meta = {
            pattern: [torch.empty(tensors[n].shape, dtype=tensors[n].dtype, device="meta") for n in names]
            for pattern, names in sources.items()
        }
        frozen = {pattern: tuple(names) for pattern, names in sources.items()}
        dtype = tensors[next(iter(frozen.values()))[0]].dtype
        try:
            names = list(_run(converter, first_target, meta, model))
        except RuntimeError as error:
            counts = {p: dict(Counter(tuple(t.shape) for t in tensors)) for p, tensors in meta.items()}
            message = f"{first_target!r} cannot be made through {operations} from {{shape: count}} {counts}: {error}"
            raise fail("L106", "map", message, tensor=first_target) from error
        for name in names:
            result.whole[name] = WholeConversion(converter, first_target, name, frozen, dtype)
            result.operations[name] = operations


def _run(converter: WeightConverter, first_target: str, collected: dict, model: PreTrainedModel) -> dict:
    """One rule applied to its collected sources (tensors or boxes): {full model name: result}."""
    rule = copy(converter)
    rule.collected_tensors = defaultdict(
        list, {pattern: list(values) for pattern, values in collected.items()}
    )
    outcome = rule.convert(first_target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in outcome.items()}


def check_coverage(
    checkpoint_map: CheckpointMap,
    model: PreTrainedModel,
    needed: Mapping[str, tuple[int, ...]],
    *,
    may_initialise: set[str],
    may_ignore: set[str],
) -> None:
    """Raise for names missing from, left over in, or shaped differently in the checkpoint, with the nearest names."""
    missing_patterns, unexpected_patterns = hf_private.ignored_patterns(model)
    missing = [
        name
        for name in needed
        if name not in checkpoint_map and name not in may_initialise and not _matches(name, missing_patterns)
    ]
    unexpected = [
        name
        for name in checkpoint_map.unexpected
        if name not in may_ignore and not _matches(name, unexpected_patterns)
    ]
    findings = []
    if missing:
        findings.append(Finding("L104", "map", _listing("missing", missing, unexpected), tensor=missing[0]))
    if unexpected:
        findings.append(
            Finding("L105", "map", _listing("unexpected", unexpected, missing), tensor=unexpected[0])
        )
    for name, shape in needed.items():
        boxes = checkpoint_map.boxes.get(name)
        if boxes is not None and tuple(boxes.shape) != tuple(shape):
            message = f"{name!r} is {tuple(boxes.shape)} in the checkpoint and {tuple(shape)} in the model."
            findings.append(Finding("L106", "map", message, tensor=name))
    if findings:
        raise error_for(findings)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _listing(kind: str, names: list[str], others: list[str]) -> str:
    lines = []
    for name in names[:_LISTED]:
        near = nearest(name, others)
        lines.append(f"{name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {kind}: {', '.join(lines)}{more}."
