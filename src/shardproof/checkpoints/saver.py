"""What checkpoints keep of a model between calls: the save under way, and the process group that saves use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardproof.checkpoints.snapshot import PendingSave
from shardproof.dist.groups import new_group
from shardproof.shard.sharded_model import ShardedModel

_savers: WeakKeyDictionary[ShardedModel, Saver] = WeakKeyDictionary()


class Saver:
    """Owns a model's pending save, of which there is at most one, and the group that its checkpoints use."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self._pending: PendingSave | None = None

    def join_group(self) -> dist.ProcessGroup:
        """A gloo group for checkpoints alone, so that a save beside training cannot mix up its collectives.

        Collective: every rank, the first time.
        """
        if self.group is None:
            self.group = new_group(backend="gloo")
        return self.group

    def settle(self) -> None:
        """Wait for the pending save, if there is one, and raise its error unless that has been raised before."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def start(self, pending: PendingSave, work: Callable[[], Path]) -> None:
        """Run a save beside training."""
        self._pending = pending
        pending.run_beside(work)

    def wait_until_staged(self) -> None:
        """Block until the pending save, if there is one, has copied the weights."""
        if self._pending is not None:
            self._pending.wait_until_staged()


def saver_of(policy: ShardedModel) -> Saver:
    """The model's saver, made on first use; whatever changes the model waits for its copies."""
    saver = _savers.get(policy)
    if saver is None:
        saver = _savers[policy] = Saver()
        policy.before_change_hooks.append(saver.wait_until_staged)
    return saver
