"""`WeightStream`: one path from any layout to the tensors of the family's checkpoint, with a receipt."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from shardproof.digest import lazy_digest_tiles, lazy_digests
from shardproof.dist.collectives import any_rank, exchange
from shardproof.dist.deadline import deadline, mesh_groups
from shardproof.errors import fail
from shardproof.export.digests import DigestShare
from shardproof.export.gather import Gatherer
from shardproof.export.manifest import ExportReceipt, Manifest
from shardproof.export.payload import Layout, Payload, check_entries, first_not_finite
from shardproof.findings import Finding
from shardproof.shard.sharded_model import ShardedModel
from shardproof.weights.box_tensor import BoxTensor
from shardproof.weights.boxes import cut, orient, put
from shardproof.weights.mapping import ExportEntry
from shardproof.weights.writer import TensorMeta

BUCKET_BYTES = 64 * 2**20
# Of a bucket on a GPU that holds all of the model: nothing is gathered, and each bucket costs a wait.
ALONE_BYTES = 256 * 2**20
_DEADLINE_S = 600.0

# (updates, digest) of each model's last payload, and gone with the model.
_last_exports: weakref.WeakKeyDictionary[ShardedModel, tuple[int, str]] = weakref.WeakKeyDictionary()


class WeightStream:
    """The policy's weights under the names, dtypes and shapes of its Hugging Face checkpoint.

    `metadata()` transfers nothing. Iteration gathers bucket by bucket and yields whole tensors, in the order of the
    metadata, on every rank; parameters are neither moved nor changed. `dtype` None exports as stored, "checkpoint" as the
    source file had it. `merge_lora=False` streams only the adapter, under peft's names.

    Collective: every rank iterates. A rank that stops early ends the others with an error instead of leaving them
    waiting. Memory: two buckets; a bucket is at least the largest tensor.
    """

    def __init__(
        self,
        policy: ShardedModel,
        dtype: torch.dtype | str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        merge_lora: bool = True,
        digests: bool = True,
        allow_nonfinite: bool = False,
        deadline_s: float = _DEADLINE_S,
    ):
        floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and dtype != "checkpoint" and not floating:
            raise fail(
                "C001", "export", f"dtype={dtype!r} is not None, 'checkpoint' or a floating torch.dtype."
            )
        self.policy = policy
        # Sent, received, in order: what is gathered is there three times.
        self.gather_bytes = bucket_bytes // 2
        if policy.mesh.size() == 1 and policy.device.type == "cuda" and bucket_bytes == BUCKET_BYTES:
            self.gather_bytes = ALONE_BYTES
        self.digests = digests
        self.allow_nonfinite = allow_nonfinite
        self.deadline_s = deadline_s
        self.receipt: ExportReceipt | None = None
        self.payload = Payload(policy, dtype, merge_lora)
        check_entries(self.payload.entries)
        self._metas = tuple(
            TensorMeta(name, box.dtype, tuple(box.shape))
            for entry in self.payload.entries
            for name, box in entry.boxes.items()
        )
        self._running: weakref.ref[Generator[tuple[str, torch.Tensor], None, None]] | None = None

    def metadata(self) -> list[TensorMeta]:
        """Names, dtypes and shapes, in the order of iteration."""
        return list(self._metas)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        running = self._run()
        # A weak reference: leaving the loop frees the iterator, which then tells the other ranks.
        self._running = weakref.ref(running)
        return running

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End an iteration early and tell the other ranks. Leaving a `for` loop does this too."""
        running = self._running() if self._running is not None else None
        if running is not None:
            running.close()
        self._running = None

    def _run(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        payload, seconds = self.payload, 0.0
        payload.refresh()
        started = time.perf_counter()
        with self._deadline():
            layout = payload.layout()
        share = DigestShare(layout.rank, _group_size(layout))
        seconds += time.perf_counter() - started
        gather = Gatherer(self.gather_bytes)
        try:
            for bucket in self.buckets():
                started = time.perf_counter()
                with self._deadline():
                    flats = self.gather_bucket(bucket, layout, gather)
                seconds += time.perf_counter() - started
                # A GPU takes the digests of a bucket at once; in host memory each tensor goes as soon as it is read.
                for part in [bucket] if self.policy.device.type == "cuda" else [[entry] for entry in bucket]:
                    started = time.perf_counter()
                    made = [(entry, make_tensors(entry, flats)) for entry in part]
                    if self.digests:
                        self._digest(made, flats, share)
                    for name in [name for entry in part for name in entry.sources]:
                        del flats[name]
                    tensors = [pair for _, pairs in made for pair in pairs]
                    del made
                    seconds += time.perf_counter() - started
                    tensors.reverse()
                    while tensors:
                        yield tensors.pop()
        except GeneratorExit:
            with self._deadline():
                agree_to_continue(stopped=True)
            raise
        started = time.perf_counter()
        with self._deadline():
            agree_to_continue()
            digests = share.merged(map(_digest_order, payload.entries)) if self.digests else {}
        self.receipt = self.make_receipt(digests, seconds + time.perf_counter() - started)

    @staticmethod
    def _digest(
        made: Sequence[tuple[ExportEntry, list[tuple[str, torch.Tensor]]]],
        whole: Mapping[str, torch.Tensor],
        share: DigestShare,
    ) -> None:
        """Take this rank's share of the digests of some entries, in order; the host does not wait for a GPU."""
        single: list[torch.Tensor] = []
        for entry, tensors in made:
            mine = share.next_entry(len(tensors))
            if entry.tiles is None:
                single += [tensors[position][1] for position in mine]
            elif mine:
                share.add(lazy_digests(single))
                single = []
                tiles = whole[entry.sources[0]].reshape(len(entry.tiles), -1)
                share.add(lazy_digest_tiles(tiles[mine.start : mine.stop]))
        share.add(lazy_digests(single))

    def _deadline(self):  # type: ignore[no-untyped-def]
        return deadline("export", "E406", self.deadline_s, mesh_groups(self.policy.mesh))

    def buckets(self) -> Iterator[list[ExportEntry]]:
        """Entries whose model tensors are gathered together."""
        bucket: list[ExportEntry] = []
        size = 0
        for entry in self.payload.entries:
            nbytes = sum(self._nbytes(name) for name in entry.sources)
            if bucket and size + nbytes > self.gather_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(entry)
            size += nbytes
        if bucket:
            yield bucket

    def _nbytes(self, name: str) -> int:
        return self.payload.infos[name].num_weights * self.payload.dtypes[name].itemsize

    def gather_bucket(
        self, bucket: Sequence[ExportEntry], layout: Layout, gather: Gatherer
    ) -> dict[str, torch.Tensor]:
        """The bucket's model tensors, whole. Collective: every rank."""
        payload = self.payload
        names = [name for entry in bucket for name in entry.sources]
        sharded = [name for name in names if not payload.infos[name].is_buffer]
        if payload.adapters_needed(sharded):
            agree_to_continue()  # before the first collective of a bucket, or a rank that has stopped would miss it
        adapters = self.gather_adapters(sharded, layout)
        values, wholes = payload.bucket_values(sharded, adapters)
        buffers = {
            name: payload.buffers[payload.infos[name].name] for name in names if payload.infos[name].is_buffer
        }
        looked_at = [*wholes, *buffers.values()] if wholes else ()
        bad = None if self.allow_nonfinite else first_not_finite(values | buffers, looked_at)
        agree_to_continue(bad=bad)
        boxes = {name: layout.boxes[payload.infos[name].name] for name in sharded}
        shapes = {name: payload.infos[name].weight_shape for name in sharded}
        whole = gather(values, Layout(boxes, layout.rank, layout.group), shapes) | buffers
        return {name: whole[name] for name in names}

    def gather_adapters(self, names: Sequence[str], layout: Layout) -> dict[str, torch.Tensor]:
        """The low-rank factors that the merged tensors of a bucket need, whole; they are small."""
        needed = self.payload.adapters_needed(names)
        if not needed:
            return {}
        infos = {info.name: info for info in self.policy.inventory.parameters}
        part = Layout({name: layout.boxes[name] for name in needed}, layout.rank, layout.group)
        values = {name: self.payload.shards[name].flat.to(self.policy.device) for name in needed}
        gather = Gatherer(self.gather_bytes, may_share=False)
        return gather(values, part, {name: infos[name].shape for name in needed})

    def make_receipt(self, digests: dict[str, int], seconds: float) -> ExportReceipt:
        tensors = self._metas
        version = self.policy.version
        manifest = Manifest(version, tensors, digests)
        findings = []
        if self.digests:
            total = Manifest(0, tensors, digests).total
            last = _last_exports.get(self.policy)
            if last is not None and last[1] == total and self.policy.num_updates > last[0]:
                message = f"version {version} has the same {len(tensors)} tensors as the last export, digest {total[:16]}."
                findings.append(Finding("E405", "export", message))
            _last_exports[self.policy] = (self.policy.num_updates, total)
        num_bytes = sum(meta.nbytes for meta in tensors)
        return ExportReceipt(version, len(tensors), num_bytes, seconds, manifest, findings)


def _group_size(layout: Layout) -> int:
    return 1 if layout.group is None else dist.get_world_size(layout.group)


def agree_to_continue(*, stopped: bool = False, bad: str | None = None) -> None:
    """Raise if some rank's consumer has stopped, or some rank holds a tensor that is not finite.

    Collective: every rank, once per bucket and once at the end.
    """
    some_stopped, some_bad = any_rank(stopped, bad is not None)
    if some_bad:
        names = exchange(bad)
        rank = next(rank for rank, name in enumerate(names) if name is not None)
        raise fail("E402", "export", f"{names[rank]!r} holds NaN or Inf.", rank=rank, tensor=names[rank])
    if some_stopped:
        rank = exchange(stopped).index(True)
        if not stopped:
            raise fail("E403", "export", "it stopped reading the weight stream before its end.", rank=rank)


def make_tensors(entry: ExportEntry, whole: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """An entry's checkpoint tensors from whole model tensors: views where they are runs, else copies."""
    if entry.whole is not None:
        return [(name, tensor.contiguous()) for name, tensor in entry.whole(whole).items()]
    if entry.tiles is not None:
        assert entry.cuts is not None
        parts = whole[entry.sources[0]].reshape(len(entry.tiles), *entry.cuts[0].shape).unbind(0)
        return [(cut.name, parts[place]) for cut, place in zip(entry.cuts, entry.tiles, strict=True)]
    if entry.cuts is not None:
        flats = {name: whole[name].reshape(-1) for name in entry.sources}
        return [
            (cut.name, flats[cut.source][cut.start : cut.start + cut.length].view(cut.shape))
            for cut in entry.cuts
        ]
    return [(name, _assemble(box, whole)) for name, box in entry.boxes.items()]


def _digest_order(entry: ExportEntry) -> list[str]:
    """An entry's names as they lie in the model tensor, if they are its tiles."""
    names = list(entry.boxes)
    if entry.tiles is None:
        return names
    return [name for _, name in sorted(zip(entry.tiles, names, strict=True))]


def _assemble(account: BoxTensor, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A checkpoint tensor from boxes of model tensors."""
    pieces = account.pieces
    values = [cut(whole[piece.source], piece.source_box) for piece in pieces]
    if len(pieces) == 1:
        return orient(values[0], pieces[0].dims).contiguous()
    out = torch.empty(account.shape, dtype=account.dtype, device=values[0].device)
    for piece, value in zip(pieces, values, strict=True):
        put(out, piece, value)
    return out
