"""What benchmarks/gpu.py measures of shardproof with long sequences and with large models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.gpu_timing import Save


def long_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    raise NotImplementedError


def memory_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    raise NotImplementedError
