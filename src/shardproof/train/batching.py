"""Batches: token lists with columns, and how they are spread over micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardproof.bounds import require_number
from shardproof.dist.collectives import combine
from shardproof.errors import fail

TokenColumn = list[torch.Tensor]
ExpertRows = list[torch.Tensor]  # of each sequence [tokens, layers with a router, experts per token]


class Batch:
    """This rank's sequences, possibly none, with named columns.

    A column has one value per sequence, or one per token. A sequence of n tokens has n - 1 predictions, so a token column
    has n - 1 values; one of n values belongs to the tokens themselves, and its first value is dropped.
    Several sequences may be parts of one conversation (`in_conversations`), which is weighed as one. A pair is such a
    conversation, and stays in one micro-batch (`kept_together`): its loss compares the two. Of a mixture of experts, the
    experts of each token may be given (`with_experts`): the policy is then scored and updated with these.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], **columns: Any):
        self.sequences = [list(map(int, sequence)) for sequence in sequences]
        for index, sequence in enumerate(self.sequences):
            if len(sequence) < 2:
                raise fail(
                    "C004", "batch", f"sequence {index} has {len(sequence)} tokens; it needs at least two."
                )
        self.conversations = list(range(len(self.sequences)))  # equal numbers: parts of one conversation
        self.experts: ExpertRows | None = None
        self.keeps_conversations = False  # in one micro-batch each
        self.columns: dict[str, TokenColumn] = {
            name: self._token_column(name, values) for name, values in columns.items() if values is not None
        }

    def _token_column(self, name: str, values: Any) -> TokenColumn:
        if len(values) != len(self.sequences):
            message = f"column {name!r} has {len(values)} entries for {len(self.sequences)} sequences."
            raise fail("C004", "batch", message)
        column = []
        for index, (sequence, value) in enumerate(zip(self.sequences, values, strict=True)):
            tensor = torch.as_tensor(value, dtype=torch.float32).detach().cpu()
            predictions = len(sequence) - 1
            if tensor.ndim == 0:
                tensor = tensor.expand(predictions)
            elif tensor.shape == (predictions + 1,):
                tensor = tensor[1:]
            elif tensor.shape != (predictions,):
                message = f"column {name!r} of sequence {index} has shape {tuple(tensor.shape)}, expected ({predictions},)."
                raise fail("C004", "batch", message)
            column.append(tensor)
        return column

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self.sequences]

    def masks(self) -> TokenColumn:
        """The `mask` column, or ones: which predictions count."""
        return self.columns.get("mask") or [torch.ones(n - 1) for n in self.lengths]

    def flat_mask(self) -> torch.Tensor:
        """`masks` in one row; empty without sequences."""
        return torch.cat([torch.empty(0), *self.masks()])

    def counts(self) -> torch.Tensor:
        """How many predictions count, per conversation: see `conversation_indices`."""
        return torch.zeros(len(self)).index_add(0, self.conversation_indices(), self.flat_mask())

    def with_column(self, name: str, values: TokenColumn) -> Batch:
        """A copy with one column added or replaced."""
        columns = {**self.columns, name: values}
        return self._like(self.sequences, self.conversations, columns, self.experts, self.keeps_conversations)

    def in_conversations(self, numbers: Sequence[int]) -> Batch:
        """A copy whose sequences belong to the conversations with these numbers; before, each was one of its own."""
        if len(numbers) != len(self):
            message = f"there are {len(numbers)} numbers of conversations for {len(self)} sequences."
            raise fail("C004", "batch", message)
        return self._like(self.sequences, list(numbers), self.columns, self.experts, self.keeps_conversations)

    def kept_together(self, keep: bool = True) -> Batch:
        """A copy of which no conversation is divided among micro-batches, or of which some may be."""
        return self._like(self.sequences, self.conversations, self.columns, self.experts, keep)

    def with_experts(self, experts: Sequence[Any]) -> Batch:
        """A copy with the experts of each sequence, [tokens, layers with a router, experts per token].

        The policy's routers choose these instead of their own; -1 leaves the choice for a token to its router.
        """
        rows = [torch.as_tensor(each, dtype=torch.int16) for each in experts]
        if [len(each) for each in rows] != self.lengths or any(each.ndim != 3 for each in rows):
            shapes = [list(each.shape) for each in rows]
            message = f"experts have the shapes {shapes}, expected [tokens, layers, experts per token] of each sequence."
            raise fail("C004", "batch", message)
        return self._like(self.sequences, self.conversations, self.columns, rows, self.keeps_conversations)

    def select(self, indices: Sequence[int]) -> Batch:
        """The sequences at `indices`, with their columns."""
        columns = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        conversations = [self.conversations[i] for i in indices]
        experts = None if self.experts is None else [self.experts[i] for i in indices]
        sequences = [self.sequences[i] for i in indices]
        return self._like(sequences, conversations, columns, experts, self.keeps_conversations)

    def units(self) -> list[list[int]]:
        """The indices of the sequences that stay in one micro-batch: those of a conversation, or each by itself."""
        if not self.keeps_conversations:
            return [[index] for index in range(len(self))]
        found: dict[int, list[int]] = {}
        for index, number in enumerate(self.conversations):
            found.setdefault(number, []).append(index)
        return list(found.values())

    @staticmethod
    def _like(
        sequences: list[list[int]],
        conversations: list[int],
        columns: Mapping[str, TokenColumn],
        experts: ExpertRows | None,
        keeps_conversations: bool,
    ) -> Batch:
        batch = Batch.__new__(Batch)
        batch.sequences = sequences
        batch.conversations = conversations
        batch.columns = dict(columns)
        batch.experts = experts
        batch.keeps_conversations = keeps_conversations
        return batch

    def sequence_indices(self) -> torch.Tensor:
        """Which sequence each prediction belongs to."""
        return numbered([length - 1 for length in self.lengths])

    def conversation_indices(self) -> torch.Tensor:
        """Which conversation each prediction belongs to: the place of its first sequence among all sequences."""
        first: dict[int, int] = {}
        places = [first.setdefault(number, place) for place, number in enumerate(self.conversations)]
        return torch.tensor(places, dtype=torch.int64)[self.sequence_indices()]

    def rows(self, flat: torch.Tensor) -> TokenColumn:
        """A row of all predictions cut into one tensor per sequence: the inverse of `flat`."""
        return list(flat.split([length - 1 for length in self.lengths])) if len(self) else []

    def flat(self, name: str) -> torch.Tensor:
        """A column of all predictions in one row."""
        return torch.cat(self.columns[name])


