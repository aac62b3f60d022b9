"""`Receiver`: listens on an engine host, takes weights from trainer ranks, and shows them to engines of its host."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Any

import numpy as np

from shardproof.dist.deadline import Deadline
from shardproof.export.channel import Channel, Lost, Refused, accept
from shardproof.export.received import Inbox, Pending

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_MOST_STRANGERS = 64  # connections that have not proved the secret yet; the oldest gives way
_MAX_SESSION_S = 24 * 3600.0
_DRAIN_S = 5.0
_BACKLOG = 256
_RETRY_S = 0.1
# A trainer's host that vanished is noticed after a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Receiver:
    """A listening socket and the payloads that arrive at it. Port 0 takes a free one; `address` says which."""

    def __init__(self, host: str, port: int, key: bytes):
        self._key = key
        self._inbox = Inbox()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def serve(self) -> None:
        """Answer connections until `close` is called from another thread or a signal handler."""
        while not self._closed:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closed:  # too many open files, for instance: it may get better
                    logger.warning("a connection was not accepted: %s", error)
                    time.sleep(_RETRY_S)
                continue
            name = f"{peer[0]}:{peer[1]}"
            self._welcome(connection)
            thread = threading.Thread(target=self._answer, args=(connection, name), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads can be had: it may get better
                logger.warning("the connection from %s was not answered: %s", name, error)
                self._hang_up(connection)
                continue
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def close(self) -> None:
        """Stop listening, hang up, and free the memory."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_DRAIN_S)
        self._inbox.close()

    def _welcome(self, connection: socket.socket) -> None:
        """Count a connection in; where too many have not proved the secret, the oldest of them is closed."""
        with contextlib.suppress(OSError):  # it has hung up already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._lock:
            self._strangers[connection] = None
            self._open.add(connection)
            oldest = next(iter(self._strangers)) if len(self._strangers) > _MOST_STRANGERS else None
            if oldest is not None:
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def _answer(self, connection: socket.socket, peer: str) -> None:
        try:
            channel = accept(connection, self._key, Deadline(_HANDSHAKE_S), peer)
            with self._lock:
                self._strangers.pop(connection, None)
            self._talk(channel)
        except Refused as error:
            logger.info("connection from %s: %s", peer, error)
        except Lost as error:
            logger.debug("connection from %s: %s", peer, error)
        except Exception:
            if not self._closed:
                logger.exception("connection from %s", peer)
        finally:
            self._hang_up(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._open.discard(connection)
        connection.close()

    def _talk(self, channel: Channel) -> None:
        """Do what a trainer asks; what is refused ends the connection with the reason."""
        header, body = channel.receive(Deadline(_HANDSHAKE_S))
        limit = Deadline(min(_number(header, "seconds"), _MAX_SESSION_S))
        try:
            if header.get("ask") == "begin":
                self._hold_session(channel, header, limit)
            elif header.get("ask") == "slices":
                self._take_slices(channel, header, body, limit)
            else:
                raise Refused(f"unknown request {str(header.get('ask'))[:40]!r}")
        except Refused as error:
            logger.warning("connection from %s: %s", channel.peer, error)
            with contextlib.suppress(Lost):
                channel.send({"refused": str(error), "tensor": error.tensor}, (), Deadline(_DRAIN_S))
                channel.drain(Deadline(_DRAIN_S))

    def _hold_session(self, channel: Channel, header: dict[str, Any], limit: Deadline) -> None:
        """Rank 0's connection lasts from the announcement of a payload to its commit; without it, it is given up."""
        run, version = str(header.get("run"))[:100], int(_number(header, "version"))
        rows = header.get("tensors")
        pending = self._inbox.begin(
            run, version, rows if isinstance(rows, list) else [], header.get("size", 0)
        )
        base = pending.base
        try:
            answer = {"ticket": pending.ticket, "base": base.to_json() if base is not None else None}
            channel.send(answer, (), limit)
            while self._go_on(channel, pending, limit):
                pass
        finally:
            if self._inbox.abandon(pending.ticket):
                logger.warning("run %s: version %d was given up", run, version)

    def _go_on(self, channel: Channel, pending: Pending, limit: Deadline) -> bool:
        """Do rank 0's next request; False once the payload is committed."""
        header, _ = channel.receive(limit)
        if header.get("ask") == "verify":
            receipt = self._inbox.verify(pending.ticket, header.get("digests") or [])
            channel.send(receipt, (), limit)
            taken = sum(receipt["seconds"].values())
            logger.info(
                "run %s: version %d has arrived and is proved: %.1f MiB received in %.2f s",
                *(pending.run, pending.version, receipt["wire_bytes"] / 2**20, taken),
            )
            return True
        if header.get("ask") == "commit":
            receipt = self._inbox.commit(pending.ticket, int(_number(header, "version")))
            logger.info("run %s: version %d is committed", pending.run, pending.version)
            channel.send(receipt, (), limit)
            return False
        raise Refused(f"unknown request {str(header.get('ask'))[:40]!r}")

    def _take_slices(
        self, channel: Channel, header: dict[str, Any], body: np.ndarray, limit: Deadline
    ) -> None:
        """Take one rank's slices, block by block, until it says that they were all."""
        ticket, rank = str(header.get("ticket")), int(_number(header, "rank"))
        if body.nbytes % 16:
            raise Refused(f"rank {rank}: its slices have no ends")
        spans = body.view(np.int64).reshape(-1, 2).copy()
        self._inbox.open_slices(ticket, rank, spans, header.get("base"))
        while True:
            header, body = channel.receive(limit)
            if header.get("ask") == "end":
                channel.send({"rank": rank}, (), limit)
                return
            self._inbox.put(ticket, rank, int(_number(header, "at")), header, body)


def _number(header: dict[str, Any], key: str) -> float:
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**62:
        raise Refused(f"{key}={str(value)[:40]} is not a number")
    return value
