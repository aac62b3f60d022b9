"""Starting, finding and stopping a vLLM server. Only rank 0 does any of it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from shardproof.config.vllm import VllmSettings
from shardproof.errors import fail
from shardproof.rollout.vllm_client import Deadline, VllmClient
from shardproof.rollout.vllm_places import Place, places
from shardproof.rollout.vllm_plugin import BACKEND, EXTENSION, LOOPBACK
from shardproof.rollout.vllm_versions import Interface, installed_version, interface_of

logger = logging.getLogger(__name__)

_STOP_S = 10.0
_REPORT_EVERY_S = 30.0  # while a server starts
_LOG_LINES, _LOG_WIDTH = 12, 240
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ones vLLM has
# What torchrun sets for the trainer's ranks means something else to vLLM's processes.
_NOT_INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)

# Its processes are all on this host: what they open for each other listens on loopback, whatever the trainer's ranks use.
_INSIDE = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    LOOPBACK: "1",
}


@dataclass(frozen=True)
class Served:
    """What a server is asked to serve."""

    folder: Path  # with a config.json
    dtype: str
    device: str  # "cpu" or "cuda"
    adapter_rank: int | None = None  # of the adapters that it will serve; None: none
    sleeps: bool = False  # it can be asked to give up its memory
    records_experts: bool = False  # it returns the experts of each token
    finds_strings: bool = False  # it has a tokenizer, and ends completions at stop strings


class VllmServer:
    """A server that this process started, or one that was there already. It keeps its address when it is started again."""

    def __init__(self, settings: VllmSettings, served: Served, place: Place | None = None):
        self.settings = settings
        self.served = served
        self.place = place or places(settings, served.device)[0]
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self._folder: Path | None = None
        self._log_start = 0  # where the output of the last start begins in the log
        self._starting = threading.Lock()
        self._stopped = False
        self.client = VllmClient(self.place.url or "unix:")  # nobody listens there

    @property
    def is_ours(self) -> bool:
        """Whether this process starts and stops it."""
        return self.place.url is None

    @property
    def has_died(self) -> bool:
        """Whether it is ours and was started and is not running any more."""
        process = self.process
        return process is not None and process.poll() is not None

    @property
    def _which(self) -> str:
        return f" {self.place.name}" if self.settings.num_servers > 1 else ""

    def ensure_up(self, seconds: float | None = None) -> None:
        """Start the server if it is ours and not running, and wait until it answers.

        Raises after the setting for starts, or after `seconds` if there was nothing to start.
        """
        with self._starting:
            self._ensure_up(seconds)

    def _ensure_up(self, seconds: float | None) -> None:
        deadline, starts = Deadline(seconds or self.settings.start_timeout_s), self.num_starts
        began = reported = time.monotonic()
        while not self.client.is_up():
            if self._stopped:
                raise fail("R505", "rollout", "the run stopped its vLLM servers.")
            if self.is_ours and (self.process is None or self.has_died):
                if self.num_starts > starts:
                    code = self.process.returncode if self.process is not None else None
                    message = f"the vLLM server ended with exit code {code} while it started. It wrote:\n{self.log_tail()}"
                    raise fail("R505", "rollout", message)
                self._start()
                deadline = Deadline(self.settings.start_timeout_s)
            if deadline.over:
                tail = f" It wrote:\n{self.log_tail()}" if self.is_ours else ""
                message = f"no vLLM server answered at {self.client.url} within {deadline.seconds:g} s.{tail}"
                raise fail("R505", "rollout", message)
            now = time.monotonic()
            if now - reported >= _REPORT_EVERY_S:
                reported = now
                logger.info("still waiting for the vLLM server%s after %.0f s ...", self._which, now - began)
            time.sleep(0.1)

    def _start(self) -> None:
        version = installed_version()
        if version is None:
            raise fail(
                "R505",
                "rollout",
                "vLLM is not installed.",
                fix="pip install 'shardproof[vllm]', or `make vllm` for CPU",
            )
        options = arguments(self.settings, self.served, interface_of(version))
        self.kill()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="shardproof-vllm-"))  # mode 0700
        where = self._where()
        command = [sys.executable, "-m", "shardproof.rollout.vllm_child", str(os.getpid())]
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                [*command, *where, *options],
                env=environment(self.settings, self.served, self.place.devices),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.num_starts += 1
        on = f" on {self.place.devices}" if self.place.devices else ""
        logger.info("starting the vLLM server%s%s, which writes to %s ...", self._which, on, self.log_path)

    def _where(self) -> list[str]:
        """The arguments that say where the server listens, and the client for it."""
        assert self._folder is not None
        if self.settings.mode == "colocated":
            path = self._folder / "socket"
            path.unlink(missing_ok=True)  # one that was killed left it
            self.client = VllmClient(f"unix:{path}")
            return ["--uds", str(path)]
        self.client = VllmClient(f"http://{self.settings.host}:{self.place.port}")
        return ["--host", self.settings.host, "--port", str(self.place.port)]

    @property
    def log_path(self) -> Path:
        """Where a started server writes."""
        if self.place.log is not None:
            return Path(self.place.log)
        return (self._folder or Path(tempfile.gettempdir())) / "log"

    def log_tail(self) -> str:
        """The last lines that a started server wrote."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(self._log_start)
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return "(nothing)"
        telling = [line for line in lines if " ERROR " in line or line.startswith("RuntimeError")] or lines
        return "\n".join(line[:_LOG_WIDTH] for line in telling[-_LOG_LINES:])

    def kill(self) -> None:
        """End the process of a server that is ours, and everything it started; `ensure_up` starts it again."""
        process, self.process = self.process, None
        if process is not None:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)
            # Its own children are in its session; they do not always follow it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def begin_stop(self) -> None:
        """Ask a server that this process started to end, without waiting for it; `stop` waits."""
        self._stopped = True  # a start that another thread waits for ends
        process = self.process
        if process is not None and process.poll() is None:
            process.terminate()

    def stop(self) -> None:
        """End a server that this process started, for good. One that was there before is left."""
        self.begin_stop()
        with self._starting:
            self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def arguments(settings: VllmSettings, served: Served, interface: Interface) -> list[str]:
    """The arguments of `vllm serve` for a server whose weights come from a trainer. docs/vllm.md explains them."""
    backend = settings.transport if settings.transport in ("nccl", "ipc") else BACKEND
    found = [
        *("--model", str(served.folder), "--dtype", served.dtype),
        # Until the first sync there is nothing in it that looks like the model. An adapter needs its base.
        *("--load-format", "dummy" if served.adapter_rank is None else "auto"),
        *(() if served.finds_strings else ("--skip-tokenizer-init",)),
        *(["--enable-scale-out"] if interface.scale_out_flag else []),
        # Sampling is what a request says; the checkpoint's generation config has no part in it.
        *("--generation-config", "vllm"),
        *("--weight-transfer-config", f'{{"backend": "{backend}"}}'),
        *("--worker-extension-cls", EXTENSION, "--logprobs-mode", "processed_logprobs"),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
    ]
    found += ["--enforce-eager"] if _is_eager(settings, served) else []
    found += ["--enable-sleep-mode"] if served.sleeps else []
    found += ["--enable-return-routed-experts"] if served.records_experts else []
    if settings.max_model_len is not None:
        found += ["--max-model-len", str(settings.max_model_len)]
    if served.device != "cpu":
        found += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    else:
        # On CPUs vLLM 0.32 ends where it reads a prompt in several chunks for a request that has a seed.
        found += ["--no-enable-chunked-prefill"]
    if served.adapter_rank is not None:
        # Two adapters have a place: the one that is served, and the one that a sync brings.
        rank = min(r for r in _ADAPTER_RANKS if r >= served.adapter_rank)
        found += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]
    return [*found, *settings.args]


def _is_eager(settings: VllmSettings, served: Served) -> bool:
    return settings.enforce_eager if settings.enforce_eager is not None else served.device == "cpu"


def environment(settings: VllmSettings, served: Served, devices: str = "") -> dict[str, str]:
    """The environment of a started server; `devices` are the GPUs or CPU cores that it gets."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in _NOT_INHERITED and not key.startswith("TORCHELASTIC_")
    }
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        # The trainer's ranks need the cores too; threads that are bound to cores would keep them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if _is_eager(settings, served):
        # The sampler compiles helpers of its own even then, for 20 s before the first answer.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    if served.records_experts and served.device == "cpu":
        # On CPUs only this one returns experts, and it has to be asked for.
        defaults["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if settings.transport == "ipc":
        # vLLM pickles CUDA's handles on their way through HTTP.
        defaults["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    # The weight routes exist in this mode only.
    forced = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if devices:
        forced["VLLM_CPU_OMP_THREADS_BIND" if served.device == "cpu" else "CUDA_VISIBLE_DEVICES"] = devices
    if settings.transport != "nccl":  # whose other end may be on another host
        forced |= _INSIDE
    return defaults | inherited | forced
