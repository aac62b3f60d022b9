"""Keys and values of all layers in blocks of `BLOCK` tokens, in memory that does not move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.model.packing import to_device
from shardproof.rollout.kept import States
from shardproof.rollout.paged.blocks import BLOCK, blocks_for
from shardproof.shard.sleeping import SleepingMemory


@dataclass(frozen=True)
class CacheShape:
    """What one token's keys and values look like, the same in every layer."""

    layers: int
    heads: int  # of keys and values
    width: int  # of a head

    @staticmethod
    def of(config: Any) -> CacheShape:
        """That of a model with this config."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        return CacheShape(text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, width)

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one block, over all layers."""
        return 2 * self.layers * self.heads * BLOCK * self.width * dtype.itemsize


class PagedCache:
    """`keys` and `values` per layer, each [num_blocks, heads, BLOCK, width]. A block stands for the same tokens in all
    layers."""

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        sleeping: SleepingMemory | None = None,
    ):
        """A cache of zeros; in memory that can sleep, if that is given."""
        self.shape = shape
        self.num_blocks = num_blocks
        sizes = (shape.layers, 2, num_blocks, shape.heads, BLOCK, shape.width)
        if sleeping is None:
            self._storage = torch.empty(sizes, dtype=dtype, device=device)
        else:
            self._storage = sleeping.empty(sizes, dtype)
        self.clear()
        self.keys = [layer[0] for layer in self._storage]
        self.values = [layer[1] for layer in self._storage]

    def clear(self) -> None:
        """Write zeros: attention in plain torch multiplies what is behind a row's last token by 0, so it must be finite."""
        self._storage.zero_()

    @property
    def dtype(self) -> torch.dtype:
        return self._storage.dtype

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    def states(self, blocks: Sequence[int], num_tokens: int) -> States:
        """Copies of the keys and values of the first tokens in these blocks, each [layers, heads, tokens, width]."""
        chosen = self._index(blocks[: blocks_for(num_tokens)])
        found = self._storage.index_select(2, chosen).permute(1, 0, 3, 2, 4, 5)
        keys, values = found.flatten(3, 4)[:, :, :, :num_tokens].contiguous()
        return keys, values

    def put(self, blocks: Sequence[int], start: int, states: States) -> None:
        """Write keys and values of the tokens from position `start` on into a row's blocks."""
        places = torch.arange(start, start + states[0].shape[2], device=self.device)
        block, offset = self._index(blocks)[places // BLOCK], places % BLOCK
        for kind, each in enumerate(states):
            # Indices around a slice: their dimension, the tokens, comes first.
            self._storage[:, kind, block, :, offset] = each.permute(2, 0, 1, 3).to(self.dtype)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, in all layers."""
        if sources:
            copied = self._storage.index_select(2, self._index(sources))
            self._storage.index_copy_(2, self._index(targets), copied)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(blocks, dtype=torch.int64), self.device)
