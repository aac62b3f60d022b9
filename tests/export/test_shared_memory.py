"""`SharedWeights`: each rank writes its own slices once, and another process of the host reads the whole."""

import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.dist.region import NotOurs, RegionAddress, create_region, map_region
from shardproof.export import shared
from shardproof.export.manifest import Manifest
from shardproof.export.shared import SharedAddress, read_shared
from shardproof.rollout.vllm_engine import VllmEngine
from shardproof.rollout.vllm_server import VllmSettings
from tests.export.test_stream import collect, differences, load, lora_config, read_folder, train
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.several_hosts import pretend_hosts

pytestmark = pytest.mark.distributed

CASES = {
    "dense": ("llama", {}),
    "experts": ("qwen3_moe", {}),
    "fused experts, transposed": ("gpt_oss", {}),
    "tied": ("qwen3_tied", {}),
    "buffers": ("deepseek_v3", {}),
    "merged": ("llama", {"lora": lora_config(target_modules="all-linear")}),
    "merged beside experts": ("qwen3_moe", {"lora": lora_config()}),
}
# (ranks, replicas, options of load)
LAYOUTS = {
    "fsdp1 on 3": (3, 1, {"strategy": "fsdp1"}),
    "fsdp2 on 1": (1, 1, {"strategy": "fsdp2"}),
    "fsdp2 on 2x2": (4, 2, {"strategy": "fsdp2"}),
    "offloaded on 2": (2, 1, {"strategy": "fsdp2", "cpu_offload": True}),
}


def read(weights):
    """What lies in the memory, through its address as another process would get it."""
    address = SharedAddress.from_json(json.loads(json.dumps(weights.address.to_json())))
    return {name: tensor.clone() for name, tensor in read_shared(address)}


def write_and_stream(folders, replicas, options):
    """{(case, dtype): (what lies in the memory, what the stream gives, whether their manifests agree, findings)}."""
    found = {}
    for case, (folder, fields) in folders.items():
        policy = load(folder, replicas, **options, **fields)
        for dtype in (None, torch.bfloat16):
            weights = sp.SharedWeights(policy, dtype=dtype)
            receipt = weights.write()
            _, streamed, expected = collect(policy, dtype=dtype)
            agrees = receipt.manifest == expected.manifest
            found[case, dtype] = (read(weights), dict(streamed), agrees, receipt.findings)
            dist.barrier()
            weights.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_what_is_streamed(checkpoint, layout):
    num_ranks, replicas, options = LAYOUTS[layout]
    folders = {case: (checkpoint(family), fields) for case, (family, fields) in CASES.items()}
    for reply in run_ranks(num_ranks, write_and_stream, folders, replicas, options):
        for (case, dtype), (written, streamed, agrees, findings) in reply.items():
            assert differences(written, streamed) == [], case
            assert agrees, case
            assert findings == [], case
            folder, fields = folders[case]
            if dtype is None and not fields:
                assert differences(written, read_folder(folder)) == [], case


# Another process, which is no rank and has no process group.

READER = """
import json, pickle, sys
from shardproof.export.shared import SharedAddress, read_shared
address = SharedAddress.from_json(json.loads(sys.argv[1]))
manifest = pickle.loads(sys.stdin.buffer.read())
tensors = list(read_shared(address))
print(json.dumps({
    "findings": [str(finding) for finding in manifest.compare(tensors)],
    "version": address.version,
    "shared": len({tensor.untyped_storage().data_ptr() for _, tensor in tensors}) == 1,
}))
"""


