"""Matmuls whose rows do not depend on the rows beside them, in Triton: exact mode on CUDA.

Matrix units add up in the order of the inner dimension, whatever the number of rows in a tile. So a matmul with few rows
and one with many give the same bits if both use the same instruction and neither divides the inner dimension. A weight's
features are therefore always the instruction's first dimension, of 64, and rows its second, which may have any size: few
rows while decoding, many while training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _tile(num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """(tile of rows, tile of columns) of a program: neighbours share both, which are then read from the cache."""
    number = tl.program_id(0)
    width = GROUP * num_column_tiles
    first_tile = number // width * GROUP
    height = min(num_row_tiles - first_tile, GROUP)
    return first_tile + (number % width) % height, (number % width) // height


@triton.jit(do_not_specialize=["rows", "visits", "num_row_tiles"])
def _linear_kernel(
    x_ptr,  # [rows, k]
    weight_ptr,  # [experts, n, k]
    bias_ptr,  # [n]
    out_ptr,  # [rows, n]
    order_ptr,  # [rows]: visits of experts in the order of experts; unused without experts
    tile_expert_ptr, tile_first_ptr, tile_end_ptr,  # [tiles of rows]; unused without experts
    rows, n, k, x_stride, visits,  # visits of experts for each row of x; 0 without experts
    num_row_tiles, EXPERTS: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, MASK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tile, column_tile = _tile(num_row_tiles, tl.cdiv(n, BLOCK_N), GROUP)
    inner = tl.arange(0, BLOCK_K)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    place = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    here = place < rows
    target = place
    source = place
    if EXPERTS:
        place = tl.load(tile_first_ptr + row_tile) + tl.arange(0, BLOCK_R)
        here = place < tl.load(tile_end_ptr + row_tile)
        weight_ptr += tl.load(tile_expert_ptr + row_tile).to(tl.int64) * n * k
        target = tl.load(order_ptr + place, mask=here, other=0)
        source = target // visits
    x_at = x_ptr + source.to(tl.int64)[None, :] * x_stride + inner[:, None]
    weight_at = weight_ptr + column.to(tl.int64)[:, None] * k + inner[None, :]
    x_mask, weight_mask = here[None, :], (column < n)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for at in range(0, k, BLOCK_K):
        if MASK_K:
            inside = at + inner < k
            weight = tl.load(weight_at + at, mask=weight_mask & inside[None, :], other=0.0)
            x = tl.load(x_at + at, mask=x_mask & inside[:, None], other=0.0)
        else:
            weight = tl.load(weight_at + at, mask=weight_mask, other=0.0)
            x = tl.load(x_at + at, mask=x_mask, other=0.0)
        total = tl.dot(weight, x, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + target.to(tl.int64)[None, :] * n + column[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=weight_mask & here[None, :])


@triton.jit(do_not_specialize=["rows"])
def _linear_many_kernel(
    x_desc,  # [rows, k]
    weight_desc,  # [n, k]
    bias_ptr,  # [n]
    out_ptr,  # [rows, n]
    rows, n, k,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tile, column_tile = _tile(tl.cdiv(rows, BLOCK_R), tl.cdiv(n, BLOCK_N), GROUP)
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for at in range(0, k, BLOCK_K):
        x = x_desc.load([row_tile * BLOCK_R, at])
        total = tl.dot(weight_desc.load([column_tile * BLOCK_N, at]), x.T, total)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[:, None]
    mask = (column < n)[:, None] & (row < rows)[None, :]
    out_at = out_ptr + row.to(tl.int64)[None, :] * n + column[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tile: Tile | None = None
) -> torch.Tensor:
    """x @ weight.T + bias for [rows, k] and [n, k]; each row's bits depend on that row alone, whatever the `tile`."""
    (rows, k), n = x.shape, weight.shape[0]
    x, weight = x if x.stride(1) == 1 else x.contiguous(), weight.contiguous()
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = tile or _tile_for(rows, n, k, x)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.features),)
    some = bias if bias is not None else weight
    if tile.by_descriptor:
        x_desc = TensorDescriptor.from_tensor(x, [tile.rows, tile.inner])
        weight_desc = TensorDescriptor.from_tensor(weight, [tile.features, tile.inner])
        _linear_many_kernel[grid](
            x_desc, weight_desc, some, out, rows, n, k, BIAS=bias is not None, **tile.options
        )
        return out
    _linear_kernel[grid](
        x, weight, some, out, *[_no_table(x.device)] * 4, rows, n, k, x.stride(0), 0, triton.cdiv(rows, tile.rows),
        EXPERTS=False, BIAS=bias is not None, PRECISION="ieee", MASK_K=k % tile.inner != 0, **tile.options,
    )  # fmt: skip
    return out


