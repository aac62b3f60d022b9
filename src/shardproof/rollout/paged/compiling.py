"""Compiling Triton kernels side by side, before they are needed: one after the other takes most of a run's first step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MOST_THREADS = 16


def compile_together(launches: list[Callable[[], object]], device: torch.device) -> int:
    """Compile the kernels that these functions launch, in threads; returns how many.

    Kernels that are not compiled yet are not launched: what the functions write must be worthless. Whatever fails here
    is left to the first real launch.
    """
    began = time.perf_counter()
    try:
        wanted = _wanted(launches)
    except Exception as error:
        logger.debug("kernels are compiled one by one (%s: %s)", type(error).__name__, error)
        return 0
    if not wanted:
        return 0
    logger.info("compiling %d kernels ...", len(wanted))
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        results = pool.map(lambda each: _compile(each[0], each[1], device), wanted)
        problems = [problem for problem in results if problem is not None]
    logger.info("compiled %d kernels in %.1f s", len(wanted), time.perf_counter() - began)
    for problem in problems:
        logger.debug("a kernel is compiled when it is launched (%s)", problem)
    return len(wanted) - len(problems)


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
