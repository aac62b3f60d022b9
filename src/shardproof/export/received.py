"""What a receiver of weights holds: the payload that was committed last, and the one that is on its way.

The new payload becomes the base of the next differences only when it is committed. Until then the old one stays as it
is, and engines can go back to it.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardproof.digest import digest
from shardproof.dist.region import create_region, map_region
from shardproof.export.address import SharedAddress
from shardproof.export.channel import Refused
from shardproof.export.differences import Damaged, decode
from shardproof.export.image import Image, ImageLayout
from shardproof.export.manifest import Manifest
from shardproof.export.packing import Packing, check_spans, first_gap
from shardproof.shard.memory import host_memory
from shardproof.weights.reader import DTYPES
from shardproof.weights.writer import TensorMeta

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_MOST_THREADS = 4
_MAX_DIMS = 16


class Memory:
    """Shared memory that holds a payload, for engines of this host."""

    def __init__(self, layout: ImageLayout):
        available, total = host_memory()
        if total and available < layout.size:
            raise Refused(f"the payload needs {layout.size} bytes of memory, {available} are available")
        self._descriptor, self.region = create_region(layout.size)
        self.image = Image(layout, map_region(self.region, writable=True))
        self.bytes = self.image.memory.numpy()

    def close(self) -> None:
        """Free it; engines that have mapped it keep it until they unmap it."""
        os.close(self._descriptor)
        self.image.drop()
        self.bytes = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True)
class Committed:
    """A payload that was proved and committed."""

    run: str
    version: int
    digest: str  # of the whole payload
    memory: Memory

    def to_json(self) -> dict[str, Any]:
        return {"run": self.run, "version": self.version, "digest": self.digest}


@dataclass
class Pending:
    """A payload on its way."""

    ticket: str
    run: str
    version: int
    memory: Memory
    base: Committed | None
    packings: dict[int, Packing] = field(default_factory=dict)  # of each rank that sends
    arrived: dict[int, int] = field(default_factory=dict)  # packed bytes
    wire_bytes: int = 0
    closed: bool = False  # nothing more is taken
    digest: str | None = None  # once it is verified
    began: float = field(default_factory=time.perf_counter)


class Inbox:
    """The payloads of one receiver. One run at a time uses it; every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._committed: Committed | None = None
        self._pending: Pending | None = None
        self._spare: Memory | None = None
        self._writers = 0  # threads that write to the pending payload now

    @property
    def committed(self) -> Committed | None:
        return self._committed

    def begin(self, run: str, version: int, rows: Sequence[Any], size: int) -> Pending:
        """Expect a new version of a run's payload. Another run's is refused while one is on its way."""
        layout = ImageLayout(_metas(rows))
        if layout.size != size:
            raise Refused("it lays out a payload differently: trainer and receiver are of different versions")
        with self._changed:
            pending = self._pending
            if pending is not None and pending.run != run:
                raise Refused(f"run {pending.run} is bringing version {pending.version} to it")
            self._drop_pending()
            old = self._committed
            if old is not None and (old.run != run or old.memory.image.layout.metas != layout.metas):
                self._free()
            memory = self._spare or Memory(layout)
            self._spare = None
            self._pending = Pending(secrets.token_hex(16), run, version, memory, self._committed)
            return self._pending

    def open_slices(self, ticket: str, rank: int, spans: np.ndarray, base: int | None) -> None:
        """Expect a rank's slices, which lie at these spans; they may be differences from the version `base`."""
        with self._changed:
            pending = self._current(ticket)
            problem = check_spans(spans, pending.memory.image.layout)
            if problem or rank in pending.packings:
                raise Refused(f"rank {rank}: {problem or 'it has sent its slices already'}")
            if base is not None and (pending.base is None or pending.base.version != base):
                has = "nothing" if pending.base is None else f"version {pending.base.version}"
                raise Refused(
                    f"rank {rank} sends differences from version {base}, but {has} is committed here"
                )
            pending.packings[rank] = Packing(spans)
            pending.arrived[rank] = 0

    def put(self, ticket: str, rank: int, at: int, described: dict[str, Any], body: np.ndarray) -> None:
        """Write the next block of a rank's slices."""
        with self._changed:
            pending = self._current(ticket)
            packing, arrived = pending.packings[rank], pending.arrived[rank]
            size = described.get("size")
            if at != arrived:
                what = "twice" if at < arrived else "without those before them"
                raise Refused(f"rank {rank} sent bytes {at} of its slices {what} ({arrived} had arrived)")
            if not isinstance(size, int) or not 0 < size <= packing.size - at:
                raise Refused(f"rank {rank} sent more than its slices")
            pending.arrived[rank] = at + size
            pending.wire_bytes += body.nbytes
            self._writers += 1
        try:
            base = pending.base
            old = packing.take(base.memory.bytes, at, at + size) if base is not None else None
            packing.put(pending.memory.bytes, at, decode(described, body, old))
        except Damaged as error:
            raise Refused(f"a block from rank {rank} cannot be read: {error}") from error
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()

    def verify(self, ticket: str, digests: Sequence[int]) -> dict[str, Any]:
        """The receipt of a payload that is whole and has the sender's digests; engines can read it from then on."""
        with self._changed:
            pending = self._current(ticket)
            pending.closed = True
            self._changed.wait_for(lambda: not self._writers)
            layout = pending.memory.image.layout
            for rank, packing in pending.packings.items():
                if pending.arrived[rank] != packing.size:
                    message = (
                        f"{pending.arrived[rank]} of {packing.size} bytes of rank {rank}'s slices arrived"
                    )
                    raise Refused(message)
            gap = first_gap(pending.packings, layout)
            if gap is not None:
                raise Refused(f"{gap[0]!r}: {gap[1]}", gap[0])
        arrived = time.perf_counter()
        found = take_digests(pending.memory.image)
        if len(digests) != len(found):
            raise Refused(f"{len(digests)} digests came for {len(found)} tensors")
        wrong = [name for (name, value), sent in zip(found.items(), digests, strict=True) if value != sent]
        if wrong:
            raise Refused(f"{wrong[0]!r} differs from what was sent ({len(wrong)} tensors do)", wrong[0])
        with self._changed:
            pending = self._current(ticket, closed=True)
            pending.digest = Manifest(0, layout.metas, found).total
        address = SharedAddress(pending.memory.region, layout.table, pending.version)
        return {
            "version": pending.version,
            "digest": pending.digest,
            "address": address.to_json(),
            "wire_bytes": pending.wire_bytes,
            "seconds": {"receive": arrived - pending.began, "verify": time.perf_counter() - arrived},
        }

    def commit(self, ticket: str, version: int) -> dict[str, Any]:
        """Make the verified payload the base of the next one; the old one's memory is used for that."""
        with self._changed:
            pending = self._current(ticket, closed=True)
            if pending.digest is None or pending.version != version:
                state = "not verified" if pending.digest is None else f"version {pending.version}"
                raise Refused(f"version {version} cannot be committed: what is here is {state}")
            if self._committed is not None:
                self._spare_for_next(self._committed.memory)
            self._committed = Committed(pending.run, version, pending.digest, pending.memory)
            self._pending = None
            return self._committed.to_json()

    def abandon(self, ticket: str) -> bool:
        """Give a payload up that will not be committed; False if it is not there."""
        with self._changed:
            if self._pending is None or self._pending.ticket != ticket:
                return False
            self._drop_pending()
            return True

    def close(self) -> None:
        """Free all memory."""
        with self._changed:
            self._drop_pending()
            self._free()

    def _current(self, ticket: str, closed: bool = False) -> Pending:
        pending = self._pending
        if pending is None or pending.ticket != ticket:
            raise Refused("this payload was given up or replaced by a newer one")
        if pending.closed and not closed:
            raise Refused(f"version {pending.version} is complete already")
        return pending

    def _drop_pending(self) -> None:
        """With the lock held; returns when nobody writes to the pending payload any more."""
        pending, self._pending = self._pending, None
        self._changed.wait_for(lambda: not self._writers)
        if pending is not None:
            self._spare_for_next(pending.memory)

    def _spare_for_next(self, memory: Memory) -> None:
        if self._spare is not None:  # a session that ended while another began
            self._spare.close()
        self._spare = memory

    def _free(self) -> None:
        if self._committed is not None:
            self._committed.memory.close()
        if self._spare is not None:
            self._spare.close()
        self._committed = self._spare = None


