"""Fresh processes for each measurement, and their memory."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

# Read when a rank starts. One thread a rank: the ranks share the machine's cores. No accelerator: gloo on the CPU.
RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # On some virtual machines whose processor reports AMX, a bf16 matmul dies of an illegal instruction in oneDNN.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
}
_TIMEOUT = timedelta(minutes=30)
_INTERVAL_S = 0.01


def run_on_ranks(
    num_ranks: int, fn: Callable[..., Any], *args: Any, preload: Sequence[str] = ()
) -> list[Any]:
    """The JSON-able results of fn(*args) on that many new processes with one gloo group, in rank order.

    `fn` is a function at the top of a module. With `preload` the processes are forked from one that has imported these
    modules, and share their memory: many ranks then fit on a small machine.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in RANK_ENV.items()})
    with tempfile.TemporaryDirectory(prefix="shardproof-ranks-") as folder:
        if preload:
            multiprocessing.set_forkserver_preload(list(preload))
        torch.multiprocessing.start_processes(
            _run_rank,
            (num_ranks, folder, fn, args),
            nprocs=num_ranks,
            start_method="forkserver" if preload else "spawn",
        )
        return [json.loads(_result_file(folder, rank).read_text()) for rank in range(num_ranks)]


def _run_rank(rank: int, num_ranks: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    try:
        _result_file(folder, rank).write_text(json.dumps(fn(*args)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _result_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"result_{rank}.json"


def touch_memory(num_bytes: int) -> None:
    """Take that much memory, or this rank's share of what is free, write to each page, and give it back.

    A virtual machine's host backs a page when the guest first writes to it, at several times the price of a page fault;
    whoever is measured first would pay it for the others.
    """
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page_bytes
    num_bytes = max(page_bytes, min(num_bytes, int(0.7 * free / dist.get_world_size())))
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        pages = torch.frombuffer(memory, dtype=torch.uint8)[::page_bytes]
        pages.fill_(1)
        del pages


class AnonymousRise:
    """`peak`: by how many bytes this process's anonymous memory rose, at most, inside the block; sampled."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> AnonymousRise:
        self._start = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._note()

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._note()

    def _note(self) -> None:
        self.peak = max(self.peak, anonymous_bytes() - self._start)


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell a process's anonymous memory (RssAnon)")
