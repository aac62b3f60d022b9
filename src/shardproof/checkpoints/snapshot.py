"""The state that a save holds on to: what may change it waits, and what was copied is what the label says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardproof.errors import fail
from shardproof.shard.local import LocalShard
from shardproof.shard.sharded_model import ShardedModel

_SAMPLED = 256  # elements of each tensor

_lock = threading.Lock()
_staging: set[PendingSave] = set()
_hook: Any = None


class PendingSave:
    """A save under way. Training may go on; whatever changes weights waits until the tensors have been copied."""

    def __init__(self) -> None:
        self.blocked_seconds = 0.0  # of the training loop
        self.write_seconds = 0.0  # from the call to the published folder
        self.folder: Path | None = None
        self._started = time.perf_counter()
        self._staged = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._told = False

    def run(self, work: Callable[[], Path]) -> None:
        """Do the work of a save; what it returns or raises is what `wait` returns or raises."""
        try:
            self.folder = work()
        except BaseException as error:
            self._error = error
        finally:
            self.end_staging()
            self.write_seconds = time.perf_counter() - self._started

    def run_beside(self, work: Callable[[], Path]) -> None:
        """The same in a thread."""
        self.begin_staging()
        thread = threading.Thread(target=self.run, args=(work,), name="shardproof-save")
        try:
            thread.start()
        except BaseException:
            self.end_staging()
            raise
        self._thread = thread

    def note_blocked(self) -> None:
        """Count the time since this object was made as time that the training loop waited."""
        self.blocked_seconds = time.perf_counter() - self._started

    def settle(self) -> None:
        """Wait for the end, and raise what went wrong unless it has been raised before."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not self._told:
            self.wait()

    def wait(self) -> Path:
        """Block until the checkpoint is published; raises what went wrong, the same on every rank."""
        if self._thread is not None:
            started = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.blocked_seconds += time.perf_counter() - started
        if self._error is not None:
            self._told = True
            raise self._error
        assert self.folder is not None
        return self.folder

    def wait_until_staged(self, *_: Any) -> None:
        """Block until the snapshot is taken; called before anything changes the weights."""
        started = time.perf_counter()
        self._staged.wait()
        self.blocked_seconds += time.perf_counter() - started

    def begin_staging(self) -> None:
        """From now on every optimizer of this process waits before it steps."""
        global _hook
        with _lock:
            _staging.add(self)
            # Registered once and kept: an optimizer that walks its hooks must not see one go.
            if _hook is None:
                _hook = register_optimizer_step_pre_hook(_before_any_step)

    def end_staging(self) -> None:
        self._staged.set()
        with _lock:
            _staging.discard(self)


def _before_any_step(*_: Any) -> None:
    with _lock:
        waiting = list(_staging)
    for pending in waiting:
        pending.wait_until_staged()


class Snapshot:
    """What a policy was when its save was called, and whether what was copied or written later is still that.

    Elements spread over every tensor are compared, and the counters of updates: whoever writes weights past all hooks
    is found, unless what is written is sparse.
    """

    def __init__(self, policy: ShardedModel, ranges: Mapping[str, LocalShard]):
        self._policy = policy
        self._counters = policy.version, policy.num_updates
        self._names = list(ranges)
        self._sample = _sampled(ranges)

    def check(self, ranges: Mapping[str, LocalShard]) -> None:
        """Raise E408 if these are not the tensors of the call."""
        if (self._policy.version, self._policy.num_updates) != self._counters:
            message = f"the model changed to version {self._policy.version} while version {self._counters[0]} was being copied."
            raise fail(
                "E408",
                "save",
                message,
                fix="change weights after the copy is taken, or save in the foreground",
            )
        for name, before, after in zip(self._names, self._sample, _sampled(ranges), strict=True):
            if not torch.equal(before, after):
                message = f"{name!r} was changed while version {self._counters[0]} was being copied."
                fix = "call policy.before_change() before you write weights yourself"
                raise fail("E408", "save", message, tensor=name, fix=fix)


def _sampled(ranges: Mapping[str, LocalShard]) -> list[torch.Tensor]:
    """The bytes of some elements of each tensor, the same ones whenever it is asked, on the host."""
    parts = [_spread(item.flat) for item in ranges.values()]
    sizes = [part.numel() for part in parts]
    if len({part.device for part in parts}) != 1:
        return [part.cpu() for part in parts]
    return list(torch.cat(parts).cpu().split(sizes))  # one transfer


def _spread(flat: torch.Tensor) -> torch.Tensor:
    return flat.detach()[:: flat.numel() // _SAMPLED + 1].contiguous().view(torch.uint8)


def copy_to_host(ranges: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
    """Copies of the tensors in host memory."""
    return {
        name: replace(item, flat=item.flat.detach().to("cpu", copy=True)) for name, item in ranges.items()
    }
