"""Keys and values of conversations between their turns, found again by the tokens that they stand for.

An entry is used only where its tokens, compared one by one, are the first tokens of what is to be read: no id is trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from shardproof.model.families import MOVING_ROPE, rope_types

States = tuple[
    torch.Tensor, torch.Tensor
]  # keys and values of all layers, each [layers, heads, tokens, width]

GIB = 2**30
_CHUNK = 16  # tokens between two places at which an entry can be found
_CANDIDATES = 64  # entries with the same beginning that are compared, the newest first


def why_not(config: Any) -> str | None:
    """What about a model forbids to keep its keys and values between turns; None if nothing does."""
    kinds = {type(layer) for layer in DynamicCache(config=config.get_text_config(decoder=True)).layers}
    if kinds != {DynamicLayer}:
        return "not all of its layers attend to every earlier token"
    if rope_types(config) & MOVING_ROPE:
        return "its rotary embedding depends on the length of the context"  # and so would keys that were kept
    return None


def stack_rows(layers: Iterable[States], row: int, tokens: slice | torch.Tensor) -> States:
    """Copies of one row's keys and values at some tokens, of layers [rows, heads, length, width]; one tensor for all."""
    pairs = [(keys[row][:, tokens], values[row][:, tokens]) for keys, values in layers]
    return torch.stack([keys for keys, _ in pairs]), torch.stack([values for _, values in pairs])


@dataclass(eq=False)
class Prefix:
    """The keys and values of a sequence of tokens."""

    tokens: tuple[int, ...]
    num_read: int  # of the tokens, what the turn that left them had read; it wrote the others
    states: States
    wave: int = 0
    experts: np.ndarray | None = None  # of the tokens, [tokens, layers, chosen], where they are recorded
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(each.nbytes for each in self.states)


@dataclass(frozen=True)
class Found:
    """An entry whose first `length` tokens are the first tokens of a request."""

    prefix: Prefix
    length: int

    @property
    def experts(self) -> np.ndarray | None:
        """Those of the tokens that were found."""
        return None if self.prefix.experts is None else self.prefix.experts[: self.length]


class KeptTurns:
    """Entries of one version of the weights, up to a number of bytes.

    Requests come in waves: each conversation that goes on asks once per wave. What a wave did not ask for is given up
    first, the longest unused before others. What this wave or the one before left is never given up for a new entry: of
    more conversations than fit, those that have a place keep it, and the others read everything again.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._version: int | None = None
        self._wave = 0
        self._entries: dict[tuple[int, ...], Prefix] = {}  # the longest unused first
        self._index: dict[int, dict[int, Prefix]] = {}  # by a hash of all tokens up to the end of a chunk

    def __len__(self) -> int:
        return len(self._entries)

    def begin_wave(self) -> None:
        """Count the next round of requests."""
        self._wave += 1

    def at(self, version: int) -> KeptTurns:
        """This store, for weights of a version; entries of others are dropped."""
        if version != self._version:
            self.clear()
            self._version = version
        return self

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._index.clear()
        self.nbytes = 0

    def take(self, tokens: tuple[int, ...]) -> Found | None:
        """The entry with the longest common beginning, which must leave a token to read; None if there is none.

        An entry that is taken by the conversation that left it, a turn later, is no longer kept.
        """
        found = self._find(tokens)
        if found is not None and found.length >= found.prefix.num_read:
            self._drop(found.prefix)
        return found

    def keep(
        self, tokens: tuple[int, ...], num_read: int, states: States, experts: np.ndarray | None = None
    ) -> bool:
        """Keep the keys and values of a sequence, of which a turn read the first `num_read` tokens; False: no room."""
        entry = Prefix(tokens, num_read, states, self._wave, experts)
        if (old := self._entries.get(tokens)) is not None:
            self._drop(old)
        if not self._make_room(entry.nbytes):
            return False
        self._entries[tokens] = entry
        self.nbytes += entry.nbytes
        for key in _chunk_keys(tokens):
            self._index.setdefault(key, {})[id(entry)] = entry
        return True

    def _make_room(self, nbytes: int) -> bool:
        for entry in list(self._entries.values()):
            if self.nbytes + nbytes <= self.max_bytes or entry.wave >= self._wave - 1:
                break
            self._drop(entry)
        return self.nbytes + nbytes <= self.max_bytes

    def _find(self, tokens: tuple[int, ...]) -> Found | None:
        holders: dict[int, Prefix] = {}
        for key in _chunk_keys(tokens[:-1]):
            deeper = self._index.get(key)
            if not deeper:
                break
            holders = deeper
        best = None
        for entry in list(reversed(holders.values()))[:_CANDIDATES]:
            length = _common(entry.tokens, tokens[:-1])
            if length >= _CHUNK and (best is None or length > best.length):
                best = Found(entry, length)
        return best

    def _drop(self, entry: Prefix) -> None:
        del self._entries[entry.tokens]
        self.nbytes -= entry.nbytes
        for key in _chunk_keys(entry.tokens):
            holders = self._index.get(key, {})
            holders.pop(id(entry), None)  # a hash may have come twice
            if not holders:
                self._index.pop(key, None)


def _chunk_keys(tokens: Sequence[int]) -> Iterable[int]:
    """For every whole chunk, a hash of all tokens up to its end."""
    key = 0
    for end in range(_CHUNK, len(tokens) + 1, _CHUNK):
        key = hash((key, tokens[end - _CHUNK : end]))
        yield key


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many first tokens are the same."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    return next(at for at in range(limit) if one[at] != other[at])
