"""Weights to a vLLM server on the same GPUs, by CUDA IPC: our sender for the receiver that vLLM has.

vLLM's receiver maps a buffer of the trainer's GPU memory and loads the tensors in it. Its interface is the same in all
supported versions but for one field, while the senders in vLLM differ in each; so the sender is here, and the trainer
does not import vLLM for it.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor

from shardproof.dist.collectives import exchange, together
from shardproof.export.stream import WeightStream
from shardproof.rollout.vllm_versions import Interface

CHUNK_BYTES = 2**29
# What `reduce_tensor` gives: what kind of tensor it is comes first, the same on every rank, then handles and numbers.
_KIND = 6


class WeightRoutes(Protocol):
    """vLLM's weight routes, as its own senders call them too."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass
class Chunk:
    """Tensors that lie one after the other in the buffer."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    tensor_sizes: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(self.tensor_sizes)

    def takes(self, tensor: torch.Tensor, capacity: int) -> bool:
        """Whether a tensor fits behind the others, at an address that its dtype can have."""
        return self.num_bytes % tensor.itemsize == 0 and self.num_bytes + tensor.nbytes <= capacity

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.names.append(name)
        self.dtype_names.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(list(tensor.shape))
        self.tensor_sizes.append(tensor.nbytes)


class IpcSender:
    """Sends weight streams to the workers that share this run's GPUs. `client` is rank 0's, None elsewhere."""

    def __init__(self, client: WeightRoutes | None, interface: Interface | None):
        self.client = client
        self.interface = interface

    def send(self, stream: WeightStream) -> None:
        """Have the workers load a stream, through a buffer on every rank's GPU.

        Collective: every rank. Memory: the buffer holds at least the largest tensor, at most that or 512 MiB.
        """
        sizes = [meta.nbytes for meta in stream.metadata()]
        capacity = max(max(sizes), min(sum(sizes), CHUNK_BYTES))
        buffer = torch.empty(capacity, dtype=torch.uint8, device=stream.policy.device)
        with together("sync"):
            if self.client is not None:
                # Every time: the server may have been started again since.
                self.client.init_weight_transfer_engine({"packed": True} if self._packed_at_init else {})
                self.client.start_weight_update()
        for chunk in _fill(stream, buffer):
            self._send_chunk(chunk, buffer)
        with together("sync"):
            if self.client is not None:
                self.client.finish_weight_update()
        if buffer.is_cuda:
            del buffer
            torch.cuda.ipc_collect()

    @property
    def _packed_at_init(self) -> bool:
        assert self.interface is not None
        return self.interface.ipc_packed_at_init

    def _send_chunk(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Have the workers read what is in every rank's buffer, and wait until they have. Collective: every rank."""
        # A new handle for each chunk: the workers count each one they open, and give it back.
        _, mine = reduce_tensor(buffer)
        rows = exchange([gpu_uuid(buffer.device), _to_json(mine[_KIND:])])
        with together("sync"):
            if self.client is not None:
                handles = {uuid: (*mine[:_KIND], *_from_json(values)) for uuid, values in rows}
                update = dict(vars(chunk), ipc_handles_pickled=pickled(handles))
                self.client.update_weights(update if self._packed_at_init else update | {"packed": True})


def _fill(stream: WeightStream, buffer: torch.Tensor) -> Iterator[Chunk]:
    """Copy the stream's tensors into the buffer; whenever it is full, what is in it. Collective: every rank."""
    chunk = Chunk()
    for name, tensor in stream:
        if not chunk.takes(tensor, len(buffer)):
            _wait_for_copies(buffer)
            yield chunk
            chunk = Chunk()
        start = chunk.num_bytes
        buffer[start : start + tensor.nbytes].copy_(
            tensor.detach().contiguous().view(-1).view(torch.uint8), non_blocking=True
        )
        chunk.add(name, tensor)
    _wait_for_copies(buffer)
    yield chunk


def _wait_for_copies(buffer: torch.Tensor) -> None:
    if buffer.is_cuda:
        torch.cuda.current_stream().synchronize()


def gpu_uuid(device: torch.device) -> str:
    """The name under which a worker looks for the handle of its own GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def pickled(handles: dict[str, tuple[Any, ...]]) -> str:
    """Handles as vLLM's HTTP route takes them. vLLM unpickles what it gets there, which it must be told to allow."""
    return base64.b64encode(pickle.dumps(handles)).decode()


def _to_json(values: Sequence[Any]) -> list[Any]:
    """Numbers and bytes as JSON has them: ranks send each other no pickles."""
    return [{"hex": value.hex()} if isinstance(value, bytes) else value for value in values]


def _from_json(values: Sequence[Any]) -> list[Any]:
    return [bytes.fromhex(value["hex"]) if isinstance(value, dict) else value for value in values]
