"""What a sync brings to vLLM: a policy's weights in shared memory, or its adapter in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from shardproof.dist.collectives import broadcast
from shardproof.export.manifest import ExportReceipt
from shardproof.export.pretrained import save_pretrained
from shardproof.export.shared import SharedWeights
from shardproof.shard.sharded_model import ShardedModel

_ADAPTER = "adapter-"  # and the version: an adapter's folder


class SharedPayload:
    """Weights in shared memory: the committed payload stays, and the next one is written beside it."""

    def __init__(self, policy: ShardedModel):
        self.policy = policy
        self.buffers: list[SharedWeights] = []

    def pack(self) -> tuple[ExportReceipt, dict[str, Any]]:
        """Write the weights; returns what `Delivered` takes. Collective: every rank.

        Memory: the payload twice on rank 0's host, the committed one and the one on its way.
        """
        if len(self.buffers) < 2:
            self.buffers.insert(0, SharedWeights(self.policy, self.policy.settings.compute_dtype))
        receipt = self.buffers[0].write()
        digests = receipt.manifest.digests
        manifest = [
            (meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape), digests.get(meta.name))
            for meta in receipt.manifest.tensors
        ]
        return receipt, {"update": {"address": self.buffers[0].address.to_json(), "manifest": manifest}}

    def keep(self) -> None:
        """What was packed last is committed."""
        self.buffers.reverse()

    def close(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            buffer.close()
        self.buffers = []


class AdapterPayload:
    """An adapter as a folder that vLLM loads. `folder` is rank 0's, None elsewhere."""

    def __init__(self, policy: ShardedModel, folder: Path | None):
        self.policy = policy
        self.folder = folder

    def pack(self) -> tuple[ExportReceipt, dict[str, Any]]:
        """Write the adapter; returns what `Delivered` takes. Collective: every rank."""
        root = broadcast(str(self.folder) if self.folder is not None else None)
        folder = Path(root) / f"{_ADAPTER}{self.policy.version}"
        receipt = save_pretrained(self.policy, folder, self.policy.settings.compute_dtype, merge_lora=False)
        return receipt, {"adapter": str(folder)}

    def keep(self) -> None:
        """What was packed last is committed; older ones go."""
        for old in self.folder.glob(f"{_ADAPTER}*") if self.folder is not None else ():
            if old.name != f"{_ADAPTER}{self.policy.version}":
                shutil.rmtree(old)

    def close(self) -> None:
        """The folder goes with the engine's."""