def numbered(counts: Sequence[int]) -> torch.Tensor:
    """0 as often as the first count says, then 1, and so on. torch's own way waits for its threads, which takes longer."""
    return torch.from_numpy(np.repeat(np.arange(len(counts)), np.asarray(counts, dtype=np.int64)))


def batch_facts(batch: Batch, micro_batch_tokens: int, share: int) -> dict[str, Any]:
    """What the other ranks must know of this rank's batch before it is spread; `share` ranks hold each sequence."""
    if micro_batch_tokens < 1:
        raise fail("C001", "batch", f"micro_batch_tokens={micro_batch_tokens} must be positive.")
    lengths = batch.lengths
    sizes = [sum(lengths[index] for index in unit) for unit in batch.units()]
    return {
        "sequences": len(batch),
        "pairs": len(sizes) < len(batch),
        "parts": _bins_needed(sizes, micro_batch_tokens),
        "digest": _digest(batch) if share > 1 else None,
        "experts": batch.experts is not None,
    }


def _digest(batch: Batch) -> str:
    """Of the sequences and of what goes through the model with them."""
    found = hashlib.sha256(str(batch.sequences).encode())
    for rows in batch.experts or ():
        found.update(rows.numpy().tobytes())
    return found.hexdigest()


def check_same_in_group(facts: Sequence[Mapping[str, Any]], share: int) -> None:
    """Raise unless the ranks of each sequence-parallel group have the same sequences."""
    for rank, row in enumerate(facts):
        first = rank - rank % share
        if row["digest"] != facts[first]["digest"]:
            message = f"its sequences differ from those of rank {first}, which is in the same sequence-parallel group."
            fix = "pass the same sequences on the ranks of a group"
            raise fail("C004", "batch", message, rank=rank, fix=fix)


