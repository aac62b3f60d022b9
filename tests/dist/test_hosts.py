"""Which rank is on which host: proved by memory, not by names; two small exchanges."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from shardproof.dist import hosts as module
from shardproof.dist.addresses import address_towards, is_loopback
from shardproof.dist.collectives import traffic
from shardproof.dist.hosts import Hosts, hosts, known_hosts
from shardproof.dist.launch import init_distributed
from tests.ranks import run_ranks
from tests.several_hosts import pretend_hosts

FOUR = Hosts(("a", "b", "c"), (0, 0, 1, 1, 1, 2), 3)


def test_hosts_know_ranks_leaders_and_how_to_name_them():
    assert (FOUR.num, FOUR.mine, FOUR.name, FOUR.is_leader) == (3, 1, "b", False)
    assert FOUR.ranks_of(1) == (2, 3, 4) and FOUR.leader_of(1) == 2
    assert FOUR.describe([2]) == "rank 2 on host b"
    assert FOUR.describe([5, 3, 2]) == "ranks 2, 3 on host b and rank 5 on host c"
    assert FOUR.describe([]) == "no rank"
    assert FOUR.place([2, 3]) == "host b (ranks 2, 3)"
    assert FOUR.place([0, 5]) == "host a (rank 0) and host c (rank 5)"
    assert FOUR.describe(range(6)) == "ranks 0, 1 on host a, ranks 2, 3, 4 on host b and rank 5 on host c"


def test_one_host_is_not_named_and_long_lists_are_cut():
    one = Hosts(("a",), (0,) * 12)
    assert one.describe([2]) == one.place([2]) == "rank 2"
    assert one.describe(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
    many = Hosts(tuple("abcdefg"), tuple(range(7)))
    said = many.describe(range(7))
    assert said == "rank 0 on host a, rank 1 on host b, rank 2 on host c and 4 more hosts"


def _two_hosts(letters: str, same_name: bool) -> tuple:
    with pretend_hosts(letters, same_name):
        assert known_hosts() is None
        messages = traffic.messages
        init_distributed()
        found = known_hosts()
        assert found is hosts()
        used = traffic.messages - messages
    return found.names, found.of_rank, found.mine, found.is_leader, found.describe([3]), used


@pytest.mark.distributed
@pytest.mark.parametrize("same_name", [False, True])
def test_hosts_are_told_apart_by_memory_whatever_they_are_called(same_name):
    rows = run_ranks(4, _two_hosts, "abab", same_name)
    names = ("node (number 0)", "node (number 1)") if same_name else ("host-a", "host-b")
    assert [row[:4] for row in rows] == [(names, (0, 1, 0, 1), rank % 2, rank < 2) for rank in range(4)]
    assert rows[0][4] == f"rank 3 on host {names[1]}"
    assert {row[5] for row in rows} == {2}


def _one_host(name_by_rank: bool) -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        if name_by_rank:
            patch.setattr(socket, "gethostname", lambda: f"pod-{dist.get_rank()}")
        return hosts().names, hosts().of_rank, hosts().describe([dist.get_world_size() - 1])


@pytest.mark.distributed
def test_ranks_that_share_memory_are_on_one_host_also_with_different_hostnames():
    assert run_ranks(2, _one_host, True) == [(("pod-0",), (0, 0), "rank 1")] * 2


def _without_memory() -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(module.os, "memfd_create")
        return hosts().of_rank


@pytest.mark.distributed
def test_without_such_memory_the_launcher_says_whether_ranks_are_in_one_place():
    assert run_ranks(2, _without_memory) == [(0, 0)] * 2


def test_a_process_of_its_own_is_host_0_and_nothing_is_known_before():
    assert known_hosts() is None
    assert run_ranks(1, _one_host, False) == [((socket.gethostname(),), (0,), "rank 0")]


def test_the_way_to_this_host_is_loopback_and_failing_lookups_are_no_error():
    for other in ("", "127.0.0.1", "::1", "no such name.invalid"):
        assert is_loopback(address_towards(other))


def test_hosts_of_one_name_are_told_apart_by_address_where_they_have_one():
    rows = [{"name": "node", "address": address} for address in ("10.0.0.1", "10.0.0.2", "")]
    assert module._number(0, rows, [0, 1, 2]).names == (
        "node (10.0.0.1)",
        "node (10.0.0.2)",
        "node (number 2)",
    )
