"""Decoding steps as CUDA graphs: one launch per step, over memory that does not move."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def can_capture(device: torch.device, rows: int) -> bool:
    """Whether steps of this number of rows are worth recording on this device."""
    return device.type == "cuda" and rows > 1


def capture(
    step: Callable[[], None], device: torch.device, rewind: Callable[[], object] = lambda: None
) -> Callable[[], None] | None:
    """A function that replays `step`; None for a step for which the host waits, which cannot be recorded.

    The step is run twice first, for what happens in a first run only, and `rewind` after each. A host waits, for example,
    for token counts of experts that run one by one. Whatever fails is raised, with the caller's stream as it was.
    """
    logger.info("recording the decoding step as a CUDA graph ...")
    before = torch.cuda.current_stream(device)
    try:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            step()
            rewind()
            waits = _host_waits(step)
            rewind()
        before.wait_stream(stream)
        if waits:
            logger.warning("decoding without CUDA graphs: this model synchronises with the host in each step")
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except Exception:
        # A capture that cannot even be ended leaves its own stream behind as the current one.
        torch.cuda.set_stream(before)
        raise
    return graph.replay


def _host_waits(step: Callable[[], None]) -> bool:
    """Whether the host waits for the device somewhere in a step, which is then not run to its end."""
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
