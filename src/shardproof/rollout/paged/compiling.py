"""Compiling Triton kernels side by side, before they are needed: one after the other takes most of a run's first step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MOST_THREADS = 16


class Compiling:
    """Kernels that some functions launch, on their way to be compiled in threads.

    Kernels that are not compiled yet are not launched: what the functions write must be worthless, and nothing else may
    launch kernels meanwhile. Whatever fails is left to the first real launch.
    """

    def __init__(self, launches: list[Callable[[], object]], device: torch.device):
        self._began = time.perf_counter()
        self._results: list[Future[str | None]] = []
        try:
            wanted = _wanted(launches)
        except Exception as error:
            logger.debug("kernels are compiled one by one (%s: %s)", type(error).__name__, error)
            return
        if wanted:
            logger.info("compiling %d kernels ...", len(wanted))
            pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
            self._results = [pool.submit(_compile, kernel, data, device) for kernel, data in wanted]
            pool.shutdown(wait=False)

    def wait(self) -> int:
        """Wait for all; returns how many were compiled."""
        problems = [result.result() for result in self._results]
        for problem in problems:
            if problem is not None:
                logger.debug("a kernel is compiled when it is launched (%s)", problem)
        if problems:
            logger.info("compiled %d kernels in %.1f s", len(problems), time.perf_counter() - self._began)
        self._results = []
        return sum(problem is None for problem in problems)


def _wanted(launches: list[Callable[[], object]]) -> list[tuple[Any, str]]:
    """(kernel, what it is to be compiled for) of each kernel that is missing, as Triton's hook tells it."""
    from triton import knobs  # Triton is not everywhere

    found: dict[tuple[int, str], tuple[Any, str]] = {}

    def note(*, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        data = compile["specialization_data"]
        found[id(fn.jit_function), data] = fn.jit_function, data
        return True  # do not compile, and do not launch

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        for launch in launches:
            try:
                launch()
            except Exception as error:  # of code that takes something from a kernel that was not launched
                logger.debug("not all kernels are known ahead (%s: %s)", type(error).__name__, error)
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found.values())


def _compile(kernel: Any, data: str, device: torch.device) -> str | None:
    """Compile one kernel; returns what went wrong."""
    try:
        with torch.cuda.device(device):
            kernel.preload(data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
