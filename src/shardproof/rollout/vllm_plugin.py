"""What vLLM runs when one of its processes starts: the name of our weight transport becomes known to it."""

from __future__ import annotations

import os

BACKEND = "shardproof"
TRANSPORT = "shardproof.rollout.vllm_transport"
EXTENSION = f"{TRANSPORT}.WorkerExtension"


def register() -> None:
    """Register the transport with vLLM's factory; called in every process of a server, and more than once in some."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, TRANSPORT, "SharedMemoryTransport")
    _keep_to_isa_limit()


def _keep_to_isa_limit() -> None:
    """Let vLLM's own CPU kernels keep to the limit that ONEDNN_MAX_CPU_ISA sets for oneDNN's.

    On some virtual machines the processor reports AMX and dies of it; vLLM asks the processor alone.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    if limit and "AMX" not in limit and limit not in ("ALL", "DEFAULT"):
        import torch

        torch.cpu._is_amx_tile_supported = torch.cpu._is_amx_fp16_supported = lambda: False  # type: ignore[attr-defined]
