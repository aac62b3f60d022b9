"""What a sync brings to vLLM: a policy's weights in shared memory, at receivers on other hosts, or an adapter's folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardproof.config.vllm import VllmSettings
from shardproof.dist.collectives import broadcast
from shardproof.export.manifest import ExportReceipt
from shardproof.export.network import NetworkWeights
from shardproof.export.pretrained import save_pretrained
from shardproof.export.received import manifest_rows
from shardproof.export.shared import SharedWeights
from shardproof.findings import Finding
from shardproof.shard.sharded_model import ShardedModel

_ADAPTER = "adapter-"  # and the version: an adapter's folder


@dataclass(frozen=True)
class Packed:
    """A payload that is ready to be brought."""

    receipt: ExportReceipt
    delivered: Mapping[str, Any]  # what `Delivered` takes: update, updates or adapter
    lost: Mapping[str, Finding] = field(default_factory=dict)  # by replica: why it cannot have it


class Payload(Protocol):
    """Where the weights of a sync lie: the committed ones, and those on their way."""

    def pack(self) -> Packed:
        """Write the policy's weights. Collective: every rank."""
        ...

    def keep(self) -> None:
        """What was packed last is committed. Collective: every rank."""
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


def make_payload(policy: ShardedModel, settings: VllmSettings, adapter: bool, folder: Path | None) -> Payload:
    """The payload of a transport. `folder` is rank 0's, None elsewhere. Collective: every rank."""
    if adapter:
        return AdapterPayload(policy, folder)
    return NetworkPayload(policy, settings) if settings.transport == "network" else SharedPayload(policy)


class SharedPayload:
    """Weights in shared memory: the committed payload stays, and the next one is written beside it."""

    def __init__(self, policy: ShardedModel):
        self.policy = policy
        self.buffers: list[SharedWeights] = []

    def pack(self) -> Packed:
        """Write the weights. Collective: every rank.

        Memory: the payload twice on rank 0's host, the committed one and the one on its way.
        """
        if len(self.buffers) < 2:
            self.buffers.insert(0, SharedWeights(self.policy, self.policy.settings.compute_dtype))
        receipt = self.buffers[0].write()
        address, rows = self.buffers[0].address.to_json(), manifest_rows(receipt.manifest)
        return Packed(receipt, {"update": {"address": address, "manifest": rows}})

    def keep(self) -> None:
        """What was packed last is committed; the next payload goes where the one before it lies."""
        self.buffers.reverse()

    def close(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            buffer.close()
        self.buffers = []


class NetworkPayload:
    """Weights at receivers on the hosts of the servers, each rank's slices sent once to each."""

    def __init__(self, policy: ShardedModel, settings: VllmSettings):
        assert settings.secret_file is not None
        self._reached: list[str] = []  # receivers that have what was packed last
        self._receiver = {str(number): name for number, name in enumerate(settings.receivers)}
        self._weights = NetworkWeights(
            policy,
            settings.receivers,
            settings.secret_file,
            policy.settings.compute_dtype,
            deadline_s=settings.sync_timeout_s,
        )

    def pack(self) -> Packed:
        """Send the weights; replicas whose receiver did not get them are lost. Collective: every rank."""
        sent = self._weights.write()
        self._reached = list(sent.updates)
        reached = {r: sent.updates[name] for r, name in self._receiver.items() if name in sent.updates}
        lost = {r: sent.lost[name] for r, name in self._receiver.items() if name in sent.lost}
        return Packed(sent.receipt, {"updates": reached}, lost)

    def keep(self) -> None:
        """Have all receivers that were reached keep what they were sent: replicas that are out will be brought to it.

        Collective: every rank.
        """
        self._weights.commit(self._reached)

    def close(self) -> None:
        """Hang up."""
        self._weights.close()


class AdapterPayload:
    """An adapter as a folder that vLLM loads. `folder` is rank 0's, None elsewhere."""

    def __init__(self, policy: ShardedModel, folder: Path | None):
        self.policy = policy
        self.folder = folder

    def pack(self) -> Packed:
        """Write the adapter. Collective: every rank."""
        root = broadcast(str(self.folder) if self.folder is not None else None)
        folder = Path(root) / f"{_ADAPTER}{self.policy.version}"
        receipt = save_pretrained(self.policy, folder, self.policy.settings.compute_dtype, merge_lora=False)
        return Packed(receipt, {"adapter": str(folder)})

    def keep(self) -> None:
        """What was packed last is committed; older ones go."""
        for old in self.folder.glob(f"{_ADAPTER}*") if self.folder is not None else ():
            if old.name != f"{_ADAPTER}{self.policy.version}":
                shutil.rmtree(
                    old, ignore_errors=True
                )  # rank 0 alone is here; what is left goes with the engine's folder

    def close(self) -> None:
        """The folder goes with the engine's."""
