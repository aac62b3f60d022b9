"""Messages over a stream of bytes: each is its length, then its bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEAD = struct.Struct("!Q")


class NoFrame(Exception):
    """The stream brings what is no message: something else writes to it."""


def framed(message: bytes) -> bytes:
    """The message as it goes over the stream."""
    return _HEAD.pack(len(message)) + message


class Frames:
    """Cuts what a stream brings into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes, limit: int) -> Iterator[bytes]:
        """The messages that are complete with `data`; NoFrame for one that would be longer than `limit` bytes."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            if length > limit:
                raise NoFrame
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            message = bytes(memoryview(self._buffer)[_HEAD.size : end])
            del self._buffer[:end]
            yield message
