"""`NetworkWeights`: each rank sends its slices once to each receiver, whole or as differences, in two phases."""

import functools
import threading

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.export.channel import read_secret
from shardproof.export.network import NetworkWeights
from shardproof.export.receiver import Receiver
from shardproof.export.shared import SharedAddress, read_shared
from tests.export.test_shared_memory import CASES
from tests.export.test_stream import differences, load, make_interleaved, register_interleaved, train
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

# (ranks, replicas, options of load)
LAYOUTS = {
    "fsdp1 on 3": (3, 1, {"strategy": "fsdp1"}),
    "fsdp2 on 1": (1, 1, {"strategy": "fsdp2"}),
    "fsdp2 on 2x2": (4, 2, {"strategy": "fsdp2"}),
    "offloaded on 2": (2, 1, {"strategy": "fsdp2", "cpu_offload": True}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(family):
        return make_checkpoint(tmp_path_factory.mktemp(family), family)

    return make


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("correct horse battery staple")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def start_receiver(secret):
    """A function that starts a receiver in this process and returns its name, host:port."""
    running = []

    def start(port=0):
        receiver = Receiver("127.0.0.1", port, read_secret(secret, "test"))
        thread = threading.Thread(target=receiver.serve)
        thread.start()
        running.append((receiver, thread))
        return "{}:{}".format(*receiver.address)

    yield start
    for receiver, thread in running:
        receiver.close()
        thread.join()


def read(update):
    """What engines of the receiver's host see."""
    return {name: tensor.clone() for name, tensor in read_shared(SharedAddress.from_json(update["address"]))}


def send_three_times(folders, replicas, options, receiver, secret):
    """{case: [(tensors that differ from shared memory, same manifest, lost, share of bytes sent), ...]} per write."""
    found = {}
    for case, (folder, fields) in folders.items():
        if case == "whole":
            register_interleaved()
        policy = load(folder, replicas, **options, **fields)
        optimizer = sp.make_optimizer(policy, lr=1e-4)
        shared = sp.SharedWeights(policy, dtype=torch.bfloat16)
        network = NetworkWeights(policy, [receiver], secret, dtype=torch.bfloat16)
        rows = found[case] = []
        for step in range(3):
            expected, sent = shared.write(), network.write()
            mine = dict(read_shared(shared.address))
            odd = differences(read(sent.updates[receiver]), mine) if sent.updates else sorted(mine)
            same = sent.receipt.manifest == expected.manifest
            lost = [str(finding) for finding in sent.lost.values()]
            rows.append((odd, same, lost, sent.wire_bytes.get(receiver, 0) / expected.num_bytes))
            lost = network.commit([receiver])
            assert not lost, lost
            if step == 0:
                train(policy, optimizer)
        dist.barrier()
        network.close()
        shared.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_received_is_what_shared_memory_has(checkpoint, start_receiver, secret, layout, tmp_path):
    num_ranks, replicas, options = LAYOUTS[layout]
    folders = {case: (checkpoint(family), fields) for case, (family, fields) in CASES.items()}
    make_interleaved(tmp_path / "whole", torch.float32)
    folders["whole"] = (tmp_path / "whole", {})
    replies = run_ranks(num_ranks, send_three_times, folders, replicas, options, start_receiver(), secret)
    for reply in replies:
        for case, rows in reply.items():
            assert [row[:3] for row in rows] == [([], True, [])] * 3, case
    for case, rows in replies[0].items():
        everything, some, nothing = (row[3] for row in rows)
        assert everything > 1 > some > nothing, (case, rows)
