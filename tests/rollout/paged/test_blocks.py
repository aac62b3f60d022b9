"""Blocks are given out once, shared by count, and never block 0."""

from __future__ import annotations

import random

import pytest

from shardproof.rollout.paged.blocks import BlockPool, blocks_for


def test_random_takes_and_returns_lose_no_block():
    draw, pool, held = random.Random(0), BlockPool(40), []
    for _ in range(2000):
        if draw.random() < 0.5:
            num = draw.randint(0, 9)
            before = pool.num_free
            found = pool.take(num)
            assert (found is None) == (num > before)
            if found is None:
                assert pool.num_free == before
                continue
            assert 0 not in found and len(set(found)) == num
            assert not {block for blocks in held for block in blocks} & set(found)
            held.append(found)
            if draw.random() < 0.3:
                pool.share(found)
                held.append(list(found))
        elif held:
            pool.give_back(held.pop(draw.randrange(len(held))))
        assert pool.num_free == 39 - len({block for blocks in held for block in blocks})


def test_a_free_block_cannot_be_shared_or_given_back():
    pool = BlockPool(4)
    (block,) = pool.take(1) or []
    pool.give_back([block])
    with pytest.raises(ValueError, match="given back"):
        pool.give_back([block])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([block])
    assert [blocks_for(num) for num in (0, 1, 64, 65)] == [0, 1, 1, 2]
