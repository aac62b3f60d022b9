"""From checkpoint names to the model's names, through transformers' own conversion rules."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from shardproof.errors import error_for, fail, nearest
from shardproof.findings import Finding
from shardproof.model import hf_private
from shardproof.model.hf_private import WeightConverter, WeightTransform
from shardproof.weights.box_tensor import BoxTensor, NotSliceable
from shardproof.weights.reader import SliceSource, TensorEntry
from shardproof.weights.renaming import Renamer, in_order

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

    def sources(self, name: str) -> list[str]:
        """The checkpoint tensors that a model tensor is made from; none if the checkpoint does not have it."""
        if name in self.boxes:
            return self.boxes[name].sources
        return [n for names in self.whole[name].sources.values() for n in names] if name in self.whole else []


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
    collected: dict[str, tuple[WeightConverter, dict[str, list[tuple[str, str, list[str]]]]]] = {}

    rename = Renamer(renamings, converters, prefix, state)
    for name, entry in tensors.items():
        target, pattern, words, numbers = rename(name)
        if target not in state:
            result.unexpected.append(name)
        elif pattern is None:
            result.boxes[target] = BoxTensor.of_source(name, entry.shape, entry.dtype)
        else:
            found = collected.get(target)
            if found is None:
                found = collected[target] = (by_pattern[pattern], defaultdict(list))
            found[1][pattern].append((name, words, numbers))
    result.unexpected.sort(key=hf_private.dot_natural_key)
    convert = _Converter(result, model, tensors)
    for first_target, (converter, groups) in collected.items():
        convert(converter, first_target, {pattern: in_order(names) for pattern, names in groups.items()})
    result.used_rules = [rule for rule in [*renamings, *converters] if rule.was_used()]
    return result


class Cut(NamedTuple):
    """A checkpoint tensor that is a run of one model tensor."""

    name: str
    shape: torch.Size
    source: str
    start: int
    length: int


@dataclass(frozen=True)
class ExportEntry:
    """Checkpoint tensors that are made from the same model tensors.

    `boxes` has them by name, as boxes of model tensors. Where an operation needs values, `whole` makes them.
    """

    sources: tuple[str, ...]
    boxes: Mapping[str, BoxTensor]
    whole: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None

    @cached_property
    def cuts(self) -> list[Cut] | None:
        """The checkpoint tensors as runs of model tensors, if they all are."""
        if self.whole is not None:
            return None
        cuts = []
        for name, box in self.boxes.items():
            run = box.as_run()
            if run is None or run.length != box.numel():
                return None
            cuts.append(Cut(name, box.shape, run.source, run.source_start, run.length))
        return cuts

    @cached_property
    def tiles(self) -> list[int] | None:
        """For each checkpoint tensor its place among equal parts of one model tensor, if that is what they are."""
        cuts = self.cuts
        if not cuts or len(cuts) == 1 or len({(cut.source, cut.length) for cut in cuts}) > 1:
            return None
        places = [cut.start // cut.length for cut in cuts]
        aligned = all(place * cut.length == cut.start for place, cut in zip(places, cuts, strict=True))
        return places if aligned and sorted(places) == list(range(len(cuts))) else None


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


class _Converter:
    """Adds to a map what rules make of their sources.

    Layers are alike: where a rule meets sources of the same shapes again, the account of the first time is bound to
    the new names.
    """

    def __init__(self, result: CheckpointMap, model: PreTrainedModel, tensors: Mapping[str, TensorEntry]):
        self._result = result
        self._model = model
        self._tensors = tensors
        self._known: dict[Any, BoxTensor] = {}

    def __call__(self, converter: WeightConverter, first_target: str, sources: dict[str, list[str]]) -> None:
        """Add what one rule makes of its sources: as boxes, or as a whole conversion if an operation needs values."""
        entries = self._tensors
        operations = ", ".join(type(op).__name__ for op in converter.operations)
        names = [name for group in sources.values() for name in group]
        described = [(entries[name].shape, entries[name].dtype) for name in names]
        key = (id(converter), tuple((p, len(group)) for p, group in sources.items()), tuple(described))
        if key in self._known:
            self._result.boxes[first_target] = self._known[key].bind(names)
            self._result.operations[first_target] = operations
            return
        numbers = iter(range(len(names)))
        try:
            lazy = {
                pattern: [BoxTensor.of_source(i, *described[i]) for _, i in zip(group, numbers)]
                for pattern, group in sources.items()
            }
            outcome = _run(converter, first_target, lazy, self._model)
        except NotSliceable:
            self._convert_whole(converter, first_target, sources, operations)
            return
        if list(outcome) == [first_target] and hf_private.ignores_names(converter):
            self._known[key] = outcome[first_target]
        for name, value in outcome.items():
            self._result.boxes[name] = value.bind(names)
            self._result.operations[name] = operations

    def _convert_whole(
        self,
        converter: WeightConverter,
        first_target: str,
        sources: dict[str, list[str]],
        operations: str,
    ) -> None:
        """Shapes and names of the outcome come from a dry run on meta tensors."""
        entries = self._tensors
        meta = {
            pattern: [torch.empty(entries[n].shape, dtype=entries[n].dtype, device="meta") for n in names]
            for pattern, names in sources.items()
        }
        frozen = {pattern: tuple(names) for pattern, names in sources.items()}
        dtype = entries[next(iter(frozen.values()))[0]].dtype
        try:
            names = list(_run(converter, first_target, meta, self._model))
        except RuntimeError as error:
            counts = {p: dict(Counter(tuple(t.shape) for t in tensors)) for p, tensors in meta.items()}
            message = f"{first_target!r} cannot be converted with {operations} from {{shape: count}} {counts}: {error}"
            raise fail("L106", "map", message, tensor=first_target) from error
        for name in names:
            self._result.whole[name] = WholeConversion(converter, first_target, name, frozen, dtype)
            self._result.operations[name] = operations


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
    needed: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Mapping[str, TensorEntry],
    *,
    may_initialise: set[str],
    may_ignore: set[str],
) -> None:
    """Raise for names missing from or left over in the checkpoint, and for tensors of another shape or kind there.

    `needed` has shape and dtype of each model tensor, `tensors` is the checkpoint's index.
    """
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
    for name, (shape, dtype) in needed.items():
        for source in checkpoint_map.sources(name):
            if _kind(tensors[source].dtype) != _kind(dtype):
                found = f"{source!r} holds {tensors[source].dtype} in the checkpoint"
                message = f"{found}, but the model's {name!r} is {dtype}: there is no safe conversion."
                findings.append(Finding("L106", "map", message, tensor=name))
                break
        boxes = checkpoint_map.boxes.get(name)
        if boxes is not None and tuple(boxes.shape) != tuple(shape):
            message = f"{name!r} is {tuple(boxes.shape)} in the checkpoint and {tuple(shape)} in the model."
            findings.append(Finding("L106", "map", message, tensor=name))
    if len(findings) > _LISTED:
        more = f"{len(findings) - _LISTED} more tensors do not fit."
        findings = [*findings[:_LISTED], Finding("L106", "map", more)]
    if findings:
        raise error_for(findings)


def _kind(dtype: torch.dtype) -> str:
    """What a dtype's values are: numbers with fractions, whole numbers, or truth values."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point or dtype.is_complex else "int"


def _matches(name: str, patterns: list[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _listing(kind: str, names: list[str], others: list[str]) -> str:
    lines = []
    for name in names[:_LISTED]:
        near = nearest(name, others)
        lines.append(f"{name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {kind} tensor{'s' * (len(names) > 1)}: {', '.join(lines)}{more}."
