"""vLLM's own transports, NCCL and CUDA IPC, fed from our stream. Experimental: they have not been run on GPUs here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from shardproof.dist.collectives import broadcast
from shardproof.errors import fail
from shardproof.export.stream import WeightStream
from shardproof.rollout.vllm_client import Deadline, VllmClient


class StreamSource(WeightSource):
    """A policy's weight stream as vLLM's trainer engines take weights: metadata first, then whole tensors in order."""

    def __init__(self, stream: WeightStream):
        self.stream = stream

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and shapes, in the order of iteration. Nothing is moved."""
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self.stream.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: every rank."""
        return iter(self.stream)


class SyncClient:
    """The calls that vLLM's trainer engines make, over our client and with a deadline each."""

    def __init__(self, client: VllmClient, seconds: float):
        self.client = client
        self.seconds = seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", None)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._post("/update_weights", {"update_info": _json_safe_update_payload(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        # The version is given by the commit, once the canary has answered.
        self._post("/finish_weight_update", None)

    def _post(self, path: str, body: Any) -> None:
        self.client.post(path, body, Deadline(self.seconds))


def make_sender(backend: str, source: StreamSource, client: SyncClient | None, num_workers: int) -> Any:
    """vLLM's trainer engine for a backend. Collective: every rank; `client` is rank 0's."""
    if not torch.cuda.is_available():
        message = f"rollout.vllm.transport={backend!r} moves tensors between GPUs, and this machine has none."
        raise fail("C001", "rollout", message, fix="use rollout.vllm.transport=shared")
    rank = dist.get_rank()
    info: Any
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address, port = broadcast(list(_rendezvous()))
        info = NCCLTrainerInitInfo(address, port, world_size=1 + num_workers, rank=rank)
    else:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(packed=True, rank=rank)
    # Only rank 0 calls it; the type wants one everywhere.
    return WeightTransferTrainerFactory.trainer_init(info, client=client or _NoClient(), source=source)


class _NoClient(HTTPVLLMWeightSyncClient):
    def __init__(self) -> None:
        super().__init__("http://rank-0-talks-to-the-server")


def _rendezvous() -> tuple[str, int]:
    """This host's address and a free port of it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return socket.gethostbyname(socket.gethostname()), probe.getsockname()[1]
