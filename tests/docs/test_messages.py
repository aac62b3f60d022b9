"""What messages point to is there: pages, commands and keys of a recipe."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shardproof.config.load import all_keys
from shardproof.config.schema import Recipe

ROOT = Path(__file__).parents[2]
KEYS = set(all_keys(Recipe))
SECTIONS = {key.partition(".")[0] for key in KEYS}
KEY = re.compile(rf"(?<![\w.`$/*=-])(?:{'|'.join(sorted(SECTIONS))})\.[a-z_]+(?:\.[a-z_]+)*(?![\w*/(.])")
# Keys of verl's, which are named where they are read, and files.
OTHERS = {"data.train_batch_size", "algorithm.use_pf_ppo", "train.py", "model.safetensors"}
TABLES = ("data.chat_template_kwargs.", "output.tracker_options.")  # whose keys are the user's


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """Every text of the package that has several words, and where it is."""
    return tuple(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def test_the_pages_that_messages_name_are_there():
    named = [(at, page) for at, text in messages() for page in re.findall(r"docs/[\w/-]+\.md", text)]
    assert len(named) > 20
    assert [(at, page) for at, page in named if not (ROOT / page).exists()] == []


def test_the_commands_that_messages_name_are_there():
    page = (ROOT / "docs" / "command-line.md").read_text()
    known = set(re.findall(r"^## shardproof ([\w-]+)$", page, re.MULTILINE))
    named = [(at, name) for at, text in messages() for name in re.findall(r"`shardproof ([a-z][\w-]*)", text)]
    assert len(named) > 20
    assert [(at, name) for at, name in named if name not in known] == []


def test_the_keys_that_messages_name_are_there():
    known = OTHERS | KEYS | {key[:at] for key in KEYS for at in range(len(key)) if key[at] == "."}
    named = [(at, key) for at, text in messages() for key in KEY.findall(text)]
    assert len(named) > 200
    assert [(at, key) for at, key in named if key not in known and not key.startswith(TABLES)] == []
