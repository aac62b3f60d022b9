"""Triton kernels of the chunked head: what is done with a chunk's logits, in one pass over them forward and one backward.

Both are limited by bytes: the first reads each logit once, the second reads it and writes its gradient in its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_READ_BLOCK, _GRAD_BLOCK = 8192, 4096


@triton.jit
def _logits(z, temperature, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """(logits / temperature, tanh of the soft cap) of head outputs."""
    z = z.to(tl.float32)
    if SCALED:
        z *= scale
    bend = z
    if CAPPED:
        bend = 2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0
        z = bend * softcap
    return z / temperature, bend


@triton.jit
def _read_kernel(
    z_ptr,  # [rows, N]
    target_ptr,  # [rows], int64
    logp_ptr, norm_ptr, entropy_ptr,  # [rows], float32
    temperature, scale, softcap,
    N: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * N
    column = tl.arange(0, BLOCK)
    most = -float("inf")
    sums = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        here = start + column < N
        z = tl.load(z_ptr + start + column, mask=here, other=0.0)
        z, _ = _logits(z, temperature, scale, softcap, SCALED, CAPPED)
        new = tl.maximum(most, tl.max(tl.where(here, z, -float("inf")), 0))
        share = tl.where(here, tl.exp(z - new), 0.0)
        before = tl.exp(most - new)
        sums = sums * before + share
        if ENTROPY:
            products = products * before + share * z
        most = new
    total = tl.sum(sums, 0)
    norm = most + tl.log(total)
    target, _ = _logits(
        tl.load(z_ptr + tl.load(target_ptr + row)), temperature, scale, softcap, SCALED, CAPPED
    )
    tl.store(logp_ptr + row, target - norm)
    tl.store(norm_ptr + row, norm)
    if ENTROPY:
        tl.store(entropy_ptr + row, norm - tl.sum(products, 0) / total)


@triton.jit
def _differentiate_kernel(
    z_ptr,  # [rows, N]: head outputs, then their gradient
    target_ptr, norm_ptr, grad_logp_ptr, entropy_ptr, grad_entropy_ptr,  # [rows]
    temperature, scale, softcap,
    N: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * N
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < N
    z = tl.load(z_ptr + column, mask=here, other=0.0)
    z, bend = _logits(z, temperature, scale, softcap, SCALED, CAPPED)
    logp = z - tl.load(norm_ptr + row)
    prob = tl.exp(logp)
    grad_logp = tl.load(grad_logp_ptr + row)
    grad = tl.where(column == tl.load(target_ptr + row), grad_logp, 0.0) - prob * grad_logp
    if ENTROPY:
        grad -= prob * (logp + tl.load(entropy_ptr + row)) * tl.load(grad_entropy_ptr + row)
    grad *= scale / temperature
    if CAPPED:
        grad *= 1.0 - bend * bend
    tl.store(z_ptr + column, grad.to(z_ptr.dtype.element_ty), mask=here)


def read(
    z: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
    want_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log p(target), normaliser, entropy) of each row of head outputs; entropy is empty unless wanted."""
    rows, n = z.shape
    logps, norms = (z.new_empty(rows, dtype=torch.float32) for _ in range(2))
    entropy = z.new_empty(rows if want_entropy else 0, dtype=torch.float32)
    block = min(_READ_BLOCK, triton.next_power_of_2(n))
    _read_kernel[(rows,)](
        z, targets, logps, norms, entropy, float(temperature), float(scale), float(softcap or 1.0),
        N=n, SCALED=scale != 1.0, CAPPED=softcap is not None, ENTROPY=want_entropy, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return logps, norms, entropy


def differentiate(
    z: torch.Tensor,
    targets: torch.Tensor,
    norms: torch.Tensor,
    grad_logps: torch.Tensor,
    entropy: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
    want_entropy: bool,
) -> torch.Tensor:
    """The gradient of each row of head outputs, in their place."""
    rows, n = z.shape
    block = min(_GRAD_BLOCK, triton.next_power_of_2(n))
    _differentiate_kernel[(rows, triton.cdiv(n, block))](
        z, targets, norms, grad_logps, entropy, grad_entropy, float(temperature), float(scale), float(softcap or 1.0),
        N=n, SCALED=scale != 1.0, CAPPED=softcap is not None, ENTROPY=want_entropy, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return z
