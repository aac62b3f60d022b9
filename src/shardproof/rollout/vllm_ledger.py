"""A ledger of what vLLM's loaders write, by parameter and place: every element once.

vLLM counts elements, and a loader that writes one expert twice and another never reaches the right sum. Here each copy
into a parameter is noted as the box that it writes. Noting costs microseconds per copy, whatever its size; the boxes
are compared once, when everything has been loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_COPY = torch.ops.aten.copy_.default
_Box = tuple[tuple[int, int], ...]


class _Write(NamedTuple):
    """The elements of a storage that one copy wrote, and the loader's call that made it."""

    call: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Account:
    """A parameter, what of it a checkpoint has, and what was written."""

    module: str
    name: str
    param: torch.Tensor  # held, so that its storage's identity is not given to another one
    rows: int | None  # the first rows alone are in a checkpoint; the others pad a vocabulary
    spare: int  # elements anywhere in it that no checkpoint has
    writes: list[_Write] = field(default_factory=list)


class WriteLedger:
    """Notes every copy into the parameters that it was told of."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._calls = 0

    def expect(
        self, module: str, name: str, param: torch.Tensor, rows: int | None = None, spare: int = 0
    ) -> None:
        """Open an account: the parameter must be written once everywhere, but for its padding."""
        self._accounts[_identity(param)] = _Account(module, name, param, rows, spare)

    def next_call(self) -> int:
        """The number of a new call of a loader; what one call writes again, it transforms."""
        self._calls += 1
        return self._calls

    def note(self, call: int, target: torch.Tensor) -> None:
        """Note that a call copies into `target`, if that is a part of a parameter."""
        account = self._accounts.get(_identity(target))
        if account is not None:
            write = _Write(call, tuple(target.shape), target.stride(), int(target.storage_offset()))
            account.writes.append(write)

    def problems(self, without: Collection[str] = ()) -> list[tuple[str, str]]:
        """(parameter, what is wrong) for all that were not written once everywhere, but for those of some modules."""
        found = []
        for account in self._accounts.values():
            if account.module not in without:
                text = _judge(account)
                if text is not None:
                    found.append((f"{account.module}.{account.name}".lstrip("."), text))
        return found


@contextmanager
def recording(ledger: WriteLedger, meta: Any) -> Iterator[None]:
    """Let vLLM's own counter of copies (`meta` is its module) write the ledger as well."""
    counter = meta.CopyCounter

    class Recorder(counter):  # type: ignore[misc, valid-type]
        """vLLM makes one for each call of a loader."""

        def __init__(self) -> None:
            super().__init__()
            self._call = ledger.next_call()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not _COPY:
                return func(*args, **(kwargs or {}))
            ledger.note(self._call, args[0])
            return super().__torch_dispatch__(func, types, args, kwargs)

    meta.CopyCounter = Recorder
    try:
        yield
    finally:
        meta.CopyCounter = counter


def _identity(tensor: torch.Tensor) -> int:
    """What all views of one storage have in common, on the meta device too."""
    return tensor.untyped_storage()._cdata


def _judge(account: _Account) -> str | None:
    """What is wrong with the writes of a parameter, in words; None if nothing is."""
    total = account.param.numel()
    if not total:
        return None
    if not account.writes:
        return f"was not written: none of its {total} elements"
    # One loader's call is one write: what it writes twice itself, it transforms in place.
    by_call: dict[int, list[_Write]] = {}
    for write in account.writes:
        by_call.setdefault(write.call, []).append(write)
    counts, edges = _count_cells(account.param, list(by_call.values()), account.rows)
    volumes = _volumes(edges)
    missing, twice = counts == 0, counts > 1
    if account.rows is not None and account.param.ndim:
        padding = edges[0][:-1] >= account.rows
        missing[padding] = False
    num_missing, num_twice = int(volumes[missing].sum()), int(volumes[twice].sum())
    said = []
    if num_missing > account.spare:
        said.append(f"{num_missing} of its {total} elements were not written, from {_first(missing, edges)}")
    if num_twice:
        said.append(
            f"{num_twice} of its {total} elements were written more than once, from {_first(twice, edges)}"
        )
    return f"was not written exactly once: {'; '.join(said)}" if said else None


