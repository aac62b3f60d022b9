"""Stores between hosts: where they listen."""

import datetime
import os
import socket

import pytest
import torch.distributed as dist

from shardproof.dist.stores import serve_store
from tests.sockets import listening


def test_a_store_listens_on_one_address():
    before = listening([os.getpid()])
    store = serve_store("127.0.0.2", 0, timeout_s=5)
    assert listening([os.getpid()]) - before == {"127.0.0.2"}
    other = dist.TCPStore("127.0.0.2", store.port, timeout=datetime.timedelta(seconds=5))
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        serve_store("127.0.0.2", store.port, timeout_s=5)
    with pytest.raises(OSError, match="Cannot assign"):
        serve_store("192.0.2.1", 0, timeout_s=5)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=5)
