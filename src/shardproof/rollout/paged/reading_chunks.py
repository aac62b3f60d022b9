"""Prompts laid end to end in chunks, with where each of their tokens stands: in its prompt, in the chunk, in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardproof.model.packing import to_device
from shardproof.rollout.paged.blocks import BLOCK, blocks_for


@dataclass(frozen=True)
class Reading:
    """Tokens to be read from position `start` on.

    `blocks` are those of the whole sequence, from position 0 on; what is before `start` is in them already.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class Piece:
    """A part of a reading that goes into one chunk."""

    number: int  # of the reading
    reading: Reading
    is_last: bool

    @property
    def length(self) -> int:
        return len(self.reading.tokens)

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.reading.start + self.length


def queries_per_program(width: int) -> int:
    """How many tokens a program of attention takes; wide heads leave room for fewer."""
    return 64 if width > 128 else 128


def pack(readings: Sequence[Reading], chunk_tokens: int) -> Iterator[list[Piece]]:
    """Pieces of the readings, in order, in chunks of up to `chunk_tokens` tokens."""
    chunk: list[Piece] = []
    room = chunk_tokens
    for number, reading in enumerate(readings):
        if not reading.tokens:
            raise ValueError("a reading needs at least one token")
        at, total = 0, len(reading.tokens)
        while at < total:
            if room == 0:
                yield chunk
                chunk, room = [], chunk_tokens
            size = min(room, total - at)
            part = Reading(reading.tokens[at : at + size], reading.start + at, reading.blocks)
            at, room = at + size, room - size
            chunk.append(Piece(number, part, at == total))
    if chunk:
        yield chunk


class Chunk:
    """Packed tokens on the device, all from one copy for which the host does not wait.

    Of each token: `ids`, `positions`, `places` (number of its block times the tokens of a block, plus the place in it)
    and `tails` (behind a piece's last token, the places up to the end of its block; else 0). `tables` has the blocks of
    each piece, the last one again where they are fewer than others'. `tiles` says for each program of attention its piece,
    its first packed token, that token's position, and its tokens, up to `queries_per_program`. `last` are the packed tokens
    after which logits are wanted: those with which readings end.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device, width: int):
        queries = queries_per_program(width)
        self.pieces = pieces
        self.spans: list[tuple[int, int]] = []  # (first, past the last) packed token of each piece
        # Programs of attention take two blocks at a time.
        longest = max(blocks_for(piece.end) for piece in pieces)
        tables = np.zeros((len(pieces), longest + longest % 2), np.int32)
        positions, places, tails, tiles, at = [], [], [], [], 0
        for row, piece in enumerate(pieces):
            num, end = piece.length, piece.end
            tables[row, : blocks_for(end)] = piece.reading.blocks[: blocks_for(end)]
            tables[row, blocks_for(end) :] = tables[row, blocks_for(end) - 1]
            position = np.arange(piece.reading.start, end, dtype=np.int32)
            positions.append(position)
            places.append(tables[row, position // BLOCK] * BLOCK + position % BLOCK)
            tails.append(np.zeros(num, np.int32))
            tails[-1][-1] = -end % BLOCK
            tiles += [
                (row, at + first, piece.reading.start + first, min(queries, num - first))
                for first in range(0, num, queries)
            ]
            self.spans.append((at, at + num))
            at += num
        # Programs with much to do first: the last ones to start should be short.
        tiles.sort(key=lambda tile: -tile[2])
        self.max_position = max(piece.end for piece in pieces) - 1
        last = [stop - 1 for piece, (_, stop) in zip(pieces, self.spans, strict=True) if piece.is_last]
        ids = np.concatenate([np.asarray(piece.reading.tokens, np.int32) for piece in pieces])
        parts = [
            ids, np.concatenate(positions), np.concatenate(places), np.concatenate(tails), tables,
            np.asarray(tiles, np.int32), np.asarray(last, np.int32),
        ]  # fmt: skip
        # Each part begins at a multiple of 16 bytes, as kernels like it.
        room = [np.pad(part.ravel(), (0, -part.size % 4)) for part in parts]
        packed = to_device(torch.from_numpy(np.concatenate(room)), device)
        self.ids, self.positions, self.places, self.tails, self.tables, self.tiles, self.last = (
            each[: part.size].view(part.shape)
            for each, part in zip(packed.split([part.size for part in room]), parts, strict=True)
        )