def expert_linear(
    x: torch.Tensor,  # [tokens, k], or one row per visit
    weights: torch.Tensor,  # [experts, n, k]
    visits: Visits,
    per_row: int,  # visits of each row of x
) -> torch.Tensor:
    """[visits, n]: for each visit of an expert, its row of x times the expert's weight."""
    _, n, k = weights.shape
    out = torch.empty(len(visits.order), n, dtype=x.dtype, device=x.device)
    size, inner = visits.tile_rows, 128 if visits.tile_rows <= 32 and x.element_size() == 2 else 64
    num_tiles = len(visits.tile_expert)
    _linear_kernel[(num_tiles * triton.cdiv(n, 64),)](
        x, weights, weights, out, visits.order, visits.tile_expert, visits.tile_first, visits.tile_end,
        len(visits.order), n, k, x.stride(0), per_row, num_tiles,
        EXPERTS=True, BIAS=False, PRECISION="ieee", MASK_K=k % inner != 0,
        BLOCK_N=64, BLOCK_R=size, BLOCK_K=inner, GROUP=8, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


class Visits:
    """Which token goes to which expert, sorted by expert, in tiles that each have one expert. Never waits for the device."""

    def __init__(self, chosen: torch.Tensor, num_experts: int):
        num, device = chosen.numel(), chosen.device
        experts, order = torch.sort(chosen.reshape(-1).to(torch.int32), stable=True)
        self.order = order.to(torch.int32)
        numbers = torch.arange(num_experts, dtype=torch.int32, device=device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        firsts = torch.searchsorted(experts, numbers, out_int32=True)
        self.tile_rows = 128 if num >= 128 * num_experts else 64 if num >= 32 * num_experts else 16
        tiles = (ends - firsts + self.tile_rows - 1) // self.tile_rows
        last = tiles.cumsum(0, dtype=torch.int32)
        most = triton.cdiv(num, self.tile_rows) + num_experts  # tiles behind the last one have no rows
        number = torch.arange(most, dtype=torch.int32, device=device)
        expert = torch.searchsorted(last, number, right=True, out_int32=True).clamp(max=num_experts - 1)
        at = firsts[expert] + (number - (last - tiles)[expert]) * self.tile_rows
        self.tile_expert, self.tile_first, self.tile_end = expert, at, ends[expert]


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes. It changes the time that a matmul takes and none of its bits."""

    rows: int
    features: int
    inner: int
    num_warps: int
    num_stages: int
    by_descriptor: bool = False  # both operands are fetched by the tensor memory unit

    @property
    def options(self) -> dict[str, int]:
        """As a kernel takes it."""
        blocks = {"BLOCK_R": self.rows, "BLOCK_N": self.features, "BLOCK_K": self.inner, "GROUP": 8}
        return blocks | {"num_warps": self.num_warps, "num_stages": self.num_stages}


# As measured on an H200 with the shapes of a 1.7B model; the largest that keeps all multiprocessors busy is taken.
TILES = (
    Tile(256, 128, 64, 8, 3, by_descriptor=True),
    Tile(128, 128, 64, 8, 4, by_descriptor=True),
    Tile(64, 64, 64, 4, 4),
    Tile(32, 64, 128, 4, 4),
)
_FEW_ROWS, _FLOAT32 = Tile(16, 64, 128, 4, 4), Tile(16, 64, 32, 4, 2)


def _tile_for(rows: int, n: int, k: int, x: torch.Tensor) -> Tile:
    if x.element_size() != 2:
        return _FLOAT32
    if rows <= _FEW_ROWS.rows:
        return _FEW_ROWS
    # The tensor memory unit wants rows that begin at multiples of 16 bytes.
    aligned = k % 64 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    enough = _num_processors(x.device)
    for tile in TILES:
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.features)
        if programs >= enough and tile.rows < 2 * rows and (aligned or not tile.by_descriptor):
            return tile
    return TILES[-1]


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _no_table(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)