def _count_cells(
    param: torch.Tensor, calls: list[list[_Write]], rows: int | None
) -> tuple[NDArray[np.int32], list[NDArray[np.int64]]]:
    """(how often each cell of a grid was written, the grid's edges in each dimension)."""
    boxes = [[_box(write, param) for write in call] for call in calls]
    if any(box is None for call in boxes for box in call):
        return _count_elements(param, calls)
    cuts = [{0, size} for size in param.shape]
    if rows is not None and cuts:
        cuts[0].add(min(rows, param.shape[0]))
    for call in boxes:
        for box in call:
            for dim, bounds in enumerate(box or ()):
                cuts[dim].update(bounds)
    ordered = [sorted(some) for some in cuts]
    places = [{edge: k for k, edge in enumerate(some)} for some in ordered]
    counts = np.zeros([len(some) - 1 for some in ordered], dtype=np.int32)
    for call in boxes:
        cells = [
            tuple(slice(at[low], at[high]) for at, (low, high) in zip(places, box or (), strict=True))
            for box in call
        ]
        if len(cells) == 1:
            counts[cells[0]] += 1
            continue
        touched = np.zeros_like(counts)
        for cell in cells:
            touched[cell] = 1
        counts += touched
    return counts, [np.array(some) for some in ordered]


def _box(write: _Write, param: torch.Tensor) -> _Box | None:
    """The box of a parameter that a write covers; None if it is not a box, such as a range across rows."""
    start, extent = [0] * param.ndim, [1] * param.ndim
    rest, strides = write.offset - int(param.storage_offset()), param.stride()
    dims = sorted((d for d in range(param.ndim) if param.shape[d] > 1), key=lambda d: -strides[d])
    by_stride = {strides[d]: d for d in dims}
    if rest < 0 or len(by_stride) != len(dims):
        return None
    for dim in dims:
        start[dim], rest = divmod(rest, strides[dim])
    for size, stride in zip(write.size, write.stride, strict=True):
        if size == 1:
            continue
        found = by_stride.pop(stride, None)
        if found is None:
            return None
        extent[found] = size
    box = tuple((a, a + n) for a, n in zip(start, extent, strict=True))
    fits = all(stop <= size for (_, stop), size in zip(box, param.shape, strict=True))
    return box if fits and not rest and prod(extent) == prod(write.size) else None


def _count_elements(
    param: torch.Tensor, calls: list[list[_Write]]
) -> tuple[NDArray[np.int32], list[NDArray[np.int64]]]:
    """The same by element, for writes that are no boxes. Memory: five bytes for each element of the parameter."""
    base = param.storage_offset()
    length = 1 + sum((size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True))
    flat = torch.zeros(length, dtype=torch.int32)
    for call in calls:
        touched = torch.zeros(length, dtype=torch.bool)
        for write in call:
            touched.as_strided(write.size, write.stride, write.offset - base).fill_(True)
        flat += touched
    counts = flat.as_strided(tuple(param.shape), param.stride(), 0).numpy()
    return counts, [np.arange(size + 1) for size in param.shape]


def _volumes(edges: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The number of elements in each cell of a grid."""
    found = np.ones((), dtype=np.int64)
    for some in edges:
        found = found[..., None] * np.diff(some)
    return found


def _first(where: NDArray[np.bool_], edges: list[NDArray[np.int64]]) -> list[int]:
    """The index of the first element of the first cell in which `where` holds."""
    cell = np.argwhere(where)[0].tolist()
    return [int(some[k]) for k, some in zip(cell, edges, strict=True)]
