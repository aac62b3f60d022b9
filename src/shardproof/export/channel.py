"""Connections between trainer ranks and receivers of weights, which share a secret. Nothing is encrypted.

Both sides prove that they know the secret, without sending it. Then every frame is authenticated. A frame is two lengths,
a JSON header, a body of raw bytes, and a code (HMAC-SHA-256) over all of it and the frame's number, under a key of this
connection and direction. Lengths have limits that are checked before memory is taken.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardproof.dist.deadline import Deadline
from shardproof.errors import fail

MAX_HEADER, MAX_BODY = 64 * 2**20, 64 * 2**20
_GREETING = b"shardproof weights 1\n"
_NONCE = 32
_CODE = 32
_LENGTHS = struct.Struct("<IQ")
_YES, _NO = b"\x01", b"\x00"
_MIN_SECRET = 16
_MAX_SECRET = 4096


class Lost(Exception):
    """The other side cannot be reached, hung up, or does not answer in time."""


class Refused(Exception):
    """The other side answered, and does not do what was asked; `tensor` is the one that is wrong."""

    def __init__(self, message: str, tensor: str | None = None):
        super().__init__(message)
        self.tensor = tensor


def read_secret(path: str | os.PathLike[str], stage: str) -> bytes:
    """The key that a secret file stands for. The file must be the user's own and closed to others.

    Raises C001 otherwise.
    """
    fix = "write at least 16 random characters to a file of yours, and `chmod 600` it"
    place = Path(path)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            text = file.read(_MAX_SECRET + 1).strip() if stat.S_ISREG(found.st_mode) else b""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise fail("C001", stage, f"the secret file {place} cannot be read: {reason}.", fix=fix) from error
    problem = None
    if not stat.S_ISREG(found.st_mode):
        problem = "is not a regular file"
    elif found.st_uid != os.geteuid():
        problem = "belongs to another user"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"can be read by others (mode {stat.S_IMODE(found.st_mode):o})"
    elif not _MIN_SECRET <= len(text) <= _MAX_SECRET:
        problem = f"must hold {_MIN_SECRET} to {_MAX_SECRET} characters"
    if problem:
        raise fail("C001", stage, f"the secret file {place} {problem}.", fix=fix)
    return hashlib.pbkdf2_hmac("sha256", text, b"shardproof weights", 100_000)


def parse_address(address: str, stage: str, key: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[ipv6]:port"; raises C001 that names `key`."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        message = f"{key}={address!r} is not host:port."
        raise fail("C001", stage, message, fix="write it as 10.0.0.2:8471 or [fd00::2]:8471")
    return host, int(port)


class Channel:
    """One connection, after both sides have proved the secret. `peer` names the other side in messages."""

    def __init__(self, connection: socket.socket, keys: tuple[bytes, bytes], peer: str):
        self._socket = connection
        self._send_key, self._receive_key = keys
        self._sent = self._received = 0
        self._buffer = bytearray()
        self.peer = peer
        self.bytes_sent = 0

    def send(self, header: dict[str, Any], parts: Sequence[np.ndarray], deadline: Deadline) -> None:
        """Send one frame."""
        text = json.dumps(header, separators=(",", ":")).encode()
        body = [memoryview(part.view(np.uint8).data) for part in parts if part.nbytes]
        lengths = _LENGTHS.pack(len(text), sum(part.nbytes for part in body))
        code = _code(self._send_key, self._sent, lengths, text, *body)
        self._sent += 1
        _send(self._socket, lengths + text, deadline)
        for part in body:
            _send(self._socket, part, deadline)
        _send(self._socket, code, deadline)
        self.bytes_sent += len(lengths + text + code) + sum(part.nbytes for part in body)

    def receive(self, deadline: Deadline) -> tuple[dict[str, Any], np.ndarray]:
        """The next frame: its header, and its body, which is valid until the next one is received.

        Raises `Lost`, and `Refused` for a frame that is not the other side's.
        """
        lengths = _receive(self._socket, _LENGTHS.size, deadline)
        text_size, body_size = _LENGTHS.unpack(lengths)
        if text_size > MAX_HEADER or body_size > MAX_BODY:
            raise Refused(f"{self.peer} announces a frame of {text_size} + {body_size} bytes")
        text = _receive(self._socket, text_size, deadline)
        if len(self._buffer) < body_size:
            self._buffer = bytearray(body_size)
        body = memoryview(self._buffer)[:body_size]
        _receive_into(self._socket, body, deadline)
        code = _receive(self._socket, _CODE, deadline)
        if not hmac.compare_digest(code, _code(self._receive_key, self._received, lengths, text, body)):
            raise Refused(f"a frame from {self.peer} was changed on its way")
        self._received += 1
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{self.peer} sent a header that is not JSON") from error
        if not isinstance(header, dict):
            raise Refused(f"{self.peer} sent a header that is not an object")
        return header, np.frombuffer(body, dtype=np.uint8)

    def has_answer(self) -> bool:
        """Whether the other side has sent something, or hung up."""
        waiting = select.poll()  # `select` knows no descriptors above 1023
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(0))

    def drain(self, deadline: Deadline) -> None:
        """Read what is still on its way until the other side hangs up, so that it can read our last answer."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while not deadline.over:
                self._socket.settimeout(deadline.left)
                if not self._socket.recv(2**16):
                    return
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()


