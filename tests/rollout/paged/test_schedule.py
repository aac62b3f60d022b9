"""Whatever comes, goes and is put back: rows write to blocks of their own, all are answered, and no block is lost."""

from __future__ import annotations

import random
from collections import deque

import pytest

from shardproof.rollout.paged.blocks import BLOCK, BlockPool, blocks_for
from shardproof.rollout.paged.schedule import Prompt, Row, Schedule

STEPS = 8


class Talk:
    """A schedule that is worked through as the decoder does, without a device."""

    def __init__(self, seed: int, num_blocks: int, most_rows: int):
        self.draw = random.Random(seed)
        self.pool = BlockPool(num_blocks + 1)
        self.ends = {}  # tokens that each request draws
        prompts = []
        for group in range(12):
            length, rows = self.draw.randint(1, 200), deque()
            for _ in range(self.draw.randint(1, 5)):
                index, limit = len(self.ends), self.draw.randint(1, 150)
                self.ends[index] = self.draw.randint(1, limit)
                rows.append(Row(index, length, limit))
            prompts.append(Prompt([group] * length, rows))
        self.schedule = Schedule(prompts, self.pool, most_rows)
        self.tokens = {row.index: len(prompt.tokens) for prompt in prompts for row in prompt.rows}
        self.entered, self.done = [], []

    def look(self) -> None:
        schedule = self.schedule
        over = [row for row in schedule.rows if row.launched >= self.ends[row.index]]
        schedule.leave(over)
        for row in over:
            schedule.give_back(row)
            self.done.append(row.index)
        for piece in schedule.next_pieces(self.draw.choice([40, 500])):
            assert len(piece.prompt.blocks) == blocks_for(len(piece.prompt.tokens))
            assert 0 <= piece.start < piece.stop <= len(piece.prompt.tokens)
        rows, copies = schedule.enter()
        assert all(source != target for source, target in copies)
        self.entered += [row.index for row, _ in rows if not row.drawn]
        for row in schedule.provide(STEPS):
            drawn = min(row.launched, self.ends[row.index])
            if drawn == self.ends[row.index]:
                self.done.append(row.index)
                continue
            row.drawn = [0] * drawn
            schedule.put_back(row, [0] * (row.num_prompt + drawn))
        self.check()
        for row in schedule.rows:
            row.launched = min(row.launched + STEPS, row.limit)

    def check(self) -> None:
        rows = self.schedule.rows
        assert [row.slot for row in rows] == list(range(len(rows)))
        written = []
        for row in rows:
            last = row.position + min(STEPS, row.left) - 1
            assert len(row.blocks) >= last // BLOCK + 1 or row.left == 0
            if row.left:
                written += [row.blocks[at] for at in range(row.position // BLOCK, last // BLOCK + 1)]
        assert len(set(written)) == len(written) and 0 not in written
        held = {block for row in rows for block in row.blocks}
        for block in written:
            assert sum(block in row.blocks for row in rows) == 1
        assert self.pool.num_free + len(held) <= self.pool.num_blocks - 1


@pytest.mark.parametrize(("num_blocks", "most_rows"), [(6, 3), (9, 16), (200, 5), (200, 64)])
def test_everything_is_answered_and_no_block_is_lost(num_blocks, most_rows):
    put_back = 0
    for seed in range(6):
        talk = Talk(seed, num_blocks, most_rows)
        for _ in range(3000):
            if talk.schedule.is_over:
                break
            talk.look()
        assert sorted(talk.done) == sorted(talk.ends)
        assert talk.pool.num_free == num_blocks
        put_back += talk.schedule.num_put_back
        if num_blocks == 200:
            assert talk.entered == sorted(talk.entered)
    assert bool(put_back) == (num_blocks < 200)
