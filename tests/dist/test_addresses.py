"""Which address others reach a host at, and where the host of the endpoint listens."""

from __future__ import annotations

import socket

import pytest

from shardproof.dist import addresses

OTHER = "192.0.2.7"  # of nobody: reserved for documentation


@pytest.fixture
def names(monkeypatch):
    """What names mean on this host."""
    known = {}

    def resolve(host):
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return known[host]

    monkeypatch.setattr(addresses, "resolve", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    monkeypatch.setattr(
        addresses, "is_own", lambda address: address in ("127.0.1.1", "127.0.0.1", "10.0.0.1")
    )
    return known


def test_the_endpoint_is_served_on_its_own_address_alone(names):
    names["node0"] = ["10.0.0.1"]
    assert addresses.listening_addresses("node0") == ["10.0.0.1"]
    names["10.0.0.1"] = ["10.0.0.1"]
    assert addresses.listening_addresses("10.0.0.1") == ["10.0.0.1"]


def test_a_name_that_is_loopback_to_its_own_host_is_served_on_every_interface(names):
    names["node0"] = ["127.0.1.1"]
    assert addresses.listening_addresses("node0") == [""]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_loopback_that_was_asked_for_stays_one(names, host):
    names[host] = ["127.0.0.1"]
    assert addresses.listening_addresses(host) == ["127.0.0.1"]


def test_other_hosts_do_not_serve(names):
    names["node1"] = [OTHER]
    assert addresses.listening_addresses("node1") is None
    assert addresses.listening_addresses("node2") is None, "a name that nobody knows yet is not ours"
    assert addresses.listening_addresses("node0.cluster") == [""], (
        "but our own is, before the cluster knows it"
    )


def test_own_addresses_and_interfaces():
    assert addresses.is_own("127.0.0.1") and not addresses.is_own(OTHER)
    assert (
        addresses.is_loopback("127.0.1.1")
        and addresses.is_loopback("::1")
        and not addresses.is_loopback(OTHER)
    )
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"
    assert addresses.interface_of("127.0.0.1") == addresses.loopback_interface()
    assert addresses.interface_of(OTHER) == ""


@pytest.mark.parametrize("name", ["a..b", "x" * 70 + ".y", "no-such-host.invalid"])
def test_names_that_cannot_be_are_errors_of_the_system(name):
    with pytest.raises(OSError):
        addresses.resolve(name)