def take_digests(image: Image) -> dict[str, int]:
    """The digest of every tensor in the memory, in the payload's order, computed on a few cores."""
    names = sorted(image.layout.places, key=lambda name: -image.layout.places[name].nbytes)
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS)) as pool:
        found = dict(zip(names, pool.map(lambda name: digest(image.flat(name)), names), strict=True))
    return {name: found[name] for name in image.layout.places}


def _metas(rows: Sequence[Any]) -> list[TensorMeta]:
    """The tensors that a trainer announces, checked."""
    metas: dict[str, TensorMeta] = {}
    for row in rows:
        name, dtype, shape = _row(row)
        if name in metas:
            raise Refused(f"{name!r} is announced twice", name)
        metas[name] = TensorMeta(name, dtype, shape)
    return list(metas.values())


def _row(row: Any) -> tuple[str, torch.dtype, tuple[int, ...]]:
    match row:
        case [str(name), str(dtype), [*shape]] if dtype in _DTYPES and len(shape) <= _MAX_DIMS:
            if all(isinstance(size, int) and 0 <= size < 2**48 for size in shape):
                return name, _DTYPES[dtype], tuple(shape)
    raise Refused(f"{str(row)[:200]} does not describe a tensor")


def announce(metas: Sequence[TensorMeta]) -> list[list[Any]]:
    """Tensors as `Inbox.begin` takes them."""
    return [[meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape)] for meta in metas]


def manifest_rows(manifest: Manifest) -> list[tuple[str, str, list[int], int | None]]:
    """(name, dtype, shape, digest) of each tensor, as engines compare what they read with it."""
    digests: Mapping[str, int] = manifest.digests
    return [(*row, digests.get(row[0])) for row in announce(manifest.tensors)]  # type: ignore[misc]
