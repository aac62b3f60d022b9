"""Triton kernels that draw each row's next token and note it, in two launches where torch takes some fifteen.

A vocabulary is weighed in chunks side by side; then each row goes through its chunks' sums, and through the one chunk
in which its running sum passes its share of the total.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardproof.rollout.kernels import EARLY_LAUNCH, begin
from shardproof.rollout.progress import Progress

_CHUNK = 2048


@triton.jit
def _weigh_kernel(
    logits_ptr,  # [rows, size]
    peaks_ptr, sums_ptr,  # [rows, chunks], float32 and float64
    step_ptr,  # [1], moved on
    size, temperature,
    EARLY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    begin(EARLY)
    logits = tl.load(logits_ptr + row * size + entry, mask=entry < size, other=float("-inf"))
    scaled = logits.to(tl.float32) / temperature
    peak = tl.max(scaled, 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(peaks_ptr + at, peak)
    # Of a chunk that rules everything out the peak is minus infinity, too.
    weights = tl.where(scaled == float("-inf"), 0.0, tl.exp(scaled - peak))
    tl.store(sums_ptr + at, tl.sum(weights.to(tl.float64), 0))
    if row + chunk == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1)


@triton.jit
def _pick_kernel(
    logits_ptr,  # [rows, size]
    peaks_ptr, sums_ptr,  # [rows, chunks]
    uniform_ptr,  # [steps, rows], float64
    step_ptr,  # [1], of the next step
    tokens_ptr, logprobs_ptr,  # [steps, rows]
    ids_ptr, positions_ptr, done_ptr,  # [rows]
    stops_ptr,  # [stops]
    size, temperature, chunks, stops,
    EARLY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0), tl.num_programs(0)
    begin(EARLY)
    number = tl.arange(0, CHUNKS)
    peaks = tl.load(peaks_ptr + row * chunks + number, mask=number < chunks, other=float("-inf"))
    sums = tl.load(sums_ptr + row * chunks + number, mask=number < chunks, other=0.0)
    peak = tl.max(peaks, 0)
    sums *= tl.exp(peaks - peak).to(tl.float64)
    total = tl.sum(sums, 0)
    at = (tl.load(step_ptr) - 1) * rows + row
    aim = tl.load(uniform_ptr + at) * total
    passed = (tl.cumsum(sums, 0) <= aim) & (number < chunks)
    chunk = tl.minimum(tl.sum(passed.to(tl.int32), 0), chunks - 1)
    aim -= tl.sum(tl.where(number < chunk, sums, 0.0), 0)
    offset = tl.arange(0, CHUNK)
    entry = chunk * CHUNK + offset
    logits = tl.load(logits_ptr + row * size + entry, mask=entry < size, other=float("-inf"))
    scaled = logits.to(tl.float32) / temperature - peak
    weights = tl.exp(scaled)
    passed = tl.cumsum(weights.to(tl.float64), 0) <= aim
    # Rounding may have put the aim behind the last entry that can be drawn at all.
    last = tl.max(tl.where(weights > 0, offset, 0), 0)
    pick = tl.minimum(tl.sum(passed.to(tl.int32), 0), last)
    token = (chunk * CHUNK + pick).to(tl.int64)
    logprob = tl.sum(tl.where(offset == pick, scaled, 0.0), 0) - tl.log(total).to(tl.float32)
    tl.store(tokens_ptr + at, token)
    tl.store(logprobs_ptr + at, logprob)
    tl.store(ids_ptr + row, token)
    tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
    stop = tl.arange(0, STOPS)
    is_stop = tl.load(stops_ptr + stop, mask=stop < stops, other=-1) == token
    if tl.max(is_stop.to(tl.int32), 0) > 0:
        tl.store(done_ptr + row, 1)


def record(progress: Progress, temperature: float, logits: torch.Tensor) -> None:
    """Draw a token for each row of logits [rows, vocabulary], and note it."""
    rows, size = logits.shape
    chunks = triton.cdiv(size, _CHUNK)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(peaks, dtype=torch.float64)
    shared = {"EARLY": EARLY_LAUNCH, "launch_pdl": EARLY_LAUNCH, "CHUNK": _CHUNK}
    logits = logits.contiguous()
    _weigh_kernel[(rows, chunks)](
        logits, peaks, sums, progress.step, size, temperature, num_warps=4, **shared
    )
    _pick_kernel[(rows,)](
        logits, peaks, sums, progress.uniform, progress.step, progress.tokens, progress.logprobs,
        progress.ids, progress.positions, progress.done.view(torch.uint8), progress.stops,
        size, temperature, chunks, len(progress.stops),
        CHUNKS=triton.next_power_of_2(chunks), STOPS=triton.next_power_of_2(len(progress.stops)), num_warps=8,
        **shared,
    )  # fmt: skip
