"""Digests of a payload, each taken by one rank and known to all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardproof.dist.collectives import gather_rows


class DigestShare:
    """This rank's part of the digests: ranks divide each entry's tensors, or take one each in turn if there are few."""

    def __init__(self, rank: int, num_ranks: int):
        self._rank = rank
        self._num_ranks = num_ranks
        self._turn = 0  # the rank that takes the next tensor of an entry of few
        self._found: list[Sequence[int] | torch.Tensor] = []

    def next_entry(self, num_tensors: int) -> range:
        """Which of the next entry's tensors this rank digests."""
        mine = self._range(self._rank, self._turn, num_tensors)
        self._turn += num_tensors
        return mine

    def add(self, digests: Sequence[int] | torch.Tensor) -> None:
        """Take digests; those in a tensor are not waited for before all of them are needed."""
        if len(digests):
            self._found.append(digests)

    def _mine(self) -> list[int]:
        """What was added, in order, with one wait for the device."""
        lazy = [each for each in self._found if isinstance(each, torch.Tensor)]
        known = iter(torch.cat(lazy).tolist() if lazy else [])
        found: list[int] = []
        for each in self._found:
            found += [next(known) for _ in range(len(each))] if isinstance(each, torch.Tensor) else each
        return found

    def merged(self, names: Iterable[Sequence[str]]) -> dict[str, int]:
        """{name: digest} of the payload, from each entry's names in the order they were divided in.

        Collective: every rank; replicas have digested the same, and the first is believed.
        """
        owned: list[list[str]] = [[] for _ in range(self._num_ranks)]
        order: list[str] = []
        for entry in names:
            for rank in self._owners(len(order), len(entry)):
                owned[rank] += [entry[position] for position in self._range(rank, len(order), len(entry))]
            order += entry
        mine = self._mine()
        row = torch.zeros(1 + max(map(len, owned)), dtype=torch.int64)
        row[: 1 + len(mine)] = torch.tensor([self._rank, *mine])
        found: dict[str, int] = {}
        for rank, *digests in reversed(gather_rows(row).tolist()):
            found |= zip(owned[rank], digests, strict=False)
        return {name: found[name] for name in order}

    def _owners(self, turn: int, count: int) -> Sequence[int]:
        """The ranks that digest some of an entry's tensors."""
        return [(turn + place) % self._num_ranks for place in range(min(count, self._num_ranks))]

    def _range(self, rank: int, turn: int, count: int) -> range:
        if count < self._num_ranks:
            place = (rank - turn) % self._num_ranks
            return range(place, place + 1) if place < count else range(0)
        return range(count * rank // self._num_ranks, count * (rank + 1) // self._num_ranks)
