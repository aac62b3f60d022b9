"""A Triton kernel that dequantises weights in 4 bits: a byte is read once, and its two elements are written side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardproof.model.nf4_layout import BLOCK, CODE, code_bytes, width

_BYTES = 1024  # of a row, in one program
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _dequantise_kernel(
    packed_ptr,  # [rows, stride], uint8: codes, then scales in float32
    code_ptr,  # [16], float32
    out_ptr,  # [rows, columns]
    columns, stride, scales_at,
    OUT: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = at * 2 < columns
    codes = tl.load(packed_ptr + row * stride + at, mask=inside, other=0).to(tl.int32)
    scales_ptr = (packed_ptr + row * stride + scales_at).to(tl.pointer_type(tl.float32))
    scales = tl.load(scales_ptr + at // (BLOCK // 2), mask=inside, other=0.0)
    high = tl.load(code_ptr + (codes >> 4)) * scales
    low = tl.load(code_ptr + (codes & 15)) * scales
    place = tl.program_id(1) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + row * columns + place, tl.interleave(high, low).to(OUT), mask=place < columns)


def dequantise_on_gpu(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`nf4.plain_dequantise` in one pass."""
    rows = len(packed)
    assert packed.is_contiguous() and packed.shape[1] == width(columns)
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    if not out.numel():
        return out
    grid = (rows, triton.cdiv(code_bytes(columns), _BYTES))
    code = _code(packed.device)
    _dequantise_kernel[grid](
        packed,
        code,
        out,
        columns,
        packed.shape[1],
        code_bytes(columns),
        OUT=_KINDS[dtype],
        BYTES=_BYTES,
        BLOCK=BLOCK,
    )
    return out


_codes: dict[torch.device, torch.Tensor] = {}


def _code(device: torch.device) -> torch.Tensor:
    if device not in _codes:
        _codes[device] = torch.tensor(CODE, dtype=torch.float32, device=device)
    return _codes[device]
