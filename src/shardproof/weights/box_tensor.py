"""Which box of which checkpoint tensor each element of a converted tensor comes from.

transformers describes how a checkpoint becomes a model as chains of tensor operations (stack the experts, concatenate
gate and up, split, transpose). A `BoxTensor` goes through those very operations in place of a tensor, but only keeps
account: it is a list of pieces, each a box of the result that equals a box of one source tensor, axes permuted. Any
slice of the result can then be read straight from the sources. An operation that does more than move boxes around
raises `NotSliceable`, and the caller converts that one tensor whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from shardproof.weights.boxes import Box, Piece, flat_start


class NotSliceable(Exception):
    """The operation cannot be expressed as boxes."""


class Run(NamedTuple):
    """Consecutive elements of the result that are consecutive elements of one source."""

    start: int
    length: int
    source: str
    source_start: int


class _RunTable(NamedTuple):
    """The runs of a tensor, sorted by start; the source is an index into the account's sources."""

    start: list[int]
    length: list[int]
    source: list[int]
    source_start: list[int]


class BoxTensor:
    """A tensor's provenance: shape, dtype and pieces. Immutable.

    Bound to names, it shares the pieces of the account it was bound from, whose sources are indices: layers that are
    alike have one account.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: Sequence[Piece],
        names: Sequence[str] | None = None,
        template: BoxTensor | None = None,
    ):
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._pieces = tuple(pieces)
        self._names = names
        self._template = template
        self._runs: _RunTable | None = None
        self._runs_known = False

    @classmethod
    def of_source(cls, name: Any, shape: Sequence[int], dtype: torch.dtype) -> BoxTensor:
        zeros = (0,) * len(shape)
        whole = tuple(shape)
        return cls(whole, dtype, [Piece(zeros, whole, name, zeros, tuple(range(len(whole))), whole)])

    def bind(self, names: Sequence[str]) -> BoxTensor:
        """The same account with `names[i]` in the place of source `i`."""
        return BoxTensor(self.shape, self.dtype, self._pieces, names, self)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        if self._names is None:
            return self._pieces
        return tuple(piece._replace(source=self._names[piece.source]) for piece in self._pieces)

    @property
    def sources(self) -> list[str]:
        """The pieces' sources, in order."""
        if self._names is None:
            return [piece.source for piece in self._pieces]
        return [self._names[piece.source] for piece in self._pieces]

    # The part of the tensor interface that conversion operations use.
    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return prod(self.shape)

    def contiguous(self) -> BoxTensor:
        return self

    def chunk(self, chunks: int, dim: int = 0) -> tuple[BoxTensor, ...]:
        return _chunk(self, chunks, dim)

    def squeeze(self, dim: int | None = None) -> BoxTensor:
        return _squeeze(self, dim)

    def transpose(self, dim0: int, dim1: int) -> BoxTensor:
        return _transpose(self, dim0, dim1)

    def __getattr__(self, name: str) -> Any:
        raise NotSliceable(f"Tensor.{name}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotSliceable(getattr(func, "__name__", str(func)))
        return handler(*args, **(kwargs or {}))

    def runs(self, start: int, stop: int) -> list[Run] | None:
        """The runs that fill elements [start, stop), in order; the first and last may reach beyond them.

        None where some piece is not a run: strided, or with axes permuted.
        """
        table = (self._template or self)._run_table()
        if table is None:
            return None
        first = max(bisect_right(table.start, start) - 1, 0)
        last = bisect_left(table.start, stop)
        names = self._names if self._names is not None else [piece.source for piece in self._pieces]
        return [
            Run(table.start[i], table.length[i], names[table.source[i]], table.source_start[i])
            for i in range(first, last)
        ]

    def _run_table(self) -> _RunTable | None:
        if not self._runs_known:
            self._runs_known = True
            runs = [_as_run(piece, self.shape) for piece in self._pieces]
            if None not in runs:
                order = sorted(range(len(runs)), key=lambda i: runs[i][0])  # type: ignore[index]
                columns = zip(*(runs[i] for i in order)) if order else [(), (), ()]  # type: ignore[misc]
                start, length, source_start = map(list, columns)
                # A template's sources are indices already; else the pieces are numbered.
                source = [p.source if type(p.source) is int else i for i, p in enumerate(self._pieces)]
                self._runs = _RunTable(start, length, [source[i] for i in order], source_start)
        return self._runs

    def as_run(self) -> Run | None:
        """The one run that the whole tensor is, if it is one."""
        if len(self._pieces) != 1 or self._names is not None:
            return None
        found = _as_run(self._pieces[0], self.shape)
        return None if found is None else Run(found[0], found[1], self._pieces[0].source, found[2])

    def slices(self, box: Box) -> Iterator[Piece]:
        """What to read from which source to fill `box` of this tensor: pieces relative to that box."""
        for piece in self._pieces:
            part = piece.within(box)
            if part is not None:
                yield part if self._names is None else part._replace(source=self._names[part.source])


def _as_run(piece: Piece, shape: Sequence[int]) -> tuple[int, int, int] | None:
    """(start, length, start in the source) of a piece that is a run."""
    kept = [dim for dim in piece.dims if dim >= 0]
    if kept != sorted(kept):
        return None
    start = flat_start(piece.start, piece.shape, shape)
    source_start = flat_start(piece.source_start, piece.extent, piece.source_shape)
    if start is None or source_start is None:
        return None
    return start, prod(piece.shape), source_start


def _norm(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def _stack(tensors: Sequence[BoxTensor], dim: int = 0) -> BoxTensor:
    first = tensors[0]
    dim = _norm(dim, first.ndim + 1)
    pieces = []
    for index, tensor in enumerate(tensors):
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise NotSliceable("stack of tensors with different shapes or dtypes")
        for p in tensor.pieces:
            pieces.append(
                Piece(
                    (*p.start[:dim], index, *p.start[dim:]),
                    (*p.shape[:dim], 1, *p.shape[dim:]),
                    p.source,
                    p.source_start,
                    (*p.dims[:dim], -1, *p.dims[dim:]),
                    p.source_shape,
                )
            )
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])
    return BoxTensor(shape, first.dtype, pieces)


