"""What the libraries hand to the engine as it is: `generation_kwargs` of TRL, `additional_kwargs` of SkyRL, keys of verl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardproof.config.imported.draft import Draft, Foreign, Same, copy


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _listed_numbers(value: Any) -> list[int]:
    return [int(each) for each in _listed(value)]


# Both engines' names, as `GenerationConfig` and `SamplingParams` have them, with the keys of [rollout].
_SAME: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "max_new_tokens": ("max_new_tokens", int),
    "max_tokens": ("max_new_tokens", int),
    "min_new_tokens": ("min_new_tokens", int),
    "min_tokens": ("min_new_tokens", int),
    "top_p": ("top_p", float),
    "top_k": ("top_k", lambda k: max(int(k), 0)),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "stop": ("stop", _listed),
    "stop_strings": ("stop", _listed),
    "stop_token_ids": ("stop_ids", _listed_numbers),
}
_LACKING = {
    "eos_token_id": "the model's own tokens end a completion; name others in rollout.stop_ids",
    "ignore_eos": "completions are drawn to their end",
    "do_sample": "completions are drawn",
    "num_beams": "completions are drawn one by one",
    "n": "see rollout.group_size",
    "seed": "see train.seed",
}
_WITHOUT_EFFECT = {"do_sample": True, "num_beams": 1, "n": 1, "ignore_eos": False}
_UNNEEDED = {
    "include_stop_str_in_output": "rewards read the tokens, which have the stop string",
    "skip_special_tokens": "rewards read the text without them",
    "spaces_between_special_tokens": "rewards read the text without them",
    "detokenize": "the engine reports tokens",
    "logprobs": "log-probs of what was drawn are always there",
    "use_cache": "the engine has a cache of its own",
    "cache_implementation": "the engine has a cache of its own",
    "pad_token_id": "batches are never padded",
    "disable_compile": "see rollout.engine",
}


def engine_arguments(draft: Draft, foreign: Foreign, root: str) -> None:
    """Take over what engines are told further; it is stronger than the settings of the same name."""
    if foreign.values.get(root) not in (None, {}):  # which is no table
        draft.lack(foreign, root, "see the keys of [rollout]")
        return
    foreign.is_null(root)
    length = draft.values["rollout.max_new_tokens"]
    for name, value in foreign.section(root).items():
        key = f"{root}.{name}"
        foreign.last = key
        if value is None or (name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name]):
            continue
        if name in _SAME:
            ours, convert = _SAME[name]
            draft.put(f"rollout.{ours}", convert(value), key)
        elif name == "temperature":
            _temperature(draft, key, float(value))
        elif name in _UNNEEDED:
            draft.unneeded[key] = _UNNEEDED[name]
        else:
            draft.gaps[f"{key}={value!r}"] = _LACKING.get(name, "see the keys of [rollout]")
    if draft.values["rollout.max_new_tokens"] != length:
        draft.gaps[f"{root}: a longest completion other than {length}"] = (
            "means over a constant length divide by rollout.max_new_tokens"
        )


def named_arguments(draft: Draft, foreign: Foreign, root: str) -> None:
    """Take over settings of the engine that a config may have among those of a section."""
    for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        copy(draft, foreign, [Same(f"{root}.{name}", f"rollout.{name}", None, float)])
    for name in ("min_tokens", "stop", "stop_token_ids"):
        ours, convert = _SAME[name]
        copy(draft, foreign, [Same(f"{root}.{name}", f"rollout.{ours}", None, convert)])


def _temperature(draft: Draft, key: str, value: float) -> None:
    trained = draft.values["rollout.temperature"]
    if value != trained:
        draft.gaps[f"{key}={value!r}"] = (
            f"what is sampled and what is trained have one temperature, {trained:g}: see rollout.temperature"
        )
