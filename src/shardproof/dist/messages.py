"""Messages between all ranks: JSON over gloo, nothing is pickled. `traffic` counts them.

Two or three ranks exchange messages by one all-gather. gloo's all-gather passes them around a ring, so more ranks meet
at rank 0: it gathers the length and the digest of each message, and the beginning where the ranks are few enough. If
all messages are the same, as they almost always are, that is all that travels. Otherwise rank 0 collects the rest and
sends the answer down a tree, compressed: the rows of ranks are much alike. The number of hops grows with the logarithm of
the number of ranks, and the bytes of a message that all ranks send alike do not grow, except on rank 0.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardproof.dist.groups import new_group
from shardproof.dist.traffic import traffic, tree_sends

_SLOT = 1024  # bytes of a message that travel at once
_HEAD = 16  # length and digest of a message
_DIGEST = 10
MEETING_BYTES = 8192  # that rank 0 gathers at first; the slots of more than 8 ranks are smaller
_FEW = 3  # ranks that need no meeting at rank 0
_TREE_BYTES = 2**20  # longer answers than this go around the ring, where no rank sends them more than once
_TREE_ROWS_BYTES = 2**16  # the same of rows of numbers, which are not compressed
_PLAIN_BYTES = 256  # shorter messages than this are not compressed

_SAME, _ANSWER, _LONG = b"s", b"a", b"l"
_COMPRESSED = b"z"

# The gloo group beside an NCCL-only default group, by that group, and gone with it.
_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def control_group() -> dist.ProcessGroup:
    """A group of all ranks that moves CPU tensors: the default one, or a gloo group beside an NCCL-only one.

    Collective: every rank, the first time.
    """
    known = known_control_group()
    if known is None:
        assert dist.group.WORLD is not None
        known = _control_groups[dist.group.WORLD] = new_group(backend="gloo")
    return known


def known_control_group() -> dist.ProcessGroup | None:
    """The control group, if it was made already."""
    default = dist.group.WORLD
    assert default is not None
    return default if torch.device("cpu") in default._device_types else _control_groups.get(default)


def exchange(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's JSON-able `value`, in rank order, on every rank.

    `group` is another group of all ranks, for what runs beside training. Collective: every rank.
    """
    traffic.messages += 1
    mine, size = _encode(value), dist.get_world_size()
    if size == 1:
        return [_decode(mine)]
    if size <= _FEW:
        return list(map(_decode, _around_the_ring(mine, _SLOT, group)))
    answer = _meet(mine, _pack, group, everywhere=True)
    if answer is None:
        return [_decode(mine) for _ in range(size)]
    return list(map(json.loads, _unpack(answer, size)))


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Every rank's JSON-able `value`, in rank order, on rank 0; None on the others.

    `group` is another group of all ranks, for what runs beside training. Collective: every rank.
    """
    traffic.messages += 1
    mine, size = _encode(value), dist.get_world_size()
    if size == 1:
        return [_decode(mine)]
    rows: list[bytes] = []

    def keep(found: list[bytes]) -> bytes:
        rows.extend(found)
        return b""

    if _meet(mine, keep, group) is None:
        rows = [mine] * size
    return list(map(_decode, rows)) if dist.get_rank() == 0 else None


def answer_all(value: Any, make: Callable[[list[Any]], Any], group: dist.ProcessGroup | None = None) -> Any:
    """What rank 0 makes of every rank's JSON-able `value`, JSON-able itself, on every rank. `make` must not raise.

    Collective: every rank.
    """
    traffic.messages += 1
    mine, size = _encode(value), dist.get_world_size()
    if size <= _FEW:
        rows = [mine] if size == 1 else _around_the_ring(mine, _SLOT, group)
        return _decode(_encode(make(list(map(_decode, rows)))))

    def make_bytes(rows: list[bytes]) -> bytes:
        return _encode(make(list(map(_decode, rows))))

    answer = _meet(mine, make_bytes, group, may_be_same=False)
    assert answer is not None
    return _decode(answer)


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The JSON-able `value` of rank `source` on every rank; what other ranks pass is not looked at.

    `group` is another group of all ranks, for what runs beside training. Collective: every rank.
    """
    traffic.messages += 1
    mine = _encode(value) if dist.get_rank() == source else b""
    return _decode(mine if dist.get_world_size() == 1 else _send_to_all(mine, _SLOT, source, group))


