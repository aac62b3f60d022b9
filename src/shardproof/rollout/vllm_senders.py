"""How vLLM's own transports, CUDA IPC and NCCL, are given a policy's weights."""

from __future__ import annotations

from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from shardproof.errors import fail
from shardproof.export.stream import WeightStream
from shardproof.rollout.vllm_client import Deadline, Refused, Unreachable
from shardproof.rollout.vllm_ipc import IpcSender
from shardproof.rollout.vllm_server import VllmServer
from shardproof.rollout.vllm_versions import Interface


class Sender(Protocol):
    """What brings weights to the workers; the canary then says whether they arrived."""

    def send(self, stream: WeightStream) -> None:
        """Bring a stream's tensors. Collective: every rank."""


class SyncClient:
    """vLLM's weight routes over our client, with a deadline for each call. Rank 0 has one."""

    def __init__(self, server: VllmServer, seconds: float):
        self.server = server
        self.seconds = seconds

    @property
    def host(self) -> str:
        """The name or address of the server's host; "" if it listens at a socket of this host."""
        return urlsplit(self.server.client.url).hostname or ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", None)

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        # The version is given by the commit, once the canary has answered.
        self._post("/finish_weight_update", None)

    def _post(self, path: str, body: Any) -> None:
        try:
            self.server.client.post(path, body, Deadline(self.seconds))
        except Refused as error:
            raise fail("R505", "sync", f"the server refused {path}: {error}.") from error
        except Unreachable as error:
            raise fail("R505", "sync", f"the server stopped or did not answer in time: {error}.") from error


def make_sender(
    transport: str, client: SyncClient | None, num_workers: int, interface: Interface | None
) -> Sender:
    """The sender of a transport. Collective: every rank; `client` and the server's `interface` are rank 0's."""
    if not torch.cuda.is_available():
        message = (
            f"rollout.vllm.transport={transport!r} moves tensors between GPUs, and this machine has none."
        )
        raise fail("C001", "rollout", message, fix="use rollout.vllm.transport=shared")
    if transport == "ipc":
        return IpcSender(client, interface)
    from shardproof.rollout.vllm_source import NcclSender  # imports vLLM, which takes many seconds

    return NcclSender(client, num_workers, client.host if client is not None else "")
