"""What vLLM runs when one of its processes starts: the name of our weight transport becomes known to it."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from typing import Any

BACKEND = "shardproof"
TRANSPORT = "shardproof.rollout.vllm_transport"
EXTENSION = f"{TRANSPORT}.WorkerExtension"
LOOPBACK = "SHARDPROOF_VLLM_LOOPBACK"  # set for servers that a run starts


def register() -> None:
    """Register the transport with vLLM's factory; called in every process of a server, and more than once in some.

    vLLM calls it through an entry point, which only an installed package has. The workers' extension calls it too.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, TRANSPORT, "SharedMemoryTransport")
    _keep_to_isa_limit()
    if os.environ.get(LOOPBACK) == "1":
        listen_on_loopback()


def listen_on_loopback() -> None:
    """Let a store of torch's that this process hosts listen on loopback alone; by itself it listens everywhere.

    Whoever reaches such a store can change what it holds. Versions of vLLM before 0.28 make one for their workers.
    """
    module = importlib.import_module("torch.distributed.rendezvous")
    plain = module.TCPStore
    if getattr(plain, "on_loopback", False):
        return

    def store(host_name: str, port: int, *args: Any, **options: Any) -> Any:
        if options.get("is_master") and options.get("master_listen_fd") is None:
            with contextlib.suppress(OSError):  # this process hosts a store there already, and joins it
                options["master_listen_fd"] = _listen(port)
        return plain(host_name, port, *args, **options)

    store.on_loopback = True  # type: ignore[attr-defined]
    module.TCPStore = store  # type: ignore[attr-defined]


def _listen(port: int) -> int:
    """A descriptor that listens on a port of loopback."""
    with socket.socket(socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
        return listener.detach()


def _keep_to_isa_limit() -> None:
    """Let vLLM's own CPU kernels keep to the limit that ONEDNN_MAX_CPU_ISA sets for oneDNN's.

    On some virtual machines the processor reports AMX and dies of it; vLLM asks the processor alone.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    if limit and "AMX" not in limit and limit not in ("ALL", "DEFAULT"):
        import torch

        torch.cpu._is_amx_tile_supported = torch.cpu._is_amx_fp16_supported = lambda: False  # type: ignore[attr-defined]
