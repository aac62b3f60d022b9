"""Session-wide settings: no network, one thread a process, and no rank process left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.ranks import RANK_ENV, close_pool

# At import, before any test module imports torch or transformers, which read these once.
for _name, _value in RANK_ENV.items():
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="session", autouse=True)
def rank_pool() -> Iterator[None]:
    yield
    close_pool()