def connect(address: tuple[str, int], key: bytes, deadline: Deadline) -> Channel:
    """A channel to the receiver at an address. Raises `Lost`, and `Refused` if the secrets differ."""
    peer = f"{address[0]}:{address[1]}"
    try:
        connection = socket.create_connection(address, timeout=deadline.left)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise Lost(f"cannot connect: {_reason(error)}") from error
    try:
        mine = secrets.token_bytes(_NONCE)
        _send(connection, _GREETING + mine, deadline)
        if _receive(connection, len(_GREETING), deadline) != _GREETING:
            raise Refused("what listens there is no receiver of weights, or one of another version")
        both = mine + _receive(connection, _NONCE, deadline)
        _send(connection, _prove(key, b"trainer", both), deadline)
        if _receive(connection, 1, deadline) != _YES:
            raise Refused("it has another secret")
        if not hmac.compare_digest(_receive(connection, _CODE, deadline), _prove(key, b"receiver", both)):
            raise Refused("it does not know the secret")
        return Channel(connection, (_prove(key, b"up", both), _prove(key, b"down", both)), peer)
    except BaseException:
        connection.close()
        raise


def accept(connection: socket.socket, key: bytes, deadline: Deadline, peer: str) -> Channel:
    """A channel to whoever connected, if it knows the secret. Raises `Lost` and `Refused`; closes nothing."""
    if _receive(connection, len(_GREETING), deadline) != _GREETING:
        raise Refused("it speaks another protocol")
    theirs = _receive(connection, _NONCE, deadline)
    mine = secrets.token_bytes(_NONCE)
    _send(connection, _GREETING + mine, deadline)
    both = theirs + mine
    if not hmac.compare_digest(_receive(connection, _CODE, deadline), _prove(key, b"trainer", both)):
        _send(connection, _NO, deadline)
        raise Refused("it has another secret")
    _send(connection, _YES + _prove(key, b"receiver", both), deadline)
    return Channel(connection, (_prove(key, b"down", both), _prove(key, b"up", both)), peer)


def _prove(key: bytes, who: bytes, both: bytes) -> bytes:
    return hmac.digest(key, who + b"\0" + both, "sha256")


def _code(key: bytes, number: int, *parts: bytes | memoryview) -> bytes:
    code = hmac.new(key, number.to_bytes(8, "little"), "sha256")
    for part in parts:
        code.update(part)
    return code.digest()


def _send(connection: socket.socket, data: bytes | memoryview, deadline: Deadline) -> None:
    try:
        connection.settimeout(deadline.left)
        connection.sendall(data)
    except OSError as error:
        raise Lost(_reason(error)) from error


def _receive(connection: socket.socket, size: int, deadline: Deadline) -> bytes:
    data = bytearray(size)
    _receive_into(connection, memoryview(data), deadline)
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview, deadline: Deadline) -> None:
    at = 0
    while at < len(view):
        try:
            connection.settimeout(deadline.left)
            got = connection.recv_into(view[at:])
        except OSError as error:
            raise Lost(_reason(error)) from error
        if not got:
            raise Lost("it hung up")
        at += got


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return error.strerror or str(error)
