"""Session-wide settings: no network, one thread per process, and no rank process left behind."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import RANK_ENV, allow_several_ranks, close_pool

# At import, before any test module imports torch or transformers, which read these once.
for _name, _value in RANK_ENV.items():
    os.environ.setdefault(_name, _value)

# trackio reads its folder when it is imported, which TRL does, too; without this one, runs of earlier sessions are in it.
_TRACKIO_RUNS = tempfile.TemporaryDirectory(prefix="trackio-")
os.environ["TRACKIO_DIR"] = _TRACKIO_RUNS.name


def pytest_unconfigure() -> None:
    _TRACKIO_RUNS.cleanup()


@pytest.fixture(scope="session", autouse=True)
def rank_pool() -> Iterator[None]:
    yield
    close_pool()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # Around the whole protocol, so that fixtures of any scope are counted to the first test that asks for them.
    allow_several_ranks(item.get_closest_marker("distributed") is not None)
    return (yield)


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


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a process or a thread behind."""
    import psutil  # not on every machine that runs some of the tests

    processes, threads = set(psutil.Process().children(recursive=True)), set(threading.enumerate())
    yield
    assert set(psutil.Process().children(recursive=True)) <= processes
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """A file with a secret that trainers and receivers of weights share."""
    path = tmp_path / "secret"
    path.write_text("correct horse battery staple")
    path.chmod(0o600)
    return str(path)
