"""What tests of exports share."""

from __future__ import annotations

import functools

import pytest

from tests.models import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function from a family, and what `make_checkpoint` takes, to the folder; each is made once."""

    @functools.cache
    def make(family, **fields):
        return make_checkpoint(tmp_path_factory.mktemp(family), family, **fields)

    return make
