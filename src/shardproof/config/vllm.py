"""The settings of a vLLM server. Free of pydantic and torch: the recipe's schema and the engine both use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from shardproof.config.numbers import Count, Port, Processes, Seconds, Share, Tokens


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM runs, and how long to wait for it. docs/vllm.md explains how the parts work together."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    mode: Literal["colocated", "server"] = "colocated"
    """`"colocated"`: a child process of rank 0 that listens on a Unix socket. `"server"`: a server reached
    over HTTP."""
    url: str | list[str] | None = None
    """Address of a server that is already running, `http://...` or `unix:/path`, or a list of addresses. By
    default the run starts its own."""
    replicas: Processes = 1
    """Servers that the run starts, each with a copy of the model. Completions do not depend on their number.
    """
    devices: list[str] = field(default_factory=list)
    """What each started server runs on: GPUs such as `"0"` or `"2,3"`, or on CPUs, cores such as `"0-7"`. One
    entry per replica. By default replicas get GPUs of their own if there are enough, and share CPUs."""
    host: str = "127.0.0.1"
    """Address that a server started by the run listens on."""
    port: Port = 0
    """Port that a server started by the run listens on; replicas use the ports that follow. 0: free ones."""
    allow_remote: bool = False
    """Allow an address that other machines can reach. vLLM's weight routes ask for no password: use it on
    trusted networks only."""
    transport: Literal["shared", "network", "nccl", "ipc"] = "shared"
    """How weights travel to the servers. `"shared"`: shared memory on one machine. `"network"`: to a
    receiver on each engine host (`shardproof receive`). vLLM's own `"nccl"` and `"ipc"` are experimental."""
    receivers: list[str] = field(default_factory=list)
    """For `transport = "network"`: the address of the receiver on the host of each `url`, `host:port`. Servers
    on one host name the same receiver."""
    secret_file: str | None = None
    """For `transport = "network"`: a file with the secret that trainer and receivers share."""
    lora: Literal["merge", "adapter"] = "merge"
    """How LoRA is served: adapters merged into the weights, or loaded beside the base model."""
    enforce_eager: bool | None = None
    """Run vLLM without compilation. By default on for CPUs, where compiling takes longer than it saves."""
    max_model_len: Tokens | None = None
    """Longest prompt plus completion that vLLM accepts, in tokens. By default vLLM decides; lower it to save
    KV cache."""
    tensor_parallel_size: Processes = 1
    """GPUs that each server splits its copy of the model over."""
    gpu_memory_utilization: Share = 0.4
    """Fraction of each GPU's memory for vLLM; the trainer uses the rest."""
    kv_cache_gib: Count = 1
    """Size of the KV cache on CPUs, in GiB. On GPUs `gpu_memory_utilization` decides."""
    args: list[str] = field(default_factory=list)
    """Further arguments of `vllm serve`, such as `["--max-num-seqs", "64"]`."""
    log: str | None = None
    """File for the output of a server that the run starts; replicas add their number to its name. By default a
    temporary file that is deleted with the server."""
    start_timeout_s: Seconds = 600.0
    """Longest wait for the server to start, in seconds."""
    sync_timeout_s: Seconds = 600.0
    """Longest time for one weight sync with all its checks, in seconds."""
    request_timeout_s: Seconds = 1800.0
    """Longest time that servers may need for one completion, in seconds; time spent waiting for a server is
    not counted."""

    @property
    def urls(self) -> list[str]:
        """The addresses in `url`; none if the run starts its servers."""
        return [self.url] if isinstance(self.url, str) else list(self.url or [])

    @property
    def num_servers(self) -> int:
        """Servers that the run uses, its own or others."""
        return len(self.urls) or self.replicas
