"""The bytes of all tensors that are alive, counted at every operation: exact, and the same in every run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOTABLE = 1.01  # by which factor a peak must be higher for garbage to be collected first


class LiveBytes(TorchDispatchMode):
    """Follows every storage that operations inside the block return on one kind of device, except those of `without`.

    `now` is what is alive of them, `peak` the most that was alive at the end of any operation. A storage counts once,
    however many tensors share it, and with the size that it has at the time: FSDP empties storages and fills them again.
    Memory that an operation allocates and frees itself is not seen. With `collects`, garbage is collected before a peak
    is noted: what waits in reference cycles depends on when Python looks for them.
    """

    def __init__(self, device_type: str, without: Iterable[torch.Tensor] = (), collects: bool = False):
        super().__init__()
        self._collects = collects
        self.now = self.peak = 0
        self._without = {tensor.untyped_storage()._cdata for tensor in without}
        self._device_type = device_type
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._resize = torch.UntypedStorage.resize_

    def restart(self) -> int:
        """Begin a new peak; returns what is alive, without garbage if it `collects`."""
        if self._collects:
            gc.collect()
        self.peak = self.now
        return self.now

    def __enter__(self) -> LiveBytes:
        resize, follow = self._resize, self._follow

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._alive:
                follow(storage)
            return found

        torch.UntypedStorage.resize_ = followed  # type: ignore[method-assign,assignment]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> object:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is called again with the local tensors
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device_type:
                try:
                    self._follow(tensor.untyped_storage())
                except (NotImplementedError, RuntimeError):  # tensor subclasses without one of their own
                    continue
        return found

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._without:
            return
        before, reference = self._alive.get(key, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = (size, reference)
        self.now += size - before
        if self._collects and self.now > _NOTABLE * self.peak:
            gc.collect()
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        size, _ = self._alive.pop(key, (0, None))
        self.now -= size
