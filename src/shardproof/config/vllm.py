"""The settings of a vLLM server. Free of pydantic and torch: the recipe's schema and the engine both use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from shardproof.config.numbers import Count, Port, Processes, Seconds, Share, Tokens


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM runs and how long anybody waits for it. docs/vllm.md explains each setting."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    # "colocated": a child of rank 0 on a Unix socket; "server": over HTTP
    mode: Literal["colocated", "server"] = "colocated"
    url: str | None = None  # of a server that is already running; None: the run starts one
    host: str = "127.0.0.1"  # what a server that the run starts binds
    port: Port = 0
    allow_remote: bool = False  # bind or use an address that other machines reach
    transport: Literal["shared", "nccl", "ipc"] = (
        "shared"  # memory; vLLM's own, the other two, are experimental
    )
    lora: Literal["merge", "adapter"] = "merge"  # "merge": into the weights; "adapter": beside the base
    enforce_eager: bool | None = None  # None: eager on CPU, where compiling costs more than it gives
    max_model_len: Tokens | None = None
    tensor_parallel_size: Processes = 1
    gpu_memory_utilization: Share = 0.4  # the trainer has the rest
    kv_cache_gib: Count = 1  # on CPU
    args: list[str] = field(default_factory=list)  # further arguments of `vllm serve`
    log: str | None = None  # where a started server writes; None: a file that is deleted with it
    start_timeout_s: Seconds = 600.0
    sync_timeout_s: Seconds = 600.0
    request_timeout_s: Seconds = 1800.0
