"""Keys and values come back from the blocks they were put into."""

from __future__ import annotations

import torch

from shardproof.rollout.paged.cache import CacheShape, PagedCache

SHAPE = CacheShape(layers=3, heads=2, width=8)


def test_what_was_put_in_parts_comes_back_also_from_copied_blocks():
    cache = PagedCache(SHAPE, 10, torch.float32, torch.device("cpu"))
    assert cache.nbytes == 10 * SHAPE.block_bytes(torch.float32)
    keys, values = torch.randn(2, 3, 2, 150, 8)
    blocks = [7, 2, 5]
    cache.put(blocks, 0, (keys[:, :, :70], values[:, :, :70]))
    cache.put(blocks, 70, (keys[:, :, 70:], values[:, :, 70:]))
    cache.copy_blocks([7, 2], [1, 3])
    for places in (blocks, [1, 3, 5]):
        found = cache.states(places, 150)
        assert torch.equal(found[0], keys) and torch.equal(found[1], values)
    assert torch.equal(cache.keys[1][2, :, 3], keys[1, :, 67])
    assert torch.equal(cache.values[2][5, :, 0], values[2, :, 128])
