"""The reference pages say what the source says, and say something of everything."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardproof
from shardproof.config.schema import Recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference() -> Iterator:
    sys.path.insert(0, str(ROOT))
    yield importlib.import_module("scripts.reference")
    sys.path.remove(str(ROOT))


def sections(settings, kind=Recipe) -> Iterator[type]:
    yield kind
    for _, section, _ in settings.sections_of(kind, ""):
        yield from sections(settings, section)


def test_the_pages_are_up_to_date(reference):
    assert list(reference.outdated()) == [], "run python scripts/reference.py --write"


def test_every_key_has_a_description(reference):
    settings = reference.reference_settings
    for section in sections(settings):
        about = settings.descriptions(section)
        assert list(about) == list(settings.keys(section)), (
            f"{section.__name__}: a key without a string under it"
        )
        for key, text in about.items():
            assert text[0] in '"`' or text[0].isupper() or text.split()[0].islower(), f"{key}: {text}"
            assert text.endswith(".") and 20 < len(text) < 350, f"{section.__name__}.{key}: {text}"


def test_the_page_of_settings_has_every_key(reference):
    from shardproof.config.load import all_keys

    page = (ROOT / "docs" / "settings.md").read_text()
    for key in all_keys(Recipe):
        assert f"### `{key}`" in page or f"## `[{key}]`" in page, key


def test_the_page_of_commands_has_every_command(reference):
    page = (ROOT / "docs" / "command-line.md").read_text()
    commands = reference.reference_commands.get_command(reference.reference_commands.app).commands
    for name, command in commands.items():
        assert f"## shardproof {name}\n" in page
        for option in command.params:
            assert option.help, f"shardproof {name}: {option.name} has no help"


def test_the_page_of_the_api_has_every_public_name():
    page = (ROOT / "docs" / "python-api.md").read_text()
    shown = re.findall(r"^### `sp\.(\w+)`$", page, re.MULTILINE)
    assert sorted(shown) == shardproof.__all__


def test_the_names_of_the_api_page_have_docstrings(reference):
    for _, names, example in reference.reference_api.GROUPS:
        assert example
        assert all(getattr(shardproof, name).__doc__ for name in names)
