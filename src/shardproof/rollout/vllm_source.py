"""vLLM's NCCL transport, fed from our stream by vLLM's own sender. Experimental: it has not been run on GPUs here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from shardproof.dist.addresses import address_towards, is_loopback
from shardproof.dist.collectives import broadcast
from shardproof.export.stream import WeightStream
from shardproof.rollout.vllm_ipc import WeightRoutes


class StreamSource(WeightSource):
    """A policy's weight stream as vLLM's senders take weights: metadata first, then whole tensors in order."""

    def __init__(self, stream: WeightStream):
        self.stream = stream

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and shapes, in the order of iteration. Nothing is moved."""
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self.stream.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: every rank."""
        return iter(self.stream)


class NcclSender:
    """vLLM's sender for NCCL, made at the first stream. `client` is rank 0's, None elsewhere; `server` is its host."""

    def __init__(self, client: WeightRoutes | None, num_workers: int, server: str = ""):
        self.client = client
        self._server = server
        self.num_workers = num_workers
        self._sender: Any = None

    def send(self, stream: WeightStream) -> None:
        """Bring a stream's tensors. Collective: every rank."""
        if self._sender is None:
            self._sender = self._connect(StreamSource(stream))
        self._sender.source.stream = stream
        self._sender.send_weights()

    def _connect(self, source: StreamSource) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address, port = broadcast(list(_rendezvous(self._server)) if dist.get_rank() == 0 else None)
        info: Any = NCCLTrainerInitInfo(address, port, world_size=1 + self.num_workers, rank=dist.get_rank())
        # Only rank 0 calls it; the type wants one everywhere.
        client: Any = self.client or _NoClient()
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


class _NoClient(HTTPVLLMWeightSyncClient):
    def __init__(self) -> None:
        super().__init__("http://rank-0-talks-to-the-server")


def _rendezvous(server: str) -> tuple[str, int]:
    """This host's address on the way to the server's host, and a free port of it; loopback to a server of this host."""
    # What the own hostname resolves to is loopback on many systems, which another host cannot reach.
    address = address_towards(server)
    address = "127.0.0.1" if is_loopback(address) else address
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return address, probe.getsockname()[1]