def _cat(tensors: Sequence[BoxTensor], dim: int = 0) -> BoxTensor:
    first = tensors[0]
    dim = _norm(dim, first.ndim)
    pieces, offset = [], 0
    for tensor in tensors:
        alike = tensor.shape[:dim] == first.shape[:dim] and tensor.shape[dim + 1 :] == first.shape[dim + 1 :]
        if not alike or tensor.dtype != first.dtype:
            raise NotSliceable("cat of tensors with different shapes or dtypes")
        for p in tensor.pieces:
            start = (*p.start[:dim], p.start[dim] + offset, *p.start[dim + 1 :])
            pieces.append(p._replace(start=start))
        offset += tensor.shape[dim]
    shape = (*first.shape[:dim], offset, *first.shape[dim + 1 :])
    return BoxTensor(shape, first.dtype, pieces)


def _narrow(tensor: BoxTensor, dim: int, start: int, length: int) -> BoxTensor:
    box: Box = tuple((start, start + length) if d == dim else (0, n) for d, n in enumerate(tensor.shape))
    pieces = [part for part in (piece.within(box) for piece in tensor.pieces) if part is not None]
    return BoxTensor([b - a for a, b in box], tensor.dtype, pieces)


def _chunk(tensor: BoxTensor, chunks: int, dim: int = 0) -> tuple[BoxTensor, ...]:
    dim = _norm(dim, tensor.ndim)
    total = tensor.shape[dim]
    size = -(-total // chunks)
    return tuple(_narrow(tensor, dim, at, min(size, total - at)) for at in range(0, total, size))


def _unbind(tensor: BoxTensor, dim: int = 0) -> tuple[BoxTensor, ...]:
    dim = _norm(dim, tensor.ndim)
    return tuple(_squeeze(_narrow(tensor, dim, i, 1), dim) for i in range(tensor.shape[dim]))


def _squeeze(tensor: BoxTensor, dim: int | None = None) -> BoxTensor:
    wanted = range(tensor.ndim) if dim is None else [_norm(dim, tensor.ndim)]
    gone = {d for d in wanted if tensor.shape[d] == 1}

    def keep(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(v for d, v in enumerate(values) if d not in gone)

    pieces = [p._replace(start=keep(p.start), shape=keep(p.shape), dims=keep(p.dims)) for p in tensor.pieces]
    return BoxTensor(keep(tensor.shape), tensor.dtype, pieces)


def _transpose(tensor: BoxTensor, dim0: int, dim1: int) -> BoxTensor:
    order = list(range(tensor.ndim))
    dim0, dim1 = _norm(dim0, tensor.ndim), _norm(dim1, tensor.ndim)
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def swap(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[d] for d in order)

    pieces = [p._replace(start=swap(p.start), shape=swap(p.shape), dims=swap(p.dims)) for p in tensor.pieces]
    return BoxTensor(swap(tensor.shape), tensor.dtype, pieces)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.unbind: _unbind,
    torch.squeeze: _squeeze,
    torch.transpose: _transpose,
}
