"""Weights by CUDA IPC, without CUDA: what is in the buffer when the workers are told to read it, and what they are told."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.rollout import vllm_ipc
from shardproof.rollout.vllm_versions import interface_of
from tests.models import make_checkpoint
from tests.ranks import run_ranks

KIND = (torch.Tensor, torch.Size([8]), (1,), 0, torch.UntypedStorage, torch.uint8)
HANDLE = (b"handle", 8, 0, False, b"counter", 16, b"event", True)


class Worker:
    """Stands for vLLM's receiver: reads the buffer when it is told to, and nothing before."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.calls: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.handles: list[dict[str, Any]] = []
        self.fields: set[str] = set()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(f"init {init_info}")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        self.fields = set(update_info)
        self.handles.append(pickle.loads(base64.b64decode(update_info["ipc_handles_pickled"])))
        rows = zip(
            *(update_info[key] for key in ("names", "dtype_names", "shapes", "tensor_sizes")), strict=True
        )
        start = 0
        for name, dtype, shape, size in rows:
            assert name not in self.tensors
            flat = self.buffer[start : start + size].clone()
            self.tensors[name] = flat.view(getattr(torch, dtype)).view(shape)
            start += size

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


def send(folder: str, version: str, chunk_bytes: int) -> dict[str, Any]:
    policy = sp.load(folder, device="cpu")
    rank, worker = dist.get_rank(), Worker()

    def export(buffer: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        worker.buffer = buffer
        return None, (*KIND, rank, *HANDLE)

    patched = {"reduce_tensor": export, "gpu_uuid": lambda device: f"GPU-{rank}", "CHUNK_BYTES": chunk_bytes}
    kept = {name: getattr(vllm_ipc, name) for name in patched}
    try:
        for name, value in patched.items():
            setattr(vllm_ipc, name, value)
        client, interface = (worker, interface_of(version)) if rank == 0 else (None, None)
        vllm_ipc.IpcSender(client, interface).send(sp.WeightStream(policy, torch.bfloat16))
    finally:
        for name, value in kept.items():
            setattr(vllm_ipc, name, value)
    wanted = dict(sp.WeightStream(policy, torch.bfloat16))
    found = {"calls": worker.calls, "handles": worker.handles, "fields": sorted(worker.fields)}
    if rank == 0:
        assert list(worker.tensors) == list(wanted)
        found["equal"] = all(torch.equal(worker.tensors[name], wanted[name]) for name in wanted)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("version", "chunk_bytes"), [("0.26.0", 1), ("0.32.0", 2**29)])
def test_the_workers_are_told_what_is_in_the_buffer(tmp_path, version, chunk_bytes):
    folder = str(make_checkpoint(tmp_path, "qwen3_tied"))
    first, second = run_ranks(2, send, folder, version, chunk_bytes)
    assert first["equal"] and second["calls"] == []
    updates = first["calls"].count("update")
    assert (updates > 3) if chunk_bytes == 1 else (updates == 1)
    init = {"0.26.0": "init {}", "0.32.0": "init {'packed': True}"}[version]
    assert first["calls"] == [init, "start", *["update"] * updates, "finish"]
    assert ("packed" in first["fields"]) == (version == "0.26.0")
    # Every rank's handle, for the worker on its GPU; new ones for each piece.
    for handles in first["handles"]:
        assert handles == {f"GPU-{rank}": (*KIND, rank, *HANDLE) for rank in range(2)}


def test_a_tensor_lies_where_its_dtype_can():
    chunk = vllm_ipc.Chunk()
    chunk.add("odd", torch.zeros(3, dtype=torch.bfloat16))
    assert chunk.takes(torch.zeros(2, dtype=torch.bfloat16), 10)
    assert not chunk.takes(torch.zeros(3, dtype=torch.bfloat16), 10)
    assert not chunk.takes(torch.zeros(1, dtype=torch.float32), 100)
