"""Triton kernels that draw each row's next token and note it, in two launches where torch takes some fifteen.

A vocabulary is weighed in chunks side by side; then each row goes through its chunks' sums, and through the one chunk
in which its running sum passes its share of the total.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardproof.rollout.early_launch import EARLY_LAUNCH, begin
from shardproof.rollout.paged.slots import Slots

# Tuned on an H200: entries of the vocabulary per program that weighs them, and per sum.
_SPAN, _CHUNK = 4096, 1024
_WARPS, _PICK_WARPS = 4, 4
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1e30)  # below every logit but minus infinity


@triton.jit
def _weigh_kernel(
    logits_ptr,  # [rows, size]
    peaks_ptr,  # [rows, spans], float32: the highest logit
    sums_ptr,  # [rows, chunks], float32: of weights in relation to the span's peak
    size, inverse_temperature,
    EARLY: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    span, row = tl.program_id(0), tl.program_id(1)
    PARTS: tl.constexpr = SPAN // CHUNK
    part = tl.arange(0, PARTS)
    entry = span * SPAN + part[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    begin(EARLY)
    logits_ptr += row.to(tl.int64) * size
    logits = tl.load(logits_ptr + entry, mask=entry < size, other=float("-inf")).to(tl.float32)
    # Where everything is ruled out, minus infinity minus the peak is still minus infinity.
    peak = tl.maximum(tl.max(tl.max(logits, 1), 0), _LOWEST)
    scale = inverse_temperature * _LOG2_E
    weights = tl.exp2(logits * scale - peak * scale)
    at = row * tl.num_programs(0) + span
    tl.store(peaks_ptr + at, peak)
    tl.store(sums_ptr + at * PARTS + part, tl.sum(weights, 1))


# Slots may begin anywhere in their memory: that makes no other kernel.
@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "positions_ptr", "outputs_ptr", "steps_ptr"])
def _pick_kernel(
    logits_ptr,  # [rows, size]
    peaks_ptr, sums_ptr,  # [rows, spans], [rows, spans * parts]
    ids_ptr, positions_ptr, outputs_ptr, steps_ptr,  # [rows]
    uniform_ptr, tokens_ptr, logprobs_ptr,  # [lines, most]
    limits_ptr, done_ptr,  # [lines]
    stops_ptr,  # [stops]
    size, inverse_temperature, chunks, most, stops,
    EARLY: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    begin(EARLY)
    number = tl.arange(0, CHUNKS)
    there = number < chunks
    peaks = tl.load(peaks_ptr + (row * chunks + number) // PARTS, mask=there, other=_LOWEST)
    sums = tl.load(sums_ptr + row * chunks + number, mask=there, other=0.0).to(tl.float64)
    line, step = tl.load(outputs_ptr + row), tl.load(steps_ptr + row)
    if tl.load(done_ptr + line) != 0:
        return
    at = line * most + step
    uniform = tl.load(uniform_ptr + at)
    peak, scale = tl.max(peaks, 0), inverse_temperature * _LOG2_E
    sums *= tl.exp2((peaks - peak) * scale).to(tl.float64)
    total = tl.sum(sums, 0)
    aim = uniform * total
    passed = (tl.cumsum(sums, 0) <= aim) & there
    # Rounding may have put the aim behind the last chunk, or the last entry, that can be drawn at all.
    last = tl.max(tl.where(sums > 0, number, 0), 0)
    chunk = tl.minimum(tl.sum(passed.to(tl.int32), 0), last)
    aim -= tl.sum(tl.where(number < chunk, sums, 0.0), 0)
    pick, exponent = _pick_in_chunk(
        logits_ptr + row.to(tl.int64) * size, chunk * CHUNK, size, peak, scale, aim, CHUNK
    )
    token = (chunk * CHUNK + pick).to(tl.int64)
    tl.store(tokens_ptr + at, token)
    tl.store(logprobs_ptr + at, exponent * _LN_2 - tl.log(total).to(tl.float32))
    tl.store(ids_ptr + row, token)
    tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
    tl.store(steps_ptr + row, step + 1)
    stop = tl.arange(0, STOPS)
    is_stop = tl.load(stops_ptr + stop, mask=stop < stops, other=-1) == token
    if (tl.max(is_stop.to(tl.int32), 0) > 0) | (step + 1 >= tl.load(limits_ptr + line)):
        tl.store(done_ptr + line, 1)


@triton.jit
def _pick_in_chunk(logits_ptr, start, size, peak, scale, aim, CHUNK: tl.constexpr):
    """(the chunk's first entry at which the running sum of weights passes `aim`, its weight as a power of 2)."""
    offset = tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + start + offset, mask=start + offset < size, other=float("-inf"))
    exponents = logits.to(tl.float32) * scale - peak * scale
    weights = tl.exp2(exponents)
    passed = tl.cumsum(weights.to(tl.float64), 0) <= aim
    last = tl.max(tl.where(weights > 0, offset, 0), 0)
    pick = tl.minimum(tl.sum(passed.to(tl.int32), 0), last)
    return pick, tl.sum(tl.where(offset == pick, exponents, 0.0), 0)


def record(slots: Slots, temperature: float, logits: torch.Tensor) -> None:
    """Draw a token for each slot by logits [rows, vocabulary], and note it; slots whose output is done stay as they are."""
    rows, size = logits.shape
    spans, parts = triton.cdiv(size, _SPAN), _SPAN // _CHUNK
    peaks = torch.empty(rows, spans, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, spans * parts, dtype=torch.float32, device=logits.device)
    shared = {"EARLY": EARLY_LAUNCH, "launch_pdl": EARLY_LAUNCH, "CHUNK": _CHUNK}
    logits = logits.contiguous()
    _weigh_kernel[(spans, rows)](
        logits, peaks, sums, size, 1 / temperature, SPAN=_SPAN, num_warps=_WARPS, **shared
    )
    _pick_kernel[(rows,)](
        logits, peaks, sums, slots.ids, slots.positions, slots.outputs, slots.steps,
        slots.uniform, slots.tokens, slots.logprobs, slots.limits, slots.done.view(torch.uint8), slots.stops,
        size, 1 / temperature, spans * parts, slots.tokens.shape[1], len(slots.stops),
        PARTS=parts, CHUNKS=triton.next_power_of_2(spans * parts), STOPS=triton.next_power_of_2(len(slots.stops)),
        num_warps=_PICK_WARPS, **shared,
    )  # fmt: skip
