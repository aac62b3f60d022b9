"""A Ray cluster of three nodes, each with its own raylet, for all tests of this folder. It listens on loopback alone."""

import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = (
    ROOT / ".venv-ray/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
)
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}


@pytest.fixture
def ray_packages(monkeypatch):
    """Commands find Ray, and put what it writes into a folder that is removed. No cluster runs yet."""
    assert PACKAGES.is_dir(), "Ray for the tests is missing: run `make .venv-ray/.stamp`"
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it holds sockets, whose paths are bounded
    (Path(folder) / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "src", PACKAGES))))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.syspath_prepend(PACKAGES)
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(ray_packages, monkeypatch):
    """Three nodes with room for one rank each; RAY_ADDRESS names their cluster."""
    for name, value in ENVIRONMENT.items():  # before Ray is imported, which reads them
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    each = {"num_cpus": 1, "object_store_memory": 2**27}
    made = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(**each)
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made
    finally:
        made.shutdown()
