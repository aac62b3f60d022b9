"""Which blocks of a paged cache are free, and how many hold each of the others. On the host only."""

from __future__ import annotations

from collections.abc import Iterable

BLOCK = 64  # tokens per block


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-num_tokens // BLOCK)


class BlockPool:
    """Counts who holds each block. Block 0 is never given out: slots without a request write there."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num: int) -> list[int] | None:
        """That many blocks, each with one holder; None, and nothing taken, if there are not so many."""
        if num > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each block."""
        for block in blocks:
            if not self._holders[block]:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._holders[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Count one holder less of each block; a block without holders is free."""
        for block in blocks:
            if not self._holders[block]:
                raise ValueError(f"block {block} was given back more often than it was taken")
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
