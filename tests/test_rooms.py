"""Where the tests of a file stand, and which markers they carry; see docs/contributing.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src" / "shardproof"
ROOMS = {path.parent.name for path in SRC.glob("*/__init__.py")}
# Folders that are no room of the source: documentation, what needs a GPU, and faults of other frameworks.
OTHERS = {"docs", "gpu", "hosts", "museum"}
# Markers that every file under a folder carries.
OF_FOLDERS = {"gpu": "gpu", "rollout/vllm": "vllm"}
FILES = {
    str(path.relative_to(TESTS)): ast.parse(path.read_text()) for path in sorted(TESTS.rglob("test_*.py"))
}


def markers(tree: ast.AST) -> set[str]:
    """The names in every `pytest.mark.name` below a node."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if ast.unparse(node.value) == "pytest.mark"}


def file_markers(tree: ast.Module) -> set[str]:
    """The markers that a file gives to all of its tests."""
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return {
        name for node in assigned if ast.unparse(node.targets[0]) == "pytestmark" for name in markers(node)
    }


def numbers_of_ranks(tree: ast.Module) -> Iterator[str]:
    """The first argument of every call of run_ranks and run_ranks_outcomes, as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("run_ranks", "run_ranks_outcomes"):
            yield ast.unparse(node.args[0])


def test_the_folders_of_tests_are_the_rooms_of_the_source():
    folders = {Path(name).parts[0] for name in FILES if len(Path(name).parts) > 1}
    assert folders == ROOMS | OTHERS


def test_every_folder_of_tests_is_in_a_stage():
    stages = re.findall(r"(?<=\btests/)\w+\b", (TESTS.parent / "Makefile").read_text())
    assert (ROOMS | OTHERS) - {"gpu"} <= set(stages)


@pytest.mark.parametrize(("folder", "marker"), OF_FOLDERS.items())
def test_every_file_of_a_folder_carries_its_marker(folder, marker):
    inside = {name: file_markers(tree) for name, tree in FILES.items() if name.startswith(f"{folder}/")}
    assert inside
    assert [name for name, found in inside.items() if marker not in found] == []


def test_files_with_several_ranks_carry_the_marker():
    several = [name for name, tree in FILES.items() if set(numbers_of_ranks(tree)) - {"1"}]
    assert len(several) > 30
    assert [name for name in several if "distributed" not in markers(FILES[name])] == []
