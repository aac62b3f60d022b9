"""Digests of a payload of which every rank holds slices, and no rank holds all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from shardproof.digest import digest
from shardproof.dist.collectives import exchange, sum_rows
from shardproof.export.image import Image
from shardproof.export.slices import Ranges

_WORD = 8  # bytes; digests of slices add up where slices begin and end between words


def digest_slices(image: Image, ranges: Ranges) -> dict[str, int]:
    """The digest of every tensor, from each rank's slices of it.

    A rank sums over the words that it has whole. Words of which two ranks have a part are few: each rank sends its part,
    and they are put together. Collective: every rank.
    """
    names = list(image.layout.places)
    index = {name: number for number, name in enumerate(names)}
    sums = torch.zeros(len(names), dtype=torch.int64)
    parts: list[tuple[int, int, int]] = []  # tensor, word, the bytes of it that are here
    for group in _whole_groups(image, ranges):
        sums[[index[name] for name in group]] = torch.tensor(image.digests(group), dtype=torch.int64)
    for name, found in ranges.items():
        if not _is_whole(image, name, found):
            raw = image.flat(name).view(torch.uint8)
            for low, high in (found * image.layout.places[name].dtype.itemsize).tolist():
                whole_low, whole_high = -(-low // _WORD), high // _WORD
                if whole_low < whole_high:
                    words = raw[whole_low * _WORD : whole_high * _WORD]
                    sums[index[name]] += digest(words, whole_low)
                parts += [(index[name], word, value) for word, value in _edges(raw, low, high)]
    rows = sum_rows(sums)
    broken: dict[tuple[int, int], int] = {}
    for tensor, word, value in itertools.chain.from_iterable(exchange(parts)):
        broken[tensor, word] = broken.get((tensor, word), 0) | value
    for (tensor, word), value in broken.items():
        whole = torch.frombuffer(bytearray(value.to_bytes(_WORD, "little")), dtype=torch.uint8)
        rows[tensor] += digest(whole, word)
    return dict(zip(names, rows.tolist(), strict=True))


def _is_whole(image: Image, name: str, ranges: np.ndarray) -> bool:
    return len(ranges) == 1 and tuple(ranges[0]) == (0, image.layout.places[name].numel)


def _whole_groups(image: Image, ranges: Ranges) -> Iterator[list[str]]:
    """Tensors that this rank has whole, those of one kind and size that follow each other together."""
    places = image.layout.places

    def key(name: str) -> tuple[bool, str, int]:
        mine = name in ranges and _is_whole(image, name, ranges[name])
        return mine, str(places[name].dtype), places[name].numel

    for (mine, _, numel), group in itertools.groupby(places, key):
        if mine and numel:
            yield list(group)


def _edges(raw: torch.Tensor, low: int, high: int) -> Iterator[tuple[int, int]]:
    """(word, its bytes that lie in [low, high)) for the words at both ends that do not lie in it whole."""
    for word in sorted({low // _WORD, (high - 1) // _WORD}):
        start, stop = max(low, word * _WORD), min(high, (word + 1) * _WORD)
        if stop - start < _WORD:
            value = int.from_bytes(bytes(raw[start:stop].tolist()), "little")
            yield word, value << (8 * (start - word * _WORD))
