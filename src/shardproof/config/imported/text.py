"""A draft as the text of a recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from shardproof.config.imported.draft import Draft

_ORDER = (
    *(
        "model",
        "model.lora",
        "data",
        "reward",
        "rollout",
        "rollout.vllm",
        "algorithm",
        "algorithm.preference",
    ),
    *("reference", "critic", "teacher", "optimizer", "train", "evaluation", "output"),
)


def recipe_text(draft: Draft, title: str) -> str:
    """The recipe as TOML, with a comment on each setting that says where it comes from."""
    tables: dict[str, list[str]] = {}
    for key, value in draft.values.items():
        table, _, leaf = key.rpartition(".")
        origin = draft.to_fill.get(key) or draft.origins.get(key, "")
        mark = "FILL IN: " if key in draft.to_fill else ""
        line = f"{leaf} = {toml(value)}"
        tables.setdefault(table, []).append(f"{line}  # {_comment(mark + origin)}" if origin else line)
    order = sorted(tables, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    parts = [f"# {_comment(line)}" if line else "#" for line in title.splitlines()]
    for name in order:
        parts += ["", f"[{name}]", *tables[name]]
    return "\n".join(parts) + "\n"


def _comment(text: str) -> str:
    """Text as one line that TOML reads as a comment, whatever names and values are in it."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def toml(value: Any) -> str:
    """A value as TOML writes it; None is the text none, which recipes read as nothing."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)  # of inf and nan, too, which TOML has, and recipes refuse by the key's name
        return text if "." in text or "e" in text or not math.isfinite(value) else f"{text}.0"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, int):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # dates of YAML, as text


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)
