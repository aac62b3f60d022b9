"""How a weight in 4 bits lies in its bytes: the values of the codes, and the length of a row. See `nf4`."""

from __future__ import annotations

BLOCK = 64
# The 16 values of NF4: quantiles of a normal distribution, scaled to [-1, 1], with an exact 0 (QLoRA, appendix E).
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def code_bytes(columns: int) -> int:
    """Bytes of a row's codes; the scales behind them begin at a multiple of four."""
    return -(-columns // 8) * 4


def num_blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def width(columns: int) -> int:
    """Bytes of a row: 0.5625 per element where columns are a multiple of 64."""
    return code_bytes(columns) + 4 * num_blocks(columns)
