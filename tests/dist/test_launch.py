"""Starting ranks: what they get, who may bring nodes together, and what is left running at the end."""

import datetime
import json
import os
import resource
import socket
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from shardproof.dist.collectives import control_group, exchange
from shardproof.dist.deadline import deadline
from shardproof.dist.launch import raise_file_limit
from shardproof.dist.start import RankFailed, Together, node_range, start_ranks, tell_refusal
from shardproof.errors import ConfigError
from shardproof.findings import CODES
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

SECRET = "0123456789abcdef0123456789abcdef"


def begin(name, *args, **settings):
    command = [sys.executable, "-m", "tests.dist.launching", json.dumps([name, args, settings])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(process, said=""):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and said in errors, errors
    return json.loads(output.splitlines()[-1])


def test_ranks_get_their_arguments_make_groups_and_leave_no_thread_behind(tmp_path):
    text = "$$ and ${local_rank}"  # the agent's templates would change it
    found = results(begin("make_groups", str(tmp_path), text, num_ranks=2))
    assert found == {"0": [[3, 3, 3], text], "1": [[3, 3, 3], text]}
    assert [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)] == [[], []]


def test_hosts_that_share_a_secret_meet():
    endpoint = free_endpoint()
    nodes = [
        begin("echo", "hello", num_ranks=1, nnodes="2", endpoint=endpoint, secret=SECRET, local_addr=address)
        for address in (None, "127.0.0.1")
    ]
    said = "this host accepts connections from other machines"
    found = results(nodes[0], said) | results(nodes[1], said)
    assert found == {"0": ["0", "2", "hello"], "1": ["1", "2", "hello"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "a run on several hosts needs --rdzv-endpoint"),
        ({"endpoint": "node0:29500"}, "a run on several hosts needs --rdzv-id, a secret of at least 16"),
        ({"endpoint": "node0:29500", "secret": "mine"}, "a run on several hosts needs --rdzv-id"),
        (
            {"endpoint": "node0:port", "secret": SECRET},
            "--rdzv-endpoint 'node0:port' is not a host and a port",
        ),
        ({"endpoint": "node0", "secret": SECRET}, "--rdzv-endpoint 'node0' is not a host and a port"),
        (
            {"endpoint": "node0:29500", "secret": SECRET, "local_addr": "192.0.2.77"},
            "--local-addr '192.0.2.77' is not an address of this host",
        ),
        ({"nnodes": "two"}, "--nnodes 'two' is neither"),
        ({"nnodes": "4:2"}, "--nnodes '4:2' is neither"),
        ({"nnodes": "0"}, "--nnodes '0' is neither"),
    ],
)
def test_hosts_that_cannot_meet_are_told_so(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        start_ranks(print, num_ranks=1, together=Together(**{"nnodes": "2", **settings}))
    assert CODES["C001"][1] not in str(caught.value), "it says what to do about this very option"


def free_endpoint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_host_that_finds_nobody_is_told_so(caplog):
    together = Together("2", free_endpoint(), SECRET, timeout_s=0.3)
    with pytest.raises(
        ConfigError, match=r"C002 launch: 1 of 2 hosts were there after 0.3 s: host .*\(127.0.0.1\)"
    ):
        start_ranks(print, num_ranks=1, together=together)


@pytest.mark.parametrize(("text", "code"), [("C007 output: the disk is full", 2), ("It is complete", 0)])
def test_a_host_that_does_not_start_tells_the_one_that_waits_for_it(text, code):
    together = Together("2", free_endpoint(), SECRET)
    telling = threading.Thread(target=tell_refusal, args=(together, text + " " * 100_000, code))
    telling.start()
    with pytest.raises(RankFailed) as caught:
        start_ranks(print, num_ranks=1, together=together)
    telling.join(60)
    assert caught.value.code == code and caught.value.message.strip() == text
    assert caught.value.host == socket.gethostname() and not telling.is_alive()


def test_a_range_of_nodes():
    assert node_range("2") == (2, 2) and node_range("1:4") == (1, 4)


def test_the_limit_of_open_files_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
