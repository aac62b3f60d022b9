"""What a save of a model clears away of ended ones: its own folder's leftovers, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.weights.model_folder import ModelFolder


@pytest.mark.parametrize("name", ["model", "model[1]", "*"])
def test_a_save_clears_its_own_leftovers_alone(tmp_path: Path, name: str) -> None:
    mine = [f".partial-{name}-0123abcd", f".removed-partial-{name}-0123abcd-4567cdef"]
    others = [
        f".partial-{name}-2-0123abcd",
        ".partial-models-0123abcd",
        f".removed-partial-{name}-2-0123abcd-4567cdef",
    ]
    for each in (*mine, *others):
        (tmp_path / each).mkdir()
    place = ModelFolder(tmp_path / name, False, "89abcdef")
    place.begin()
    place.abort()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
