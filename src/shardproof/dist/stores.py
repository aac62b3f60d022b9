"""A store that listens on one address: torch's own listens on every interface of the host."""

from __future__ import annotations

import datetime
import socket

import torch.distributed as dist


def serve_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A store that listens on this address of the host and on no other; port 0 takes a free one.

    Raises OSError where the address is not this host's, or where the port is taken.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # an ended run's connections may linger
        listener.bind(where)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return dist.TCPStore(
        str(where[0]),
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),  # the store closes it
    )
