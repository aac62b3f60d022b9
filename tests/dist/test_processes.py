"""The processes of a host's ranks."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from shardproof.dist.processes import RankProcesses


def test_ranks_that_cannot_all_be_started_leave_none_behind():
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyError, match="RANK"):
        RankProcesses(time.sleep, (600,), [{"RANK": "0"}, {}])
    assert set(multiprocessing.active_children()) == before
