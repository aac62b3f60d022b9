"""What unit tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Writes a module of a user's that can be imported for one test, and tells the folder it is in."""
    names: list[str] = []

    def write(name: str, text: str) -> Path:
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return tmp_path

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in names:
        sys.modules.pop(name, None)
