"""docs/settings.md: every key of a recipe, from the schema and the strings under its keys."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from shardproof.config.numbers import Bound
from shardproof.config.schema import Recipe, Role, Section

INTRO = """\
# Settings

<!-- python scripts/reference.py --write makes this page from the schema in src/shardproof/config/. -->

A recipe is a TOML file with the sections below. On the command line, `section.key=value` after the recipe overrides a
key: `shardproof train recipe.toml train.steps=200 algorithm.tis_cap=none`.

- Set an optional key to `none` to disable it, or to return to its default behaviour.
- Paths resolve against the recipe's folder first, then the working directory.
- An unknown key, or a value out of range, is an error that names the nearest valid key or the range.

The smallest recipe; everything else has a default:

```toml
[model]
path = "Qwen/Qwen3-0.6B"

[data]
train = "train.jsonl"

[reward]
functions = [{ name = "numeric" }]

[train]
steps = 100

[output]
folder = "runs/first"
```

`shardproof train recipe.toml --show-recipe` prints every setting with its value, and `--dry-run` checks the recipe, the
data, the model and the machine.
"""
REQUIRED = object()
_WORDS = {
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    str: "string",
    type(None): "`none`",
}


def page() -> str:
    """The text of docs/settings.md."""
    sections = "\n".join(line for line in _contents(Recipe, ""))
    return f"{INTRO}\n{sections}\n\n" + "\n\n".join(_sections(Recipe, "")) + "\n"


def descriptions(kind: type) -> dict[str, str]:
    """{key: the string under it} of a section and of those it is based on, as their source has it."""
    bases = [base for base in kind.__mro__[1:] if "shardproof" in base.__module__ and base is not Section]
    found = {key: text for base in reversed(bases) for key, text in descriptions(base).items()}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    for key, after in zip(tree.body, tree.body[1:]):
        is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and is_string:
            found[key.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


def keys(kind: type) -> dict[str, tuple[Any, Any]]:
    """{key: (type, default)} of a section; `REQUIRED` where there is no default."""
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        return {each.name: (hints[each.name], _dataclass_default(each)) for each in fields(kind)}
    found = {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
    return {name: (hints[name], _or_required(default)) for name, default in found.items()}


def sections_of(kind: type, prefix: str) -> list[tuple[str, type, str]]:
    """(dotted name, class, key) of the sections directly in this one."""
    found = [(name, _section_in(hint)) for name, (hint, _) in keys(kind).items()]
    return [(f"{prefix}{name}", section, name) for name, section in found if section is not None]


def _contents(kind: type, prefix: str) -> typing.Iterator[str]:
    for name, section, key in sections_of(kind, prefix):
        if _holds_list(keys(kind)[key][0]):
            continue
        needed = keys(kind)[key][1] is REQUIRED
        text = descriptions(kind)[key]
        yield f"- [`[{name}]`](#{_anchor(name)}){' (required)' if needed else ''}: {text}"
        yield from _contents(section, f"{name}.")


def _sections(kind: type, prefix: str) -> typing.Iterator[str]:
    for name, section, _ in sections_of(kind, prefix):
        title = f"## `[{name}]`"
        is_list = _holds_list(keys(kind)[name.rpartition(".")[2]][0])
        if is_list:
            title = f"## Each of `{name}`"
        about = " ".join((section.__doc__ or "").split())
        if section is Role:  # there are two, and each key says what its role is
            about = f"{descriptions(kind)[name]} {about.partition('. ')[2]}"
        yield "\n\n".join([title, _linked(about), *_keys(section, f"{name}.")])
        yield from _sections(section, f"{name}.")


def _keys(section: type, prefix: str) -> typing.Iterator[str]:
    """One entry per key that holds a value."""
    inner = {name for _, kind, name in sections_of(section, "") if kind is not None}
    about = descriptions(section)
    for name, (hint, default) in keys(section).items():
        if name in inner and not _holds_list(hint):
            continue
        given = "required" if default is REQUIRED else f"default `{_toml(default)}`"
        yield f"### `{prefix}{name}`\n\n*{_words(hint)}; {given}*\n\n{_linked(about[name])}"


def _holds_list(hint: Any) -> bool:
    """Whether a key holds a list, or one of several things of which one is a list."""
    return any(get_origin(part) is list for part in (hint, *get_args(hint)))


def _section_in(hint: Any) -> type | None:
    """The section that a key holds, itself or as one of several things."""
    parts = [hint, *get_args(hint)]
    for part in [*parts, *(inner for each in parts if get_origin(each) is list for inner in get_args(each))]:
        if isinstance(part, type) and (is_dataclass(part) or issubclass(part, BaseModel)):
            return part
    return None


def _several(words: str) -> str:
    """A list of what words say: of numbers, their bounds follow."""
    if words.startswith("`"):
        return f"list of any of {words}"
    numbers = re.sub(r"\bnumber\b", "numbers", words, count=1)
    return f"list of {numbers if numbers != words else words + 's'}"


def _words(hint: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = next((each for each in arguments[1:]), None)
        return _bounded(arguments[0], bounds)
    if origin in (Union, types.UnionType):
        return ", or ".join(_words(each) for each in arguments)
    if origin is Literal:
        return _either([f"`{_toml(each)}`" for each in arguments])
    if origin is list:
        return "list of tables" if _section_in(hint) else _several(_words(arguments[0]))
    if origin is tuple:
        return f"{len(arguments)} values, each a {_words(arguments[0])}"
    if origin is dict:
        return "table of values"
    return _WORDS[hint]


def _either(choices: list[str]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def _bounded(kind: type, bounds: Any) -> str:
    limits = bounds.limits if isinstance(bounds, Bound) else _field_limits(bounds)
    low, above, high, below = (limits.get(name) for name in ("ge", "gt", "le", "lt"))
    if kind is int:
        low = above + 1 if above is not None else low
        high = below - 1 if below is not None else high
        return f"whole number from {low:,} to {high:,}"
    start = f"above {_number(above)}" if above is not None else f"at least {_number(low)}"
    end = f"below {_number(below)}" if below is not None else f"at most {_number(high)}"
    return f"number {start} and {end}"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)


def _field_limits(field: Any) -> dict[str, Any]:
    return {name: getattr(each, name) for each in field.metadata for name in each.__slots__}


def _dataclass_default(each: Any) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return REQUIRED if each.default is MISSING else each.default


def _or_required(default: Any) -> Any:
    return REQUIRED if default is PydanticUndefined else default


def _toml(value: Any) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, bool) or value is None:
        return "none" if value is None else str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return "{}" if value == {} else repr(value)


def _linked(text: str) -> str:
    """The text with links to the pages that it names."""
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)


def _anchor(name: str) -> str:
    return name.replace(".", "")
