"""Our side inside vLLM's workers: weights from the trainer's shared memory, checked before the model is touched.

This is the one file that uses vLLM's private interface: the accounts of its layerwise reload. It runs in a process of
the server and never in a trainer.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers import attention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    meta,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from shardproof.digest import digest
from shardproof.errors import ShardproofError
from shardproof.export.address import SharedAddress, read_shared
from shardproof.rollout.vllm_ledger import WriteLedger, recording
from shardproof.rollout.vllm_plugin import register

_MOST_PROBLEMS = 3
_MOST_THREADS = 4


@dataclass
class ShardproofInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: the address of the memory comes with each update."""


@dataclass
class ShardproofUpdateInfo(WeightTransferUpdateInfo):
    """One payload: where it lies, and what must arrive."""

    address: dict[str, Any]
    # [name, dtype, shape, digest or None] of every tensor that was sent
    manifest: list[tuple[str, str, list[int], int | None]]
    # False leaves what vLLM derives from weights as vLLM leaves it; tests show with it that the canary sees that.
    renew: bool = True


@dataclass
class Report:
    """What the last update came to on this worker."""

    version: int = -1
    problems: list[tuple[str | None, str]] = field(default_factory=list)  # (tensor, what is wrong with it)
    seconds: dict[str, float] = field(default_factory=dict)
    applied: bool = False


class SharedMemoryTransport(WeightTransferEngine[ShardproofInitInfo, ShardproofUpdateInfo]):
    """Reads a payload from shared memory, proves its bytes, and loads it layer by layer in the checkpoint's format."""

    init_info_cls = ShardproofInitInfo
    update_info_cls = ShardproofUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.instance = secrets.token_hex(8)
        self.report = Report()
        self._loading = False
        self._renew = True
        self._ledger = WriteLedger()
        self._kernels: dict[Any, Any] = {}

    def init_transfer_engine(self, init_info: ShardproofInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Forget the last update. The model is not touched before the payload has been verified."""
        self.report = Report()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Verify a payload and load it."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShardproofUpdateInfo) -> None:
        """Verify every byte first; only a whole payload is loaded into the model.

        Nothing is raised for a bad payload: the report names what is wrong, and the trainer reads it.
        """
        address = SharedAddress.from_json(update_info.address)
        self.report.version = address.version
        self._renew = update_info.renew
        started = time.perf_counter()
        try:
            self.report.problems = _compare(address, update_info.manifest)
        except ShardproofError as error:  # the address leads to nothing of the trainer's
            self.report.problems = [(None, error.findings[0].message)]
        self.report.seconds["verify"] = time.perf_counter() - started
        if self.report.problems:
            return
        started = time.perf_counter()
        if self._renew and self.device.type == "cpu":
            self._kernels = take_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        self._loading = True
        self._ledger = expected_writes(self.model)
        with recording(self._ledger, meta):
            self.model.load_weights(read_shared(address))  # type: ignore[operator]
        self.report.seconds["load"] = time.perf_counter() - started

    def finish_weight_update(self) -> None:
        """Put the loaded layers in place, and look for parameters that were left out."""
        if not self._loading:
            return
        started = time.perf_counter()
        followers = tied_followers(self.model)
        self.report.problems += self._ledger.problems(without=followers)[:_MOST_PROBLEMS]
        self._close()
        if self._renew:
            repack(followers)
        self.report.seconds["finish"] = time.perf_counter() - started
        self.report.applied = True

    def abandon(self) -> None:
        """End an update that its trainer left: layers that were not loaded get their old tensors back."""
        if self._loading:
            self._close()

    def _close(self) -> None:
        self._loading = False
        self._ledger = WriteLedger()
        finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels.items():
            if method.moe_kernel is None:  # its layer was not loaded and keeps its weights
                method.moe_kernel = kernel
        self._kernels = {}

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """vLLM before 0.28 asks for it. The trainer writes to shared memory instead."""
        raise NotImplementedError


def _compare(
    address: SharedAddress, manifest: list[tuple[str, str, list[int], int | None]]
) -> list[tuple[str | None, str]]:
    """What in the memory is not as the manifest says: missing, twice, of another kind, other bytes."""
    wanted = {name: (dtype, tuple(shape), number) for name, dtype, shape, number in manifest}
    problems: list[tuple[str | None, str]] = []
    numbers = _digests(address) if any(row[2] is not None for row in wanted.values()) else {}
    for name, tensor in read_shared(address):
        expected = wanted.pop(name, None)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if expected is None:
            problem = "is not in the manifest, or arrived twice"
        elif (dtype, tuple(tensor.shape)) != expected[:2]:
            problem = f"arrived as {dtype} {tuple(tensor.shape)}, expected {expected[0]} {expected[1]}"
        elif expected[2] is not None and numbers[name] != expected[2]:
            problem = "differs from what was sent"
        else:
            continue
        problems.append((name, problem))
    problems += [(name, "did not arrive") for name in wanted]
    return problems[:_MOST_PROBLEMS]


def _digests(address: SharedAddress) -> dict[str, int]:
    """Digests of the bytes that lie in the memory, on a few cores: the trainer's ranks wait meanwhile."""
    tensors = sorted(read_shared(address), key=lambda item: -item[1].nbytes)
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS)) as pool:
        numbers = pool.map(lambda item: digest(item[1]), tensors)
        return {name: number for (name, _), number in zip(tensors, numbers, strict=True)}


