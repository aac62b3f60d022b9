"""From a config of another library to a recipe: which library it is, its draft, and whether the result is one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.config.imported import skyrl, trl, verl
from shardproof.config.imported.draft import Draft, Foreign
from shardproof.config.imported.files import read_config
from shardproof.config.imported.text import recipe_text
from shardproof.config.load import parse_recipe
from shardproof.errors import ConfigError, fail

UNSURE = "Only running the script would tell:"
LIBRARIES = ("trl", "verl", "skyrl")
_TITLES = {"trl": "TRL", "verl": "verl", "skyrl": "SkyRL"}
_OF_VERL = ("actor_rollout_ref.", "algorithm.")
_OF_OTHERS = {"data", "trainer", "model", "rollout", "placement"}  # sections that no config of TRL has
_OF_SKYRL = ("generator.", "trainer.policy.", "trainer.placement.", "trainer.algorithm.", "environment.env_")

_REFUSED = (
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    ArithmeticError,
)  # what a value of another kind raises
_UNKNOWN = re.compile(r"\$\{[^}]*\}?|\$\((?:\.{3}\))?|\$\w+|\$@")


@dataclass(frozen=True)
class Imported:
    """A recipe that was made of another library's config."""

    library: str
    trainer: str  # of TRL; "" for the others
    draft: Draft
    text: str
    problem: str | None  # why the recipe cannot be used as it is; None if it can
    notes: tuple[str, ...] = ()  # what only running a script would tell


def find_library(foreign: Foreign) -> str:
    """Whose config it is, by the keys that it has."""
    keys = foreign.values
    for name, prefixes in (("skyrl", _OF_SKYRL), ("verl", _OF_VERL)):
        if any(key.startswith(prefixes) for key in keys):
            return name
    sections = sorted({key.partition(".")[0] for key in keys if "." in key})
    if sections and (not trl.has_own(foreign) or _OF_OTHERS & set(sections)):
        named = f"it has the sections {', '.join(sections[:5])}"
        message = f"the config is none of TRL's, verl's or SkyRL's that are read: {named}."
        fix = "say whose it is with --library"
        trains = {"data", "optim", "placement", "engine"} & set(sections)
        if trains and "model" in sections and "rollout" not in sections:
            message = f"the config is none of those that are read, but may be of verl's or SkyRL's SFT trainer: {named}."
            fix = "write a recipe for 'sft', as docs/preferences.md has it, or say whose it is with --library"
        raise fail("C001", "config", message, fix=fix)
    return "trl"


def import_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    library: str | None = None,
    trainer: str | None = None,
    ranks: int | None = None,
) -> Imported:
    """The recipe of a config file; `overrides` are settings of the other library, as its command line takes them."""
    notes: list[str] = []
    foreign = Foreign(read_config(path, overrides, notes))
    library = library or find_library(foreign)
    if library == "trl":
        foreign = trl.opened(foreign)
        trainer = trainer or trl.find_trainer(foreign)
    else:
        trainer = ""

    def translate(given: Foreign) -> Draft:
        if library == "trl":
            return trl.translate(given, trainer or "", ranks)
        return (verl if library == "verl" else skyrl).translate(given)

    try:
        draft = translate(foreign)
    except _REFUSED as error:
        key, why = _culprit(foreign, translate, error)
        message = f"{path.name}: {key}={foreign.values.get(key)!r} is no value that {_TITLES[library]} takes there ({why})."
        raise fail("C001", "config", message, fix=f"correct it, or add {key}=VALUE to the command") from error
    _ask_for_unknown(draft)
    draft.idle = _idle(foreign, draft, translate)
    kind = f"{_TITLES[library]}'s {trainer.upper()} config" if trainer else f"{_TITLES[library]}'s config"
    title = f"Made from {kind} {path.name}. Comments name the settings behind the values."
    if draft.gaps:
        title += "\n\nWithout a counterpart:"
        title += "".join(f"\n  {setting}: {why}" for setting, why in draft.gaps.items())
    if notes:
        title += f"\n\n{UNSURE}" + "".join(f"\n  {note}" for note in notes)
    text = recipe_text(draft, title)
    return Imported(library, trainer, draft, text, _problem(text), tuple(notes))


def _culprit(
    foreign: Foreign, translate: Callable[[Foreign], Draft], error: Exception
) -> tuple[str, Exception]:
    """The setting for whose value no recipe can be made, and what is wrong with it; one that was looked at earlier, too."""

    def fault(left_out: Collection[str]) -> Exception | None:
        try:
            translate(Foreign({key: value for key, value in foreign.values.items() if key not in left_out}))
        except _REFUSED as found:
            return found
        return None

    unknown = [key for key, value in foreign.values.items() if _UNKNOWN.search(str(value))]
    known = fault(unknown)  # what is wrong apart from those
    if known is None:
        for key in unknown:
            if (found := fault([other for other in unknown if other != key])) is not None:
                return key, found
    seen = [foreign.last, *(key for key in foreign.values if key in foreign.seen)]
    return next((key for key in seen if fault([key, *unknown]) is None), foreign.last), known or error


def _ask_for_unknown(draft: Draft) -> None:
    """Have values filled in that hold a variable which is not known, or what a command would say."""
    for key, value in draft.values.items():
        if key not in draft.to_fill and (found := _UNKNOWN.search(str(value))):
            draft.to_fill[key] = f"{draft.origins.get(key, key)}: {found[0]} is not known here"


def _idle(foreign: Foreign, draft: Draft, translate: Callable[[Foreign], Draft]) -> list[str]:
    """The settings that were looked at and change nothing: each is left out once, and the recipe stays what it is."""
    seen = {key: value for key, value in foreign.values.items() if key in foreign.seen}
    whole = translate(Foreign(dict(seen)))

    def changes_nothing(key: str) -> bool:
        try:
            without = translate(Foreign({other: value for other, value in seen.items() if other != key}))
        except _REFUSED:
            return False
        return whole.says_the_same(without)

    sure = {*draft.unneeded, *(key for key, value in seen.items() if value is None)}
    return [key for key in seen if key not in sure and changes_nothing(key)]


def _problem(text: str) -> str | None:
    """Why the recipe as it is written cannot be used; None if it can."""
    try:
        parse_recipe(tomllib.loads(text), "the recipe")
    except ConfigError as error:
        return error.findings[0].message
    return None
