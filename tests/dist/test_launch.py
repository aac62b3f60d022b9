"""Starting ranks: what they get, who may bring nodes together, and what is left running at the end."""

import datetime
import json
import os
import pickle
import socket
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from shardproof.dist import agent, stacks
from shardproof.dist.agent import OneNode, SignedBackend, derive
from shardproof.dist.collectives import control_group, exchange
from shardproof.dist.deadline import deadline
from shardproof.dist.launch import node_range, start_ranks
from shardproof.errors import ConfigError
from shardproof.findings import CODES
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

SECRET = "0123456789abcdef0123456789abcdef"


def begin(name, *args, **settings):
    command = [sys.executable, "-m", "tests.dist.launching", json.dumps([name, args, settings])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(process, said=""):
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0 and said in errors, errors
    return json.loads(output.splitlines()[-1])


def test_ranks_get_their_arguments_make_groups_and_leave_no_thread_behind(tmp_path):
    text = "$$ and ${local_rank}"  # the agent's templates would change it
    found = results(begin("make_groups", str(tmp_path), text, num_ranks=2))
    assert found == {"0": [[3, 3, 3], text], "1": [[3, 3, 3], text]}
    assert [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)] == [[], []]


def test_nodes_that_share_a_secret_meet():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    nodes = [
        begin("echo", "hello", num_ranks=1, nnodes="2", rdzv_endpoint=endpoint, rdzv_id=SECRET)
        for _ in range(2)
    ]
    said = "this node accepts connections from other machines"
    found = results(nodes[0], said) | results(nodes[1], said)
    assert found == {"0": ["0", "2", "hello"], "1": ["1", "2", "hello"]}


class Bomb:
    """What a stranger would like to have unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def make_handler(store, secret, sign=True):
    run_id, key = derive(secret)
    params = RendezvousParameters("c10d", "localhost", run_id, min_nodes=1, max_nodes=1, join_timeout="5")
    backend = C10dRendezvousBackend(store, run_id)
    return create_handler(store, SignedBackend(backend, key) if sign else backend, params)


@pytest.mark.parametrize("signed_by", [None, "another secret of some length"])
def test_what_a_stranger_wrote_is_never_unpickled(tmp_path, signed_by):
    store, bomb = dist.HashStore(), pickle.dumps(Bomb(tmp_path / "exploded"))
    stranger = C10dRendezvousBackend(store, derive(SECRET)[0])  # keys can be listed by anyone
    (stranger if signed_by is None else SignedBackend(stranger, derive(signed_by)[1])).set_state(bomb)
    with pytest.raises(RendezvousStateError, match="not signed with this run's --rdzv-id"):
        make_handler(store, SECRET).next_rendezvous()
    assert not (tmp_path / "exploded").exists()


def test_torch_alone_does_unpickle_it(tmp_path):
    """If this fails, torch has mended it, and the signatures may go."""
    store = dist.HashStore()
    C10dRendezvousBackend(store, derive(SECRET)[0]).set_state(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(AttributeError):
        make_handler(store, SECRET, sign=False).next_rendezvous()
    assert (tmp_path / "exploded").exists()


def test_a_signed_state_comes_back():
    store, (run_id, key) = dist.HashStore(), derive(SECRET)
    nodes = [SignedBackend(C10dRendezvousBackend(store, run_id), key) for _ in range(2)]
    assert nodes[0].get_state() is None
    state, token, has_set = nodes[0].set_state(b"first")
    assert (state, has_set) == (b"first", True) and nodes[1].get_state() == (b"first", token)
    assert nodes[1].set_state(b"late")[0::2] == (b"first", False), "somebody was faster"
    assert nodes[1].set_state(b"second", token)[0::2] == (b"second", True)
    assert SECRET not in run_id and SECRET.encode() not in store.get(f"torch.rendezvous.{run_id}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "a run on several nodes needs --rdzv-endpoint"),
        ({"rdzv_endpoint": "node0:29500"}, "a run on several nodes needs --rdzv-id, a secret of at least 16"),
        ({"rdzv_endpoint": "node0:29500", "rdzv_id": "mine"}, "a run on several nodes needs --rdzv-id"),
        ({"rdzv_endpoint": "node0:port", "rdzv_id": SECRET}, "--rdzv-endpoint 'node0:port': The port number"),
        ({"nnodes": "two"}, "--nnodes 'two' is neither"),
        ({"nnodes": "4:2"}, "--nnodes '4:2' is neither"),
        ({"nnodes": "0"}, "--nnodes '0' is neither"),
    ],
)
def test_nodes_that_cannot_meet_are_told_so(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        start_ranks(print, num_ranks=1, **{"nnodes": "2", **settings})
    assert CODES["C001"][1] not in str(caught.value), "it says what to do about this very option"


class Alone(OneNode):
    """A node that cannot reach the others."""

    def next_rendezvous(self):
        raise RendezvousConnectionError("The connection to the C10d store has failed.")


def test_nodes_that_do_not_meet_are_told_so(monkeypatch):
    monkeypatch.setattr(agent, "several_nodes", lambda *_: Alone("a run"))
    with pytest.raises(
        ConfigError, match=r"C002 launch: the nodes could not connect: The connection to .* failed"
    ):
        start_ranks(print, num_ranks=1, nnodes="2", rdzv_endpoint="node0:29500", rdzv_id=SECRET)


def test_a_range_of_nodes():
    assert node_range("2") == (2, 2) and node_range("1:4") == (1, 4)


def watch_a_store_that_is_gone():
    """Start the thread that answers requests for stacks where no new connection to the store can be made."""
    asked = threading.Event()
    released = threading.Event()

    class Gone:
        def clone(self):
            asked.set()
            assert released.wait(20), "nobody went on"

    stacks.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks, "_get_default_store", Gone)
        stacks.start()
        assert asked.wait(20)
        watch = stacks.current()
        places = watch.report(RuntimeError("connection closed by peer"))
        released.set()
        stacks.stop()
    return list(places), watch.is_alive()


def test_a_store_that_is_gone_stops_no_rank():
    assert run_ranks(2, watch_a_store_that_is_gone) == [([0], False), ([1], False)]


def timeouts_beside_a_group_without_cpu(folder):
    """The control group's timeout outside, inside and after a deadline, beside a group that moves no CPU tensors."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(
        "cuda:gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=77)
    )
    group = control_group()
    assert group is not dist.group.WORLD and group is control_group()

    def timeout():
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    found = [timeout()]
    with deadline("test", seconds=5.0):
        found.append(timeout())
        assert exchange(rank) == [0, 1]
    return [*found, timeout()]


def test_a_deadline_holds_for_the_control_group_beside_one_for_gpus(tmp_path):
    (before, inside, after), other = run_ranks(
        2, timeouts_beside_a_group_without_cpu, tmp_path, init_group=False
    )
    assert inside == 5.0 and before == after and other == [before, inside, after]