def tied_followers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules whose parameters belong to an earlier module too: a head that is tied to the embedding."""
    owners: dict[int, str] = {}
    followers = {}
    for name, module in model.named_modules():
        kernel = get_layerwise_info(module).kernel_tensors
        params = kernel[0] if kernel is not None else module._parameters
        for param in params.values():
            if param is not None and owners.setdefault(id(param), name) != name:
                followers[name] = module
    return followers


def repack(followers: Mapping[str, torch.nn.Module]) -> None:
    """Make again what vLLM derives from a weight, for layers that share theirs with one that was loaded.

    The CPU build keeps a packed copy of every matrix. A tied head gets no weights of its own in an update, so vLLM
    leaves its copy as it was, and the server samples with the old head.
    """
    for module in followers.values():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(module)


def take_expert_kernels(model: torch.nn.Module) -> dict[Any, Any]:
    """Take the experts' kernels away, so that vLLM makes them anew from what is loaded; returns them.

    The CPU build packs experts when it makes their kernel. Where a kernel exists, an update leaves them unpacked, and
    it then reads unpacked weights as packed ones.
    """
    kernels = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            kernels[method] = method.moe_kernel
            method.moe_kernel = None
    return kernels


def expected_writes(model: torch.nn.Module) -> WriteLedger:
    """A ledger of all that a checkpoint has of a model whose reload has begun."""
    ledger = WriteLedger()
    skipped = getattr(meta, "SKIP_LOAD_TENSORS", meta.SKIP_TENSORS)  # 0.26 has one list
    for module_name, module in model.named_modules():
        if is_deferred(module):
            continue  # its scales are in no checkpoint that is not quantized
        # Vocabularies are padded to a multiple of 64 rows.
        rows = getattr(getattr(module, "shard_indices", None), "num_org_elements", None)
        for name, param in module._parameters.items():
            if param is not None and name not in skipped:
                spare = param.numel() - getattr(param, "weight_loader_numel", param.numel())
                ledger.expect(module_name, name, param, rows, spare)
    return ledger


def is_deferred(module: torch.nn.Module) -> bool:
    """Whether vLLM processes a layer after all others, whatever was loaded of it."""
    if hasattr(attention, "is_deferred_attention_layer"):  # since 0.28
        return attention.is_deferred_attention_layer(module)
    return isinstance(module, attention.Attention | attention.MLAAttention)


class WorkerExtension:
    """Methods that vLLM adds to its workers; `/collective_rpc` calls them by name."""

    weight_transfer_engine: Any
    vllm_config: Any

    def shardproof_facts(self) -> dict[str, Any]:
        """What a trainer must know before it sends anything."""
        engine, config = self.weight_transfer_engine, self.vllm_config
        text = config.model_config.hf_text_config
        return {
            "vllm": vllm.__version__,
            "backend": getattr(config.weight_transfer_config, "backend", None),
            "instance": getattr(engine, "instance", None),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "max_model_len": config.model_config.max_model_len,
            "served": config.model_config.served_model_name,
            "lora": config.lora_config is not None,
            "config": {key: value for key, value in text.to_dict().items() if _plain(value)},
        }

    def shardproof_report(self) -> dict[str, Any]:
        """What the last update came to."""
        return dict(vars(self.weight_transfer_engine.report))

    def shardproof_mark(self, label: str) -> dict[str, Any]:
        """Keep the label of the weights, for versions of vLLM that have no place for it, and count how often it was set."""
        self._shardproof_label, self._shardproof_marks = label, getattr(self, "_shardproof_marks", 0) + 1
        return self.shardproof_label()

    def shardproof_label(self) -> dict[str, Any]:
        """The label that was kept last, None since the start, and how many there were."""
        return {
            "label": getattr(self, "_shardproof_label", None),
            "marks": getattr(self, "_shardproof_marks", 0),
        }

    def shardproof_abandon(self) -> dict[str, Any]:
        """End whatever an earlier update has left open. Idempotent."""
        if isinstance(self.weight_transfer_engine, SharedMemoryTransport):
            self.weight_transfer_engine.abandon()
        left_open = getattr(self, "_weight_update_active", False)
        self._weight_update_active = False
        return {"left_open": left_open}


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


# Workers import this file for their extension, before they make a transport, installed as a plugin or not.
register()