def gather_rows(row: torch.Tensor) -> torch.Tensor:
    """A [ranks, len(row)] matrix of every rank's int64 `row`; rows must have one length.

    Collective: every rank.
    """
    traffic.messages += 1
    size = dist.get_world_size()
    if size == 1:
        return row[None].clone()
    if size <= _FEW or size * row.nbytes > _TREE_ROWS_BYTES:
        return _all_gather(row.contiguous(), None)
    rows = _gather(row.contiguous(), None)
    if dist.get_rank():
        rows = row.new_empty(size, len(row))
    _broadcast(rows, 0, None)
    return rows


def rows_on_first(row: torch.Tensor) -> torch.Tensor | None:
    """A [ranks, len(row)] matrix of every rank's int64 `row` on rank 0, None on the others; rows must have one length.

    Collective: every rank.
    """
    traffic.messages += 1
    if dist.get_world_size() == 1:
        return row[None].clone()
    rows = _gather(row.contiguous(), None)
    return rows if dist.get_rank() == 0 else None


def sum_rows(row: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's int64 `row`, modulo 2^64; rows must have one length. Collective: every rank."""
    traffic.messages += 1
    total, size = row.clone(), dist.get_world_size()
    if size > 1:
        dist.all_reduce(total, group=control_group())
        moved = 2 * (size - 1) * total.nbytes // size
        traffic.count_control("all_reduce", moved, moved)
    return total


def exchange_among(value: Any, share: int) -> list[Any]:
    """The JSON-able values of the `share` ranks, which follow each other, that this one is one of, in rank order.

    For what is large and of no use to others. Collective: every rank; `share` divides their number.
    """
    traffic.messages += 1
    mine, rank = _encode(value), dist.get_rank()
    first = rank - rank % share
    if share == 1:
        return [_decode(mine)]
    if rank != first:
        _send(mine, first)
        return list(map(json.loads, _unpack(_receive(first), share)))
    packed = _pack([mine, *(_receive(first + place) for place in range(1, share))])
    for place in range(1, share):
        _send(packed, first + place)
    return list(map(json.loads, _unpack(packed, share)))


def any_rank(*flags: bool) -> list[bool]:
    """Whether any rank has each flag, on every rank. No rank receives more than a logarithm of their number.

    For what is asked often: once or twice for each bucket of an export. Collective: every rank.
    """
    traffic.messages += 1
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor(flags, dtype=torch.uint8)
    if size <= _FEW:
        return [
            bool(flag) for flag in (mine[None] if size == 1 else _all_gather(mine, None)).amax(0).tolist()
        ]
    step, sent, received = 1, 0, 0
    while step < size and not rank & step:
        if rank + step < size:
            theirs = torch.empty_like(mine)
            dist.recv(theirs, rank + step, group=control_group())
            mine |= theirs
            received += theirs.nbytes
        step *= 2
    if step < size:
        dist.send(mine, rank - step, group=control_group())
        sent = mine.nbytes
    traffic.count_control("reduce", sent, received)
    _broadcast(mine, 0, None)
    return [bool(flag) for flag in mine.tolist()]


def _meet(
    mine: bytes,
    make: Callable[[list[bytes]], bytes],
    group: dist.ProcessGroup | None,
    *,
    may_be_same: bool = True,
    everywhere: bool = False,
) -> bytes | None:
    """What rank 0 makes of all messages, on every rank; None if all are the same, unless it is made even then.

    `everywhere` says that it is made of the whole messages' bytes, so that long ones may go around the ring.
    """
    size, is_first = dist.get_world_size(), dist.get_rank() == 0
    slot = max(min(MEETING_BYTES // size, _SLOT), _HEAD)
    digest = blake2b(mine, digest_size=_DIGEST).digest()
    head = len(mine).to_bytes(_HEAD - _DIGEST, "little") + digest
    heads = [bytes(row) for row in _gather(_tensor(head + mine, slot), group).numpy()]
    lengths = [int.from_bytes(head[: _HEAD - _DIGEST], "little") for head in heads]
    reply = b""
    if is_first:
        if may_be_same and len({head[:_HEAD] for head in heads}) == 1:
            reply = _SAME
        elif max(lengths) <= slot - _HEAD:
            reply = _ANSWER + make([row[_HEAD:][:length] for row, length in zip(heads, lengths, strict=True)])
        else:
            reply = _LONG + max(lengths).to_bytes(_HEAD - _DIGEST, "little")
    reply = _send_to_all(reply, slot, 0, group)
    if reply[:1] != _LONG:
        return None if reply == _SAME else reply[1:]
    longest = int.from_bytes(reply[1:], "little")
    if everywhere and longest * size > _TREE_BYTES:
        return make(_around_the_ring(mine, longest + 8, group))
    whole = _gather(_tensor(mine, longest), group)
    rows = [bytes(row[:length].numpy()) for row, length in zip(whole, lengths, strict=True)]
    return _send_to_all(make(rows) if is_first else b"", slot, 0, group)


def _around_the_ring(mine: bytes, slot: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """All messages, on every rank: in one all-gather, or two if some rank's message is longer than a slot."""
    message = _with_length(mine)
    rows, size = torch.empty(dist.get_world_size(), 0, dtype=torch.uint8), slot
    while rows.shape[1] < size:
        part = _tensor(message[rows.shape[1] : size], size - rows.shape[1])
        rows = torch.cat([rows, _all_gather(part, group)], dim=1)
        size = max(map(_length, rows))
    return [bytes(row[8 : _length(row)].numpy()) for row in rows]


def _send_to_all(mine: bytes, slot: int, source: int, group: dist.ProcessGroup | None) -> bytes:
    """The message of rank `source`, on every rank: in one broadcast, or two if it is longer than a slot."""
    message = _with_length(mine)
    received, size = torch.empty(0, dtype=torch.uint8), slot
    while len(received) < size:
        part = _tensor(message[len(received) : size], size - len(received))
        _broadcast(part, source, group)
        received = torch.cat([received, part])
        size = _length(received)
    return bytes(received[8:size].numpy())


def _all_gather(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    size = dist.get_world_size()
    rows = part.new_empty(size, len(part))
    dist.all_gather(list(rows), part, group=group or control_group())
    traffic.count_control("all_gather", (size - 1) * part.nbytes, (size - 1) * part.nbytes)
    return rows


def _gather(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' parts, on rank 0; no rows on the others."""
    size, is_first = dist.get_world_size(), dist.get_rank() == 0
    rows = part.new_empty(size if is_first else 0, len(part))
    dist.gather(part, list(rows) if is_first else None, 0, group=group or control_group())
    traffic.count_control(
        "gather", 0 if is_first else part.nbytes, (size - 1) * part.nbytes if is_first else 0
    )
    return rows


def _broadcast(part: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    rank = dist.get_rank()
    dist.broadcast(part, source, group=group or control_group())
    sent = tree_sends(rank, source, dist.get_world_size()) * part.nbytes
    traffic.count_control("broadcast", sent, 0 if rank == source else part.nbytes)


def _send(message: bytes, to: int) -> None:
    whole = _with_length(message)
    for part in (whole[:8], whole[8:]):
        dist.send(_tensor(part, len(part)), to, group=control_group())
    traffic.count_control("send", len(whole), 0)


def _receive(source: int) -> bytes:
    length = torch.empty(8, dtype=torch.uint8)
    dist.recv(length, source, group=control_group())
    message = torch.empty(_length(length) - 8, dtype=torch.uint8)
    dist.recv(message, source, group=control_group())
    traffic.count_control("receive", 0, 8 + len(message))
    return bytes(message.numpy())


def _pack(rows: list[bytes]) -> bytes:
    return zlib.compress(b"".join(_with_length(_plain(row)) for row in rows))


def _unpack(packed: bytes, size: int) -> list[bytes]:
    """The JSON texts of all ranks."""
    packed = zlib.decompress(packed)
    rows, at = [], 0
    for _ in range(size):
        end = at + int.from_bytes(packed[at : at + 8], "little")
        rows.append(packed[at + 8 : end])
        at = end
    return rows


def _encode(value: Any) -> bytes:
    """JSON; a long text is compressed, behind a letter that no JSON begins with."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return text if len(text) < _PLAIN_BYTES else _COMPRESSED + zlib.compress(text)


def _plain(message: bytes) -> bytes:
    """The JSON text of a message."""
    return zlib.decompress(message[1:]) if message[:1] == _COMPRESSED else message


def _decode(message: bytes) -> Any:
    return json.loads(_plain(message))


def _with_length(message: bytes) -> bytes:
    """A message after its length, which counts the eight bytes that say it."""
    return (len(message) + 8).to_bytes(8, "little") + message


def _length(message: torch.Tensor) -> int:
    return int.from_bytes(bytes(message[:8].numpy()), "little")


def _tensor(message: bytes, size: int) -> torch.Tensor:
    """The first `size` bytes of a message, with zeros where it is shorter."""
    return torch.frombuffer(bytearray(message[:size].ljust(size, b"\0")), dtype=torch.uint8)
