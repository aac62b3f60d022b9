"""Boxes of tensors: where they lie in memory, what they share, what they cover, and how one is copied into place.

A box is a range per dimension. A box of a single range is a range of the flattened tensor; for a vector the two are
the same. Memory that holds a box has its elements in row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import Any, NamedTuple

import torch

Box = tuple[tuple[int, int], ...]  # (start, stop) for each dim, or for the flattened tensor


class Piece(NamedTuple):  # made by the ten thousand: a NamedTuple costs a fraction of a frozen dataclass
    """A box of a result and the box of one source that it equals."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    source: Any  # a name, or an index into the names that the account is bound to
    source_start: tuple[int, ...]
    # For each dim of the result, the dim of the source it runs along; -1 for a dim that the source does not have.
    dims: tuple[int, ...]
    source_shape: tuple[int, ...]  # of the whole source

    @property
    def box(self) -> Box:
        """The box of the result."""
        return tuple((a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    @property
    def source_box(self) -> Box:
        """The box of the source."""
        return tuple((a, a + n) for a, n in zip(self.source_start, self.extent, strict=True))

    @property
    def extent(self) -> list[int]:
        """How many indices it takes of each dim of the source."""
        extent = [1] * len(self.source_start)
        for n, source_dim in zip(self.shape, self.dims, strict=True):
            if source_dim >= 0:
                extent[source_dim] = n
        return extent

    def within(self, box: Box) -> Piece | None:
        """The part of it that lies in `box` of the result, relative to that box."""
        common = []
        for (low, high), start, length in zip(box, self.start, self.shape, strict=True):
            a, b = max(low, start), min(high, start + length)
            if a >= b:
                return None
            common.append((a, b))
        source_start = list(self.source_start)
        for (a, _), start, source_dim in zip(common, self.start, self.dims, strict=True):
            if source_dim >= 0:
                source_start[source_dim] += a - start
        relative = tuple(a - low for (a, _), (low, _) in zip(common, box, strict=True))
        shape = tuple(b - a for a, b in common)
        return Piece(relative, shape, self.source, tuple(source_start), self.dims, self.source_shape)

    def out_of(self, box: Box) -> Piece | None:
        """The part of it that comes from `box` of the source."""
        common = overlap(self.source_box, box)
        if common is None:
            return None
        start, shape = list(self.start), list(self.shape)
        for dim, source_dim in enumerate(self.dims):
            if source_dim >= 0:
                a, b = common[source_dim]
                start[dim] += a - self.source_start[source_dim]
                shape[dim] = b - a
        source_start = tuple(a for a, _ in common)
        return self._replace(start=tuple(start), shape=tuple(shape), source_start=source_start)


def put(target: torch.Tensor, piece: Piece, value: torch.Tensor) -> int:
    """Copy `value`, which is the piece's box of its source, to the piece's place; returns its number of elements."""
    cut(target, piece.box).copy_(orient(value, piece.dims))
    return value.numel()


def orient(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """A source box, permuted and reshaped to the axes of the result it belongs to."""
    kept = [d for d in dims if d >= 0]
    dropped = [d for d in range(tensor.ndim) if d not in kept]
    out = tensor if not dropped and kept == list(range(tensor.ndim)) else tensor.permute(*kept, *dropped)
    for _ in dropped:
        out = out.squeeze(-1)
    for position, source_dim in enumerate(dims):
        if source_dim < 0:
            out = out.unsqueeze(position)
    return out


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of a box of a whole tensor."""
    if len(box) != tensor.ndim:
        tensor = tensor.reshape(-1)
    return tensor[tuple(slice(a, b) for a, b in box)]


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(b - a for a, b in box)


def size_of(box: Box) -> int:
    """The number of elements in a box."""
    return prod(b - a for a, b in box)


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two boxes of as many dims share."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(a < b for a, b in common) else None


def flat_start(start: Sequence[int], extent: Sequence[int], shape: Sequence[int]) -> int | None:
    """Where a box begins in the flat order of its tensor; None unless it is contiguous there."""
    flat, partial = 0, False
    for a, n, size in zip(start, extent, shape, strict=True):
        # After the first dim of which the box takes more than one index, every dim has to be whole.
        if partial and n != size:
            return None
        partial = partial or n > 1
        flat = flat * size + a
    return flat


def flatten(box: Box, shape: Sequence[int]) -> Box:
    """The same box as a range of the flattened tensor, if it is one."""
    if len(box) == 1:
        return box
    start = flat_start([a for a, _ in box], shape_of(box), shape)
    return box if start is None else ((start, start + size_of(box)),)


def enclosing_range(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """The smallest range of the flattened tensor that has all of a box."""
    if len(box) == 1:
        return box[0]
    first = last = 0
    for (a, b), size in zip(box, shape, strict=True):
        first, last = first * size + a, last * size + b - 1
    return first, last + 1


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """The boxes that make up elements [start, stop) of a contiguous tensor, each with its flat offset, in order.

    Every box is contiguous in the flat order, so it can be viewed as one block of a 1-D buffer.
    """
    if start >= stop:
        return
    if not shape:
        yield 0, ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row) if row else 0, stop // row if row else 0
    whole = tuple((0, n) for n in shape[1:])
    if first > last:  # the range lies inside one row
        yield from _inside_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _inside_row(shape, first - 1, start, first * row)
    if first < last:
        yield first * row, ((first, last), *whole)
    if last * row < stop:
        yield from _inside_row(shape, last, last * row, stop)


def _inside_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    base = index * prod(shape[1:])
    for offset, box in flat_range_boxes(shape[1:], start - base, stop - base):
        yield base + offset, ((index, index + 1), *box)


def blocks(
    shape: Sequence[int], box: Box, low: int = 0, high: int | None = None
) -> Iterator[tuple[int, Box]]:
    """Elements [low, high) of the memory that holds a box: (offset in it, box with a range per dim), in order.

    Each is contiguous in that memory.
    """
    high = size_of(box) if high is None else high
    if len(box) == 1:
        start = box[0][0]
        for offset, block in flat_range_boxes(shape, start + low, start + high):
            yield offset - start, block
    else:
        for offset, block in flat_range_boxes(shape_of(box), low, high):
            yield offset, tuple((a + first, b + first) for (a, b), (first, _) in zip(block, box, strict=True))


class Window(NamedTuple):
    """Elements of 1-D memory, as a strided view of it."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """The number of elements from its first to its last one."""
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        step = flat.stride(0)  # not 1 where the memory is itself a view, such as a column
        strides = [stride * step for stride in self.strides]
        return flat[self.offset : self.offset + self.span].as_strided(self.shape, strides)


def window(offset: int, block: Box, part: Box) -> Window:
    """Where a part of a block lies in memory that holds the block from `offset` on."""
    strides = (
        tuple(accumulate((b - a for a, b in reversed(block[1:])), mul, initial=1))[::-1] if block else ()
    )
    first = sum((a - low) * s for (a, _), (low, _), s in zip(part, block, strides, strict=True))
    return Window(offset + first, shape_of(part), strides)


def overlaps(shape: Sequence[int], one: Box, other: Box) -> Iterator[tuple[Window, Window]]:
    """What two boxes of a tensor share, as windows of the memory that holds the one and of that which holds the other."""
    if len(one) == len(other) == 1:
        common = overlap(one, other)
        if common is not None:
            yield window(0, one, common), window(0, other, common)
        return
    theirs = list(blocks(shape, other))
    for at, block in blocks(shape, one):
        for other_at, other_block in theirs:
            common = overlap(block, other_block)
            if common is not None:
                yield window(at, block, common), window(other_at, other_block, common)


def copy_overlap(
    shape: Sequence[int], target: torch.Tensor, target_box: Box, source: torch.Tensor, source_box: Box
) -> None:
    """Copy what two boxes of a tensor share from the memory of the one to the memory of the other."""
    if len(target_box) == len(source_box) == 1:
        (a, b), (c, d) = target_box[0], source_box[0]
        low, high = max(a, c), min(b, d)
        if low < high:
            target[low - a : high - a].copy_(source[low - c : high - c])
        return
    for mine, theirs in overlaps(shape, target_box, source_box):
        mine.of(target).copy_(theirs.of(source))


def put_held(target: torch.Tensor, piece: Piece, box: Box, memory: torch.Tensor) -> None:
    """Copy what the memory that holds a box of the piece's source has of the piece to its place."""
    for offset, block in blocks(piece.source_shape, box):
        part = piece.out_of(block)
        if part is not None:
            put(target, part, window(offset, block, part.source_box).of(memory))


class Miscount(NamedTuple):
    """The first element that some boxes do not cover as often as they should."""

    position: tuple[int, ...]  # an index per dim, or one of the flattened tensor
    expected: int
    found: int


def first_miscount(shape: Sequence[int], expected: Sequence[Box], found: Sequence[Box]) -> Miscount | None:
    """The first element of a tensor that `found` does not cover as often as `expected` does."""
    if list(expected) == list(found):
        return None
    if any(len(box) != 1 for box in (*expected, *found)):
        expected, found = _with_dims(shape, expected), _with_dims(shape, found)
    elif len(expected) == 1:
        (position, stop), *_ = expected[0]
        for ((a, b),) in sorted(found):
            if a != position:
                break
            position = b
        else:
            if position == stop:
                return None
    return _sweep(
        [(box, 0) for box in expected if size_of(box)] + [(box, 1) for box in found if size_of(box)]
    )


def _with_dims(shape: Sequence[int], boxes: Sequence[Box]) -> list[Box]:
    return [block for box in boxes for _, block in blocks(shape, box)]


def _sweep(boxes: list[tuple[Box, int]]) -> Miscount | None:
    """The same for boxes with the side they belong to, dim by dim: between two edges they are all alike."""
    if not boxes or not boxes[0][0]:
        found = sum(side for _, side in boxes)
        return None if 2 * found == len(boxes) else Miscount((), len(boxes) - found, found)
    waiting = sorted(boxes, key=lambda item: item[0][0][0], reverse=True)
    active: list[tuple[Box, int]] = []
    for low, _ in pairwise(sorted({edge for box, _ in boxes for edge in box[0]})):
        active = [item for item in active if item[0][0][1] > low]
        while waiting and waiting[-1][0][0][0] == low:
            active.append(waiting.pop())
        wrong = _sweep([(box[1:], side) for box, side in active])
        if wrong is not None:
            return wrong._replace(position=(low, *wrong.position))
    return None


def describe_boxes(boxes: Sequence[Box]) -> str:
    """Boxes as a message has them: "[0, 4)", or "[0, 4) x [2, 6)"."""
    return " and ".join(" x ".join(f"[{a}, {b})" for a, b in box) for box in boxes)
