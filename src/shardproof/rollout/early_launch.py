"""Kernels that begin before the one ahead of them has ended (CUDA's programmatic dependent launch)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Kernels wait for the one before them inside, not at their start.
EARLY_LAUNCH = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next kernel start, and wait for the one before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
