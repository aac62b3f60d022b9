"""Which versions of vLLM are served, with which flags; and what a started server lets nobody but this host reach."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardproof.errors import ShardproofError
from shardproof.rollout import vllm_server, vllm_versions
from shardproof.rollout.draft import Draft
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_server import Served, VllmServer, VllmSettings, arguments, environment
from shardproof.rollout.vllm_versions import check_sender, installed_version, interface_of
from tests.sockets import listening, session_of

pytestmark = pytest.mark.vllm

SERVED = Served(Path("model"), "float32", "cpu")
# version: (the flag for token ids, completions that say their weights' version, a sender for NCCL, where IPC is told
# that tensors share a buffer), read in its source
VERSIONS = {
    "0.26.0": (False, False, False, False),
    "0.27.1": (False, False, False, True),
    "0.28.0": (False, False, False, True),
    "0.29.0": (False, False, True, True),
    "0.30.0": (True, False, True, True),
    "0.31.0": (True, False, True, True),
    "0.32.0": (True, True, True, True),
    "0.32.1.dev3+cpu": (True, True, True, True),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_gets_the_flags_that_it_has(version):
    found = interface_of(version)
    said = (found.scale_out_flag, found.weight_versions, found.nccl_sender, found.ipc_packed_at_init)
    assert said == VERSIONS[version]
    given = arguments(VllmSettings(), SERVED, found)
    assert ("--enable-scale-out" in given) == found.scale_out_flag
    assert given[given.index("--generation-config") + 1] == "vllm"


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "1.0.0", "of unknown version", "0.9\x1b[31m"])
def test_another_version_is_refused_by_name(version):
    with pytest.raises(ShardproofError) as caught:
        interface_of(version)
    message = str(caught.value)
    assert message.startswith(f"R506 rollout: vLLM {version[:3]}")
    assert "versions 0.26 to 0.32 are" in message and "vllm>=0.26,<0.33" in message
    assert "\x1b" not in message


def test_an_unsupported_version_is_not_started(monkeypatch):
    monkeypatch.setattr(vllm_server, "installed_version", lambda: "0.25.1")
    server = VllmServer(VllmSettings(), SERVED)
    with pytest.raises(ShardproofError, match=r"R506 rollout: vLLM 0\.25\.1 is not supported"):
        server.ensure_up()
    assert server.num_starts == 0
    monkeypatch.setattr(vllm_versions, "installed_version", lambda: "0.26.0")
    with pytest.raises(ShardproofError, match=r"transport='nccl' needs vLLM 0\.29 or later"):
        check_sender("nccl")
    check_sender("ipc")  # whose sender is our own


def test_the_version_is_read_without_importing_vllm(monkeypatch):
    assert installed_version() == "0.32.0"

    def unknown(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", unknown)  # unpacked into a folder, without metadata
    assert installed_version() == "0.32.0"
    code = "import sys; from shardproof.rollout.vllm_versions import installed_version as v; v(); print('vllm' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


UNINSTALLED = """
import importlib.metadata
importlib.metadata.entry_points = lambda **which: []
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
before = "shardproof" in factory._registry
from vllm.utils.import_utils import resolve_obj_by_qualname
from shardproof.rollout.vllm_plugin import EXTENSION
resolve_obj_by_qualname(EXTENSION)
print(before, factory._registry["shardproof"]().__name__)
"""


def test_a_package_without_entry_points_is_found_through_the_workers_extension():
    said = subprocess.run([sys.executable, "-c", UNINSTALLED], capture_output=True, text=True, timeout=120)
    assert said.stdout.split()[-2:] == ["False", "SharedMemoryTransport"], said.stderr[-2000:]


def test_all_stop_ids_are_sent_and_no_others_apply():
    draft = Draft(Request(Trajectory.of_prompt((1, 2)), 5), Sampling(4, stop_ids=(7, 9, 106)))
    params = draft.body(0, None)["sampling_params"]
    assert params["stop_token_ids"] == [7, 9, 106]
    assert params["ignore_eos"] is True


# What a server opens.


def test_a_started_server_gets_loopback_whatever_the_trainer_uses(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    found = environment(VllmSettings(), SERVED)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert found["VLLM_HOST_IP"] == "127.0.0.1"
    assert environment(VllmSettings(transport="nccl"), SERVED)["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_server_listens_on_loopback_alone(shared_server):
    assert listening(session_of(shared_server.process.pid)) == {"127.0.0.1"}


STORE = """
import json, socket, psutil, torch.distributed as dist
from shardproof.rollout.vllm_plugin import listen_on_loopback
listen_on_loopback()
listen_on_loopback()
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
for _ in range(2):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    rows = psutil.Process().net_connections(kind="inet")
    print(json.dumps([r.laddr.ip for r in rows if r.status == "LISTEN" and r.laddr.port == port]))
    dist.destroy_process_group()
"""


def test_a_store_of_torch_listens_on_loopback_alone():
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    said = subprocess.run([sys.executable, "-c", STORE], capture_output=True, text=True, env=env, timeout=120)
    lines = said.stdout.splitlines()
    assert [json.loads(line) for line in lines] == [["127.0.0.1"]] * 2, said.stderr[-2000:]


# What ends with its trainer.

SERVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it hangs
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""
TRAINER = """
import os, subprocess, sys, time
child = "import sys; from shardproof.rollout import vllm_child as c; c._GRACE_S = 1.0; sys.exit(c.watch(int(sys.argv[1]), sys.argv[2:]))"
command = [sys.executable, "-c", child, str(os.getpid()), sys.executable, "-c", sys.argv[1]]
watcher = subprocess.Popen(command, start_new_session=True)
print(watcher.pid, flush=True)
watcher.wait()
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "asked"])
def test_a_server_that_hangs_ends_with_its_trainer_and_so_do_its_children(how):
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, SERVER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    numbers = [int(number) for _ in range(2) for number in trainer.stdout.readline().split()]
    processes = [psutil.Process(number) for number in numbers]
    assert len(processes) == 3
    watcher = next(p for p in processes if p.ppid() == trainer.pid)
    trainer.send_signal(signal.SIGKILL) if how == "killed" else watcher.terminate()
    _, alive = psutil.wait_procs(processes, timeout=30)
    for process in alive:
        process.kill()
    trainer.kill()
    trainer.wait()
    assert not alive


ENDS = "import sys; sys.exit(7)"


def test_the_servers_exit_code_is_passed_on():
    command = [sys.executable, "-m", "shardproof.rollout.vllm_child", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "the trainer exited before its vLLM server started" in done.stderr
    code = f"from shardproof.rollout.vllm_child import watch; import os, sys; sys.exit(watch(os.getppid(), [sys.executable, '-c', {ENDS!r}]))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7
