"""`shardproof doctor` on two hosts, started as torchrun starts its ranks."""

from __future__ import annotations

import json

import pytest

from tests.hosts.cluster import DISK, PORT, Cluster
from tests.hosts.preloaded import ROOT

pytestmark = [pytest.mark.distributed]

_CONFIG = ROOT / "recipes" / "tiny" / "model" / "config.json"
_LIMIT_S = 300  # for what takes seconds: nothing here is about time


def test_random_weights_on_hosts_that_share_nothing(two_hosts: Cluster) -> None:
    """Rank 0 writes them to its own disk. A host's own name means 127.0.1.1 to itself here, as everywhere on Debian."""
    command = ("shardproof", "doctor", f"--config={_CONFIG}", "--dtypes=fp32", "--seq-len=32")
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    programs = [
        host.start(
            *command,
            f"--json={DISK}/report.json",
            env={**common, "RANK": str(rank), "MASTER_ADDR": "a", "MASTER_PORT": str(PORT)},
        )
        for rank, host in enumerate(two_hosts.hosts)
    ]
    assert [program.wait(_LIMIT_S) for program in programs] == [0, 0]
    report = json.loads((two_hosts["a"].folder / "report.json").read_text())
    assert report["facts"]["ranks"] == "2 on host a (rank 0) and host b (rank 1)"
    assert "0 findings" in programs[0].output() and "findings" not in programs[1].output()
