"""The connection between the hosts' agents and the meeting: signed messages, every wait limited.

Nothing is pickled. Both sides prove that they know the run's secret: each connection has a key of its own, made from the
secret and a random number of each side, and every message is signed with it, its direction and its number. A message
that was forged, changed, repeated or left out ends the connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from shardproof.dist.meeting import Meeting

_GREETING = b"shardproof rendezvous 1\n"
_NONCE_BYTES, _MAC_BYTES = 16, 32
_MAX_REQUEST, _MAX_ANSWER = 1 << 16, 1 << 22  # bytes
_MAX_CONNECTIONS = 8192
_MAX_STRANGERS = 128  # connections that have not proved anything yet
_CALL_S = 5.0  # for a connection to be made, and for each answer
_IDLE_S = 60.0  # without a request
_LOOK_S = 0.5
_LEAVE_S = 10.0  # for other hosts to learn how the run ended


class Denied(Exception):
    """The other side does not know this run's secret, or is no rendezvous at all."""


def derive_key(secret: str) -> bytes:
    """The key that messages are signed with; it does not reveal the secret."""
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"shardproof rendezvous", 100_000, 32)


class _Channel:
    """Signed messages over a connection. `_is_server` keeps the two directions apart."""

    def __init__(self, connection: socket.socket, key: bytes, is_server: bool):
        self._connection, self._key, self._is_server = connection, key, is_server
        self._sent = self._received = 0

    @classmethod
    def accept(cls, connection: socket.socket, key: bytes) -> _Channel:
        mine = os.urandom(_NONCE_BYTES)
        connection.sendall(_GREETING + mine)
        theirs = _receive(connection, _NONCE_BYTES, time.monotonic() + _CALL_S)
        return cls(connection, hmac.digest(key, b"session" + mine + theirs, "sha256"), True)

    @classmethod
    def connect(cls, connection: socket.socket, key: bytes) -> _Channel:
        greeting = _receive(connection, len(_GREETING) + _NONCE_BYTES, time.monotonic() + _CALL_S)
        if not greeting.startswith(_GREETING):
            raise Denied("something else than this version's rendezvous listens there")
        mine = os.urandom(_NONCE_BYTES)
        connection.sendall(mine)
        theirs = greeting[len(_GREETING) :]
        return cls(connection, hmac.digest(key, b"session" + theirs + mine, "sha256"), False)

    def send(self, message: Mapping[str, Any]) -> None:
        body = json.dumps(message).encode()
        mac = self._mac(self._is_server, self._sent, body)
        self._sent += 1
        self._connection.settimeout(_CALL_S)
        self._connection.sendall(struct.pack("!I", len(body)) + mac + body)

    def receive(self, limit: int, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        (size,) = struct.unpack("!I", _receive(self._connection, 4, until))
        if size == 0:
            raise Denied("it was started with another --rdzv-id")
        if size > limit:
            raise Denied("a message was too long")
        mac = _receive(self._connection, _MAC_BYTES, until)
        body = _receive(self._connection, size, until)
        if not hmac.compare_digest(mac, self._mac(not self._is_server, self._received, body)):
            raise Denied("it was started with another --rdzv-id")
        self._received += 1
        found = json.loads(body)
        assert isinstance(found, dict)
        return found

    def deny(self) -> None:
        """Say that the other side's first message was not signed with the secret; this is all it learns."""
        with contextlib.suppress(OSError):
            self._connection.sendall(struct.pack("!I", 0))

    def _mac(self, from_server: bool, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, struct.pack("!?Q", from_server, number) + body, "sha256")


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    """Exactly `size` bytes. Raises OSError when the time is over or the connection is."""
    found = b""
    while len(found) < size:
        connection.settimeout(max(until - time.monotonic(), 1e-3))
        part = connection.recv(min(size - len(found), 1 << 16))
        if not part:
            raise ConnectionResetError("the connection was closed")
        found += part
    return found


class Server:
    """Keeps the meeting of one run: listens for its hosts from the start until `close`."""

    def __init__(self, addresses: list[str], port: int, key: bytes, keeps_on: bool = False):
        """`keeps_on`: when a run has ended, the next one may meet here. Raises OSError where the port is taken."""
        self.meeting, self._key, self._keeps_on = Meeting(), key, keeps_on
        self._listeners = [_listen(address, port) for address in addresses]
        self.address, self.port = addresses[0], self._listeners[0].getsockname()[1]  # "": every interface
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._strangers: dict[int, socket.socket] = {}  # connections that have not proved anything yet
        self._lock = threading.Lock()
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="shardproof rendezvous", daemon=True
            ).start()
        threading.Thread(target=self._watch, name="shardproof meeting", daemon=True).start()

    def close(self, patience_s: float = _LEAVE_S) -> None:
        """Stop listening, after the other hosts have learnt how the run ended."""
        until = time.monotonic() + patience_s
        while self.meeting.num_left() and time.monotonic() < until:
            time.sleep(0.05)
        self._closing.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_S):
            self.meeting.look()
            if self._keeps_on and self.meeting.is_over:
                self.meeting = Meeting()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # too many open files, or a connection that was closed before it was accepted
                self._closing.wait(0.1)
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            self._admit_stranger(connection)
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="shardproof host", daemon=True
                ).start()
            except RuntimeError:  # too many threads
                self._strangers.pop(id(connection), None)
                self._slots.release()
                connection.close()

    def _admit_stranger(self, connection: socket.socket) -> None:
        """Let a connection prove itself; where too many do, the oldest has had its time."""
        with self._lock:
            self._strangers[id(connection)] = connection
            if len(self._strangers) > _MAX_STRANGERS:
                oldest = self._strangers.pop(next(iter(self._strangers)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        identity = ""
        try:
            with connection:
                channel, request = self._prove(connection)
                while True:
                    identity = str(request["id"])
                    channel.send(answer(self.meeting, request))
                    if request.get("leaves"):
                        identity = ""
                        return
                    request = channel.receive(_MAX_REQUEST, _IDLE_S)
        except TimeoutError:  # which says nothing about the host: only the meeting counts its silence
            identity = ""
        except Exception:  # a stranger, or a host that is gone
            return
        finally:
            self._slots.release()
            if identity:
                self.meeting.closed(identity)

    def _prove(self, connection: socket.socket) -> tuple[_Channel, dict[str, Any]]:
        """The channel to a host that knows the secret, and its first request. Raises Denied for all others."""
        try:
            _set_up(connection)
            channel = _Channel.accept(connection, self._key)
            try:
                return channel, channel.receive(_MAX_REQUEST, _CALL_S)
            except Denied:
                channel.deny()
                raise
        finally:
            with self._lock:
                self._strangers.pop(id(connection), None)


def answer(meeting: Meeting, request: Mapping[str, Any], is_keeper: bool = False) -> dict[str, Any]:
    """The meeting's answer to an agent."""
    if request.get("leaves"):
        meeting.leave(str(request["id"]))
        return {}
    return meeting.attend(request, is_keeper)


class Line:
    """An agent's connection to the meeting, made again whenever it fails."""

    def __init__(self, host: str, port: int, key: bytes):
        self._host, self._port, self._key = host, port, key
        self._connection: socket.socket | None = None
        self._channel: _Channel | None = None
        self.own_address = ""  # with which this host reaches the endpoint

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The meeting's answer. Raises OSError where it cannot be reached, Denied where it is not this run's."""
        try:
            if self._channel is None:
                # Resolved anew each time: the host of the endpoint may come back with another address.
                self._connection = socket.create_connection((self._host, self._port), _CALL_S)
                _set_up(self._connection)
                self.own_address = self._connection.getsockname()[0]
                self._channel = _Channel.connect(self._connection, self._key)
            request = {**request, "address": request.get("address") or self.own_address}
            self._channel.send(request)
            return self._channel.receive(_MAX_ANSWER, _CALL_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._channel = None


def _listen(address: str, port: int) -> socket.socket:
    if not address:  # every interface
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=512)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=512)


def _set_up(connection: socket.socket) -> None:
    connection.settimeout(_CALL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
