"""A trainer rank's side of a transfer: its slices as blocks, and the requests that it makes of one receiver."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np

from shardproof.dist.deadline import Deadline
from shardproof.export.channel import Channel, Lost, Refused, connect
from shardproof.export.differences import Encoded, encode
from shardproof.export.packing import Packing, block_starts

_LAST_WORD_S = 2.0
_STALL_S = 30.0  # a receiver that takes nothing for so long is lost


class Blocks:
    """A rank's packed slices, block by block, each encoded once for all receivers that have the same base."""

    def __init__(self, packing: Packing, new: np.ndarray, old: np.ndarray | None):
        self.packing = packing
        self._new, self._old = new, old
        self._starts = list(block_starts(packing.size))
        self._found: list[Encoded | None] = [None] * len(self._starts)
        self._locks = [threading.Lock() for _ in self._starts]

    def __len__(self) -> int:
        return len(self._starts)

    def get(self, index: int) -> tuple[int, Encoded]:
        """(where a block begins in the packed slices, the block)."""
        start = self._starts[index]
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else self.packing.size
        with self._locks[index]:
            found = self._found[index]
            if found is None:
                new = self.packing.take(self._new, start, stop)
                old = self.packing.take(self._old, start, stop) if self._old is not None else None
                found = self._found[index] = encode(new, old)
        return start, found


class Session:
    """Rank 0's connection to one receiver, from the announcement of a payload to its commit."""

    def __init__(self, address: tuple[str, int], key: bytes, seconds: float, deadline: Deadline):
        self._seconds = seconds
        self._channel = connect(address, key, _short(deadline))
        self.ticket = ""

    def begin(self, announced: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Announce a payload; returns what the receiver has committed, and the ticket of this transfer."""
        answer = self._ask({"ask": "begin", "seconds": self._seconds, **announced}, deadline)
        self.ticket = str(answer["ticket"])
        return answer

    def verify(self, digests: list[int], deadline: Deadline) -> dict[str, Any]:
        """The receiver's receipt for the whole payload."""
        return self._ask({"ask": "verify", "digests": digests}, deadline)

    def commit(self, version: int, deadline: Deadline) -> dict[str, Any]:
        """The receiver's receipt for the commit."""
        return self._ask({"ask": "commit", "version": version}, deadline)

    def _ask(self, header: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        self._channel.send(header, (), deadline)
        return read_answer(self._channel, deadline)

    def close(self) -> None:
        """Hang up; what was not committed is given up."""
        self._channel.close()


def send_slices(
    address: tuple[str, int], key: bytes, request: dict[str, Any], blocks: Blocks, deadline: Deadline
) -> int:
    """Send a rank's slices to one receiver; returns the bytes that went out."""
    channel = connect(address, key, _short(deadline))
    try:
        header = {"ask": "slices", "seconds": deadline.left, **request}
        try:
            channel.send(header, (blocks.packing.spans.reshape(-1),), _short(deadline))
            for index in range(len(blocks)):
                if channel.has_answer():  # before its end: the receiver refuses
                    break
                at, block = blocks.get(index)
                channel.send({"ask": "block", "at": at, **block.to_json()}, block.parts, _short(deadline))
            else:
                channel.send({"ask": "end"}, (), _short(deadline))
        except Lost:
            # A receiver that refuses says why before it hangs up.
            with contextlib.suppress(Lost):
                read_answer(channel, Deadline(min(_LAST_WORD_S, deadline.left)))
            raise
        read_answer(channel, _short(deadline))
        return channel.bytes_sent
    finally:
        channel.close()


def _short(deadline: Deadline) -> Deadline:
    """For one wait: a cut link is noticed long before the transfer's deadline."""
    return Deadline(min(_STALL_S, deadline.left))


def read_answer(channel: Channel, deadline: Deadline) -> dict[str, Any]:
    """The receiver's answer; raises `Refused` with its reason."""
    answer, _ = channel.receive(deadline)
    if "refused" in answer:
        raise Refused(str(answer["refused"]), answer.get("tensor"))
    return answer