def spread(
    batch: Batch, facts: Sequence[Mapping[str, Any]], *, one_by_one: bool
) -> list[tuple[Batch, list[int]]]:
    """(micro-batch, its sequences' indices in `batch`): balanced by tokens, the same number on every rank.

    `facts` are those of every rank. A rank with less to do gets empty micro-batches. `one_by_one` gives every sequence a
    micro-batch of its own, which conversations that are kept together cannot have: that raises on every rank.
    """
    lengths = batch.lengths
    if one_by_one and any(row["pairs"] for row in facts):
        message = (
            "this model's sequences cannot be packed, so the two of a pair cannot be compared in one pass."
        )
        raise fail(
            "T303", "batch", message, fix="use a model whose sequences can be packed; see docs/preferences.md"
        )
    num_bins = max(1, *(row["sequences" if one_by_one else "parts"] for row in facts))
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    units = batch.units()
    sizes = [sum(lengths[index] for index in unit) for unit in units]
    # Longest first, into the emptiest bin: within 4/3 of the best balance.
    for number in sorted(range(len(units)), key=lambda i: (-sizes[i], i)):
        target = loads.index(min(loads))
        bins[target] += units[number]
        loads[target] += sizes[number]
    # By length: attention takes sequences of one length together, and need not bring them together first.
    ordered = [sorted(indices, key=lambda i: (lengths[i], i)) for indices in bins]
    return [(batch.select(indices), indices) for indices in ordered]


def _bins_needed(lengths: list[int], capacity: int) -> int:
    """How many bins of `capacity` tokens hold the sequences, first fit; a longer sequence has a bin of its own."""
    loads: list[int] = []
    for length in sorted(lengths, reverse=True):
        for index, load in enumerate(loads):
            if load + length <= capacity:
                loads[index] += length
                break
        else:
            loads.append(length)
    return len(loads)


def check_batch(batch: Batch, *, vocabulary: int, max_length: int | None) -> None:
    """Raise for tokens outside the vocabulary and sequences longer than the model's positions."""
    for index, sequence in enumerate(batch.sequences):
        if max_length is not None and len(sequence) > max_length:
            message = (
                f"sequence {index} has {len(sequence)} tokens, but the model has only {max_length} positions."
            )
            raise fail("C004", "batch", message, rank=dist.get_rank(), fix="shorten the sequence")
        low, high = min(sequence), max(sequence)
        if low < 0 or high >= vocabulary:
            bad = low if low < 0 else high
            message = f"sequence {index} holds token {bad}, but the vocabulary has {vocabulary} tokens."
            raise fail("C004", "batch", message, rank=dist.get_rank())


def weigh(batch: Batch, how: str = "token_mean", *, constant: float | None = None, share: int = 1) -> Batch:
    """The batch with a `weights` column, computed over the global batch, so that splitting it changes nothing.

    `token_mean` gives every counted token of all ranks the same weight (DAPO), `sequence_mean` every sequence, or every
    conversation where one has several (GRPO), `constant` divides by a number that you choose (Dr. GRPO). `share` ranks
    hold each sequence (sequence parallelism). The weights of the first two sum to 1 over the global batch.

    Collective: every rank.
    """
    counts = batch.counts()
    mine = [float(counts.sum()), int((counts > 0).sum())]
    totals = combine("train_step", mine, lambda rows: [sum(column) for column in zip(*rows, strict=True)])
    num_tokens, num_conversations = totals[0] / share, totals[1] / share
    mask = batch.flat_mask()
    if how == "token_mean":
        return token_mean(batch, num_tokens)
    if how == "sequence_mean":
        per_conversation = counts.clamp(min=1.0)[batch.conversation_indices()]
        weights = mask / per_conversation / max(num_conversations, 1.0)
    elif how == "constant":
        if not constant:
            raise fail("C001", "batch", "how='constant' needs constant=, the number to divide by.")
        weights = mask / require_number("batch", "constant", constant, above=0)
    else:
        raise fail("C001", "batch", f"how={how!r} is not one of token_mean, sequence_mean, constant.")
    return batch.with_column("weights", batch.rows(weights))


def token_mean(batch: Batch, num_tokens: float) -> Batch:
    """The batch with a `weights` column in which each of the global batch's `num_tokens` counted tokens weighs the same."""
    return batch.with_column("weights", batch.rows(batch.flat_mask() / max(num_tokens, 1.0)))
