"""A run whose ranks are on two hosts, with a real server on a third: the commands of docs/exporting.md and docs/vllm.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster, tiny_run
from tests.rl.runs import trajectory

_LIMIT_S = 900  # nothing here is about time
_SERVER = """-m vllm.entrypoints.openai.api_server --model {model} --host {address} --port 8000 --dtype float32
    --enable-scale-out --weight-transfer-config {{"backend":"shardproof"}} --logprobs-mode processed_logprobs
    --worker-extension-cls shardproof.rollout.vllm_transport.WorkerExtension --load-format dummy --enforce-eager
    --max-model-len 64"""
_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def three_hosts() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


def test_ranks_on_two_hosts_and_the_engine_on_a_third(three_hosts: Cluster) -> None:
    assert three_hosts.shared is not None
    engine = three_hosts["c"]
    recipe, secret = tiny_run(three_hosts.shared, deadline_s=_LIMIT_S), Path(three_hosts.shared, "secret")
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    model = three_hosts.shared / "model"
    server = engine.start(
        sys.executable, *_SERVER.format(model=model, address=engine.address).split(), env=_ENV
    )
    listen = f"{engine.address}:8471"
    receiver = engine.start("shardproof", "receive", "--listen", listen, "--secret-file", str(secret))
    receiver.wait_for("receiving weights on", _LIMIT_S)
    server.wait_for("Application startup complete", _LIMIT_S)
    words = {
        "rollout.engine": "vllm",
        "rollout.vllm.mode": "server",
        "rollout.vllm.url": f"http://{engine.address}:8000",
        "rollout.vllm.allow_remote": "true",
        "rollout.vllm.transport": "network",
        "rollout.vllm.receivers": f'["{listen}"]',
        "rollout.vllm.secret_file": str(secret),
    }
    ranks = three_hosts.train(
        recipe, *(f"{key}={value}" for key, value in words.items()), hosts=three_hosts.hosts[:2]
    )
    codes = {str(program.host): program.wait(_LIMIT_S) for program in ranks}
    said = "\n".join(f"{program.host}\n{program.output()}" for program in ranks)
    assert set(codes.values()) == {0}, f"exit codes {codes}\n{said}"
    found = trajectory(three_hosts.shared / "run")
    assert [step["version"] for step in found] == [1.0, 2.0]
    assert all(step["canary/gap"] < 1e-4 and step["mismatch/max"] < 1e-4 for step in found)
    assert all(f"version {version} is committed" in receiver.output() for version in range(3))
