"""The interface between hosts: found from the way to the others, and only where the user chose none."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from shardproof.dist import interface
from shardproof.dist.addresses import loopback_interface
from shardproof.dist.interface import choose_interface, interface_variables

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# As on two Debian hosts a and b: a's own name is loopback to itself.
ROUTES = {"a": {"a": "127.0.0.1", "10.0.0.2": "10.0.0.1"}, "b": {"a": "10.0.0.2"}}
NAMES = {"127.0.0.1": "lo", "10.0.0.1": "eth1", "10.0.0.2": "eth7"}


@pytest.fixture
def unset(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that what a test sets is taken back
        monkeypatch.delenv(variable)
    monkeypatch.setenv("MASTER_ADDR", "a")
    return monkeypatch


@pytest.mark.parametrize("host, found", [("b", "eth7"), ("a", "eth1")])
def test_the_host_of_the_master_looks_towards_the_others(unset, host, found):
    unset.setattr(interface, "address_towards", ROUTES[host].__getitem__)
    unset.setattr(interface, "interface_of", NAMES.__getitem__)
    store = dist.HashStore()
    store.set("shardproof/address/1", "10.0.0.2")  # b's rank was faster
    choose_interface(store, rank="ab".index(host), world_size=2)
    assert [os.environ[variable] for variable in VARIABLES] == [found, f"={found}"]
    assert store.get(f"shardproof/address/{'ab'.index(host)}") == {"a": b"", "b": b"10.0.0.2"}[host]


def test_what_the_user_chose_is_kept(unset):
    loopback = loopback_interface()
    assert interface_variables("127.0.0.1") == dict(zip(VARIABLES, (loopback, f"={loopback}")))
    unset.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert interface_variables("127.0.0.1") == {"NCCL_SOCKET_IFNAME": f"={loopback}"}
    unset.setenv("NCCL_SOCKET_IFNAME", "ib0")
    choose_interface(dist.HashStore(), rank=0, world_size=2)  # asks nobody
    assert [os.environ[variable] for variable in VARIABLES] == ["ib0", "ib0"]