def read_in_another_process(weights, manifest):
    command = [sys.executable, "-c", READER, json.dumps(weights.address.to_json())]
    done = subprocess.run(command, input=pickle.dumps(manifest), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def write_train_write(folder, fields):
    """What a process besides the ranks says of the memory, before and after a training step."""
    policy = load(folder, **fields)
    weights = sp.SharedWeights(policy, dtype=torch.bfloat16)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    first = weights.write()
    path = weights.path
    train(policy, optimizer)
    second = weights.write()
    said = None
    if dist.get_rank() == 0:
        said = read_in_another_process(weights, second.manifest)
        stale = first.manifest.compare(read_shared(weights.address))
        said |= {"stale": sorted(finding.tensor for finding in stale)}
    expected = collect(policy, dtype=torch.bfloat16)[2].manifest
    dist.barrier()
    return said, first, second, expected == second.manifest, path == weights.path, second.findings


@pytest.mark.parametrize("fields", [{}, {"lora": lora_config()}], ids=["full", "merged"])
def test_another_process_verifies_the_second_write(checkpoint, fields):
    folder = checkpoint("qwen3_moe")
    trained = {
        name
        for name in read_folder(folder)
        if not fields or name.endswith(("q_proj.weight", "v_proj.weight"))
    }
    replies = run_ranks(2, write_train_write, folder, fields)
    said = replies[0][0]
    assert said["findings"] == []
    assert said["version"] == 1
    assert said["shared"]
    assert said["stale"] and set(said["stale"]) <= trained
    for _, first, second, agrees, same_place, findings in replies:
        assert (first.version, second.version) == (0, 1)
        assert first.digest != second.digest
        assert agrees and same_place
        assert findings == []


# The memory's life.


def link_target(path):
    """What a descriptor's path leads to; the number of a closed one may be another file's by now."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return None


def describe_memory(folder, case):
    """(mode, size, whether it has a name, mapped here; after close: whether the path is gone)."""
    weights = sp.SharedWeights(load(folder))
    weights.write()
    path = weights.path
    status = os.stat(path)
    target = os.readlink(path)
    kept = read_shared(weights.address) if case == "kept" else None
    first = next(kept)[1] if kept is not None else None
    dist.barrier()
    weights.close()
    weights.close()
    dist.barrier()
    maps = Path("/proc/self/maps").read_text()
    return {
        "mode": stat.S_IMODE(status.st_mode),
        "size": status.st_size,
        "target": target,
        "gone": link_target(path) != target,
        "mapped": target.split(":")[1].split(" ")[0] in maps,
        "value": None if first is None else first.clone(),
    }


@pytest.mark.parametrize("case", ["closed", "kept"])
def test_the_memory_is_private_and_ends_with_close(checkpoint, case):
    folder = checkpoint("llama")
    needed = sum(tensor.nbytes for tensor in read_folder(folder).values())
    for reply in run_ranks(2, describe_memory, folder, case):
        assert reply["mode"] == 0o600
        assert needed <= reply["size"] < needed + 64 * 30
        assert reply["target"].startswith("/memfd:shardproof-") and reply["target"].endswith("(deleted)")
        assert reply["gone"]
        # A consumer that has mapped it keeps what it has.
        assert reply["mapped"] == (case == "kept")
        if case == "kept":
            assert torch.equal(reply["value"], read_folder(folder)["model.embed_tokens.weight"])


def die_holding(folder, report):
    """Rank 0 ends by kill -9 with the memory open."""
    weights = sp.SharedWeights(load(folder))
    weights.write()
    if dist.get_rank() == 0:
        Path(report).write_text(weights.path)
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while os.path.exists(weights.path) and time.monotonic() < deadline:
        time.sleep(0.02)
    return os.path.exists(weights.path)


def test_the_memory_ends_with_rank_0(checkpoint, tmp_path):
    outcomes = run_ranks_outcomes(2, die_holding, checkpoint("llama"), tmp_path / "path")
    assert outcomes == [("died", -signal.SIGKILL), ("ok", False)]
    assert not os.path.exists((tmp_path / "path").read_text())


# What goes wrong.


def write_broken(folder, how):
    policy = load(folder)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if how == "no memory":
            patch.setattr(shared, "host_memory", lambda: (1000, 1000))
        if how == "nan" and dist.get_rank() == 1:
            next(s for s in policy.local_shards() if s.name == "model.norm.weight").flat[0] = float("nan")
        sp.SharedWeights(policy).write()


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("no memory", "E408", ["1000 are available"]), ("nan", "E402", ["rank 1", "model.norm.weight"])],
)
def test_a_write_that_cannot_be(checkpoint, how, code, words):
    outcomes = run_ranks_outcomes(2, write_broken, checkpoint("llama"), how)
    assert {outcome[:2] for outcome in outcomes} == {("error", "ExportFault")}
    for _, _, message in outcomes:
        assert message.startswith(code)
        assert all(word in message for word in words), message


def test_an_address_survives_json():
    region = RegionAddress("/proc/1/fd/3", "0" * 32, 640)
    address = SharedAddress(region, (("a", "bfloat16", (2, 3), 0), ("b", "int64", (), 64)), 5)
    assert SharedAddress.from_json(json.loads(json.dumps(address.to_json()))) == address


def test_manifests_travel_by_pickle():
    manifest = Manifest(1, (), {})
    assert pickle.loads(pickle.dumps(manifest)) == manifest


# What lies at an address is looked at before it is mapped.


def made_region(**fields):
    """A region of this process with some fields of its address replaced, and its descriptor."""
    descriptor, address = create_region(4096)
    return descriptor, replace(address, **fields)


@pytest.mark.parametrize("how", ["path", "descriptor", "missing", "other token", "size", "pipe"])
def test_nothing_but_the_announced_memory_is_mapped(tmp_path, how):
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep me")
    with open(victim, "rb+") as file:
        own, address = made_region()
        read_end, write_end = os.pipe()
        fields = {
            "path": {"path": str(victim)},
            "descriptor": {"path": f"/proc/{os.getpid()}/fd/{file.fileno()}"},
            "missing": {"path": str(tmp_path / "made" / ".." / "new")},
            "other token": {"token": "0" * 32},
            "size": {"num_bytes": 8192},
            "pipe": {"path": f"/proc/{os.getpid()}/fd/{read_end}"},
        }[how]
        spoiled = SharedAddress(replace(address, **fields), (("a", "uint8", (4096,), 0),), 0)
        for writable in (False, True):
            with pytest.raises(NotOurs):
                map_region(spoiled.region, writable)
        with pytest.raises(sp.ShardproofError, match="E404 read_shared"):
            list(read_shared(spoiled))
        for descriptor in (own, read_end, write_end):
            os.close(descriptor)
    assert victim.read_bytes() == b"keep me"
    assert os.listdir(tmp_path) == ["victim"]


def test_a_consumer_cannot_write_to_the_memory():
    descriptor, address = made_region()
    theirs = map_region(address, writable=True)
    theirs[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    mine = map_region(address)
    assert mine[:3].tolist() == [1, 2, 3]
    mine[0] = 9
    assert theirs[0] == 1
    os.close(descriptor)
    assert theirs[1] == mine[1] == 2  # a mapping outlives the descriptor


def write_from_another_host(folder, victim):
    """Rank 1 is told an address that leads to a file of its own, as the same path does on another host."""
    policy = load(folder)
    file = open(victim, "rb+")  # noqa: SIM115
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            broadcast = shared.broadcast

            def elsewhere(value):
                return {**broadcast(value), "path": f"/proc/{os.getpid()}/fd/{file.fileno()}"}

            patch.setattr(shared, "broadcast", elsewhere)
        sp.SharedWeights(policy).write()


def test_a_rank_of_another_host_is_named_and_writes_nothing(checkpoint, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep me")
    outcomes = run_ranks_outcomes(2, write_from_another_host, checkpoint("llama"), victim)
    assert victim.read_bytes() == b"keep me"
    for kind, name, message in outcomes:
        assert (kind, name) == ("error", "ConfigError")
        assert message.startswith("C002 export: rank 1: it cannot share memory with rank 0")


def serve_from_two_hosts(folder):
    """Rank 1 cannot map what rank 0 has; nobody listens at the url, so only what comes before it is tried."""
    settings = VllmSettings(mode="server", url="http://127.0.0.1:9", start_timeout_s=1.0)
    with pretend_hosts("ab"):
        VllmEngine(load(folder), settings)


def test_vllm_by_shared_memory_is_refused_on_several_hosts_before_it_starts(checkpoint):
    for kind, name, message in run_ranks_outcomes(2, serve_from_two_hosts, checkpoint("llama")):
        assert (kind, name) == ("error", "ConfigError")
        assert message.startswith(
            "C001 rollout: rollout.vllm.transport='shared' needs every rank on rank 0's host"
        )
        assert "rank 1 on host host-b shares no memory with rank 0" in message
