"""Decoding steps as CUDA graphs: one launch per step, over memory that does not move."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch


def can_capture(device: torch.device) -> bool:
    """Whether steps can be captured on this device."""
    return device.type == "cuda"


def new_pool(device: torch.device) -> Any:
    """Memory that graphs share: what one of them holds while it runs, another may hold while that one runs."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


@cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: torch holds a workspace for matmuls per stream."""
    return torch.cuda.Stream(device)


def capture(
    warm: Callable[[], None], step: Callable[[], None], device: torch.device, pool: Any
) -> Callable[[], None]:
    """A function that replays `step`. `warm` is run first, for what happens in a first run only.

    Whatever fails is raised; the caller's stream is the current one as before.
    """
    stream = _capturing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        warm()
        # Not `torch.cuda.graph`: it waits for the device and empties torch's cache of memory each time.
        graph.capture_begin(pool=pool)
        try:
            step()
        except BaseException:
            with suppress(RuntimeError):  # of a capture that is broken already
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay


def host_waits(step: Callable[[], None], device: torch.device) -> bool:
    """Whether the host waits for the device somewhere in a step, which is then not run to its end.

    A host waits, for example, for token counts of experts that run one by one. Such a step cannot be captured.
    """
    step()  # what waits in a first run only does not count
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False
