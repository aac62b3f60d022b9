"""Triton kernels that draw each row's next token and note it, in two launches where torch takes some fifteen.

A vocabulary is weighed in chunks side by side; then each row goes through its chunks' sums, and through the one chunk
in which its running sum passes its share of the total.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardproof.rollout.kernels import EARLY_LAUNCH, begin
from shardproof.rollout.paged.slots import Slots

# Tuned on an H200.
_CHUNK, _WARPS, _PICK_WARPS = 4096, 4, 8


@triton.jit
def _weigh_kernel(
    logits_ptr,  # [rows, size]
    peaks_ptr, sums_ptr,  # [rows, chunks], float32
    size, temperature,
    EARLY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    begin(EARLY)
    logits_ptr += row.to(tl.int64) * size
    logits = tl.load(logits_ptr + entry, mask=entry < size, other=float("-inf"))
    scaled = logits.to(tl.float32) / temperature
    peak = tl.max(scaled, 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(peaks_ptr + at, peak)
    # Of a chunk that rules everything out the peak is minus infinity, too.
    weights = tl.where(scaled == float("-inf"), 0.0, tl.exp(scaled - peak))
    tl.store(sums_ptr + at, tl.sum(weights, 0))


# Slots may begin anywhere in their memory: that makes no other kernel.
@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "positions_ptr", "outputs_ptr", "steps_ptr"])
def _pick_kernel(
    logits_ptr,  # [rows, size]
    peaks_ptr, sums_ptr,  # [rows, chunks]
    ids_ptr, positions_ptr, outputs_ptr, steps_ptr,  # [rows]
    uniform_ptr, tokens_ptr, logprobs_ptr,  # [lines, most]
    limits_ptr, done_ptr,  # [lines]
    stops_ptr,  # [stops]
    size, temperature, chunks, most, stops,
    EARLY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    begin(EARLY)
    number = tl.arange(0, CHUNKS)
    peaks = tl.load(peaks_ptr + row * chunks + number, mask=number < chunks, other=float("-inf"))
    sums = tl.load(sums_ptr + row * chunks + number, mask=number < chunks, other=0.0).to(tl.float64)
    line, step = tl.load(outputs_ptr + row), tl.load(steps_ptr + row)
    if tl.load(done_ptr + line) != 0:
        return
    peak = tl.max(peaks, 0)
    sums *= tl.exp(peaks - peak).to(tl.float64)
    total = tl.sum(sums, 0)
    at = line * most + step
    aim = tl.load(uniform_ptr + at) * total
    passed = (tl.cumsum(sums, 0) <= aim) & (number < chunks)
    chunk = tl.minimum(tl.sum(passed.to(tl.int32), 0), chunks - 1)
    aim -= tl.sum(tl.where(number < chunk, sums, 0.0), 0)
    pick, scaled = _pick_in_chunk(
        logits_ptr + row.to(tl.int64) * size, chunk * CHUNK, size, temperature, peak, aim, CHUNK
    )
    token = (chunk * CHUNK + pick).to(tl.int64)
    tl.store(tokens_ptr + at, token)
    tl.store(logprobs_ptr + at, scaled - tl.log(total).to(tl.float32))
    tl.store(ids_ptr + row, token)
    tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
    tl.store(steps_ptr + row, step + 1)
    stop = tl.arange(0, STOPS)
    is_stop = tl.load(stops_ptr + stop, mask=stop < stops, other=-1) == token
    if (tl.max(is_stop.to(tl.int32), 0) > 0) | (step + 1 >= tl.load(limits_ptr + line)):
        tl.store(done_ptr + line, 1)


@triton.jit
def _pick_in_chunk(logits_ptr, start, size, temperature, peak, aim, CHUNK: tl.constexpr):
    """(the chunk's first entry at which the running sum of weights passes `aim`, its logarithm of the weight)."""
    offset = tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + start + offset, mask=start + offset < size, other=float("-inf"))
    scaled = logits.to(tl.float32) / temperature - peak
    weights = tl.exp(scaled)
    passed = tl.cumsum(weights.to(tl.float64), 0) <= aim
    # Rounding may have put the aim behind the last entry that can be drawn at all.
    last = tl.max(tl.where(weights > 0, offset, 0), 0)
    pick = tl.minimum(tl.sum(passed.to(tl.int32), 0), last)
    return pick, tl.sum(tl.where(offset == pick, scaled, 0.0), 0)


def record(slots: Slots, temperature: float, logits: torch.Tensor) -> None:
    """Draw a token for each slot by logits [rows, vocabulary], and note it; slots whose output is done stay as they are."""
    rows, size = logits.shape
    chunks = triton.cdiv(size, _CHUNK)
    peaks, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    shared = {"EARLY": EARLY_LAUNCH, "launch_pdl": EARLY_LAUNCH, "CHUNK": _CHUNK}
    logits = logits.contiguous()
    _weigh_kernel[(rows, chunks)](logits, peaks, sums, size, temperature, num_warps=_WARPS, **shared)
    _pick_kernel[(rows,)](
        logits, peaks, sums, slots.ids, slots.positions, slots.outputs, slots.steps,
        slots.uniform, slots.tokens, slots.logprobs, slots.limits, slots.done.view(torch.uint8), slots.stops,
        size, temperature, chunks, slots.tokens.shape[1], len(slots.stops),
        CHUNKS=triton.next_power_of_2(chunks), STOPS=triton.next_power_of_2(len(slots.stops)), num_warps=_PICK_WARPS,
        **shared,
    )  # fmt: skip
