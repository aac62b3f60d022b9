"""Parts of the kernels of paged attention: a program's piece of a context, the running softmax, and how pieces combine."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # below every score; its difference from itself is a number


@triton.jit
def piece_of(position, split, splits, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr):
    """(first cached token that counts, begin and end of this program's piece, how many programs have a piece)."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    start = first // BLOCK_T * BLOCK_T
    length = tl.maximum(tl.cdiv(tl.cdiv(position - start, splits), CHUNK), 1) * CHUNK
    pieces = tl.maximum(tl.cdiv(position - start, length), 1)
    at = start + split * length
    return first, at, tl.minimum(at + length, position), pieces


@triton.jit
def load_tokens(
    keys_ptr, values_ptr, block, head, at, first, end,
    KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """(keys, values, which of them count) of the cached tokens from `at` on, which stand in one block."""
    time, column = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_W)
    base = ((block.to(tl.int64) * KEY_HEADS + head) * PAGE + at % PAGE) * WIDTH
    offset = time[:, None] * WIDTH + column[None, :]
    there = (at + time >= first) & (at + time < end)
    # What stands behind the last token may be anything, and even a weight of 0 does not make a number of it.
    filled = there[:, None] & (column < WIDTH)[None, :]
    key = tl.load(keys_ptr + base + offset, mask=filled, other=0.0)
    value = tl.load(values_ptr + base + offset, mask=filled, other=0.0)
    return key, value, there


@triton.jit
def _score(products, scale, SOFTCAP: tl.constexpr):
    """Scores of query-key products, as exponents of 2."""
    if SOFTCAP > 0:
        # tanh(x) is 2 sigmoid(2x) - 1
        scores = (2.0 * tl.sigmoid(products * (2.0 * scale / SOFTCAP)) - 1.0) * (SOFTCAP * _LOG2_E)
    else:
        scores = products * (scale * _LOG2_E)
    return scores


@triton.jit
def _attend_block(query, key, value, there, scale, peak, norm, total, SOFTCAP: tl.constexpr):
    """The running softmax after more cached tokens, of which those `there` count."""
    scores = _score(tl.dot(query, tl.trans(key)), scale, SOFTCAP)
    scores = tl.where(there[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = tl.dot(weights.to(value.dtype), value, total * shrink[:, None])
    # Weights are kept per column, and added up once, at the end.
    return higher, norm * shrink[:, None] + weights, total


@triton.jit
def _begin_piece(
    query, new_key, new_value, sinks_at, has_head, is_first, scale,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The running softmax after the new token and the sinks for the first piece, and after nothing for the others."""
    peak = _score(tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1), scale, SOFTCAP)
    weight, sink_weight = tl.full([BLOCK_G], 1.0, tl.float32), tl.zeros([BLOCK_G], tl.float32)
    if SINKS:
        sinks = tl.load(sinks_at, mask=has_head, other=0.0).to(tl.float32) * _LOG2_E
        higher = tl.maximum(peak, sinks)
        weight, sink_weight = tl.exp2(peak - higher), tl.exp2(sinks - higher)
        peak = higher
    peak = tl.where(is_first, peak, _LOWEST)
    weight, sink_weight = tl.where(is_first, weight, 0.0), tl.where(is_first, sink_weight, 0.0)
    total = weight[:, None] * new_value.to(tl.float32)[None, :]
    norm = tl.where(tl.arange(0, BLOCK_T)[None, :] == 0, (weight + sink_weight)[:, None], 0.0)
    return peak, norm, total


@triton.jit
def attend_piece(
    query, new_key, new_value, sinks_ptr,  # of the new token
    ahead_key, ahead_value, ahead_there,  # the piece's first cached tokens, where they were asked for AHEAD
    next_block,  # of the tokens that come then
    keys_ptr, values_ptr, table_ptr, head, at, first, end, is_first, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """(highest score, sum of weights, weighted sum of values) of a piece of the context, from `at` to `end`."""
    group = tl.arange(0, BLOCK_G)
    peak, norm, total = _begin_piece(
        query, new_key, new_value, sinks_ptr + head * GROUP + group, group < GROUP, is_first, scale,
        SOFTCAP, SINKS, BLOCK_G, BLOCK_T,
    )  # fmt: skip
    if AHEAD:
        peak, norm, total = _attend_block(
            query, ahead_key, ahead_value, ahead_there, scale, peak, norm, total, SOFTCAP
        )
        at += BLOCK_T
    for now in range(at, end, BLOCK_T):
        key, value, there = load_tokens(
            keys_ptr, values_ptr, next_block, head, now, first, end, KEY_HEADS, WIDTH, PAGE, BLOCK_W, BLOCK_T
        )
        # Asked for one turn ahead, because the next keys' address depends on it.
        next_block = tl.load(table_ptr + (now + BLOCK_T) // PAGE, mask=now + BLOCK_T < end, other=0)
        peak, norm, total = _attend_block(query, key, value, there, scale, peak, norm, total, SOFTCAP)
    return peak, tl.sum(norm, 1), total


@triton.jit
def finish(
    peak, norm, total, out_ptr, sums_ptr, scalars_ptr, counters_ptr, item, split, splits, pieces,
    GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write a head group's result: at once if its context is one piece, else by the program that is the last to arrive."""
    group, column = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_W)
    out_ptr += item.to(tl.int64) * GROUP * WIDTH
    tile = group[:, None] * WIDTH + column[None, :]
    there = (group < GROUP)[:, None] & (column < WIDTH)[None, :]
    if pieces == 1:
        tl.store(out_ptr + tile, (total / norm[:, None]).to(out_ptr.dtype.element_ty), mask=there)
    else:
        first_piece = item.to(tl.int64) * splits
        piece = first_piece + split
        tl.store(sums_ptr + piece * GROUP * WIDTH + tile, total, mask=there)
        scalars_at = scalars_ptr + piece * 2 * GROUP + group
        tl.store(scalars_at, peak, mask=group < GROUP)
        tl.store(scalars_at + GROUP, norm, mask=group < GROUP)
        # All threads have written before one of them says so, and none reads before that one has seen all others.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + item, 1, sem="acq_rel", scope="gpu")
        if arrived == pieces - 1:
            for member in tl.static_range(GROUP):
                _combine(
                    out_ptr + member * WIDTH, sums_ptr + (first_piece * GROUP + member) * WIDTH,
                    scalars_ptr + first_piece * 2 * GROUP + member, pieces, GROUP, WIDTH, BLOCK_W, BLOCK_S,
                )  # fmt: skip
            tl.store(counters_ptr + item, 0)  # for the next launch


@triton.jit
def _combine(
    out_ptr, sums_ptr, scalars_ptr, pieces,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write the result of a head from the pieces of its context. They are read past the multiprocessor's own cache."""
    column = tl.arange(0, BLOCK_W)
    peak, norm = tl.full([], _LOWEST, tl.float32), tl.zeros([], tl.float32)
    total = tl.zeros([BLOCK_W], tl.float32)
    for start in range(0, pieces, BLOCK_S):
        piece = start + tl.arange(0, BLOCK_S)
        here = piece < pieces
        peaks = tl.load(scalars_ptr + piece * 2 * GROUP, mask=here, other=_LOWEST, cache_modifier=".cg")
        norms = tl.load(scalars_ptr + piece * 2 * GROUP + GROUP, mask=here, other=0.0, cache_modifier=".cg")
        sums = tl.load(
            sums_ptr + piece[:, None] * GROUP * WIDTH + column[None, :],
            mask=here[:, None] & (column < WIDTH)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(peaks, 0))
        shrink, weights = tl.exp2(peak - higher), tl.exp2(peaks - higher)
        norm = norm * shrink + tl.sum(norms * weights, 0)
        total = total * shrink + tl.sum(sums * weights[:, None], 0)
        peak = higher
    tl.store(out_ptr + column, (total / norm).to(out_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def put(
    keys_ptr, values_ptr, table_ptr, head, position, key, value, is_first,
    KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Store the new key and value at their position, by the first piece's program."""
    column = tl.arange(0, BLOCK_W)
    block = tl.load(table_ptr + position // PAGE).to(tl.int64)
    offset = ((block * KEY_HEADS + head) * PAGE + position % PAGE) * WIDTH + column
    tl.store(keys_ptr + offset, key, mask=(column < WIDTH) & is_first)
    tl.store(values_ptr + offset, value, mask=(column < WIDTH) & is_first)


@triton.jit
def _add_up(sums_at, there, shares, share_size, SHARES: tl.constexpr):
    """The sum of up to SHARES shares in float32; the loads of all of them are on their way at once."""
    total = tl.load(sums_at, mask=there, other=0.0).to(tl.float32)
    for share in tl.static_range(1, SHARES):
        total += tl.load(sums_at + share * share_size, mask=there & (share < shares), other=0.0).to(
            tl.float32
        )
    return total


@triton.jit
def _norm_and_rotate(
    own, other, weight_ptr, column, partner, sign, cos, sin, eps, WIDTH: tl.constexpr, NORM: tl.constexpr
):
    """Heads after their norm and their rotation, which takes of each state one other one, its partner."""
    if NORM:
        axis: tl.constexpr = len(own.shape) - 1
        scale = tl.rsqrt(tl.sum(own * own, axis, keep_dims=True) / WIDTH + eps)
        own *= scale * tl.load(weight_ptr + column).to(tl.float32)
        other *= scale * tl.load(weight_ptr + partner).to(tl.float32)
    return own * cos + sign * other * sin


@triton.jit
def new_states(
    sums_ptr, rows, row, head, shares, is_first, q_norm_ptr, k_norm_ptr, cos, sin, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    SHARES: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Query, key and value of a row's new token, from partial sums. Only the first piece has use for key and value."""
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    column, group = tl.arange(0, WIDTH), tl.arange(0, BLOCK_G)
    partner, sign = (column + WIDTH // 2) % WIDTH, tl.where(column < WIDTH // 2, -1.0, 1.0)
    size = rows * (HEADS + 2 * KEY_HEADS) * WIDTH
    states_at = sums_ptr + row * (HEADS + 2 * KEY_HEADS) * WIDTH
    heads_at = states_at + (head * GROUP + group)[:, None] * WIDTH
    has_head, wanted = (group < GROUP)[:, None], is_first & (column < WIDTH)
    query = _norm_and_rotate(
        _add_up(heads_at + column[None, :], has_head, shares, size, SHARES),
        _add_up(heads_at + partner[None, :], has_head, shares, size, SHARES),
        q_norm_ptr, column[None, :], partner[None, :], sign[None, :], cos[None, :], sin[None, :], eps, WIDTH, NORM,
    )  # fmt: skip
    key_at = states_at + (HEADS + head) * WIDTH
    key = _norm_and_rotate(
        _add_up(key_at + column, wanted, shares, size, SHARES),
        _add_up(key_at + partner, wanted, shares, size, SHARES),
        k_norm_ptr, column, partner, sign, cos, sin, eps, WIDTH, NORM,
    )  # fmt: skip
    value = _add_up(key_at + KEY_HEADS * WIDTH + column, wanted, shares, size, SHARES)
    return query, key, value
