"""Pairs of completions, of which one is the better: batches that losses compare them in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from shardproof.dist.collectives import exchange
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.data import Prompt, Share
from shardproof.rl.experience import Experience
from shardproof.rl.offline import mean_length, measured
from shardproof.rl.scorers import Scorers
from shardproof.train.batching import Batch
from shardproof.train.scoring import scoring_of

_CHUNK = 256  # rows that the reference scores at a time, before the first step


def pair_batch(prompts: Sequence[Prompt], ld_alpha: float | None = None) -> Batch:
    """Two sequences per prompt, its better completion and its worse one, which stay in one micro-batch.

    Columns: `mask` of the completions' tokens, `side` (1: better, -1: worse), and with `ld_alpha` an `ld_factor` of it
    on tokens beyond the length of the shorter completion.
    """
    sequences, masks, sides, factors, numbers = [], [], [], [], []
    for number, prompt in enumerate(prompts):
        shared = min(len(prompt.completion), len(prompt.rejected))
        for side, tokens in ((1.0, prompt.completion), (-1.0, prompt.rejected)):
            sequences.append((*prompt.tokens, *tokens))
            masks.append((*[0.0] * len(prompt.tokens), *[1.0] * len(tokens)))
            sides.append(side)
            beyond = 1.0 if ld_alpha is None else ld_alpha
            factors.append((*[1.0] * (len(prompt.tokens) + shared), *[beyond] * (len(tokens) - shared)))
            numbers.append(number)
    more = {} if ld_alpha is None else {"ld_factor": factors}
    return Batch(sequences, mask=masks, side=sides, **more).in_conversations(numbers).kept_together()


class PairData:
    """Pairs, scored by the reference in every step, or by a table that it wrote before the first."""

    def __init__(self, algorithm: Algorithm, scorers: Scorers, share: Share):
        self._algorithm, self._scorers, self._share = algorithm, scorers, share
        self._table: dict[bytes, tuple[float, float]] | None = None

    def precompute(self, sources: Sequence[Sequence[Prompt]]) -> None:
        """Score all prompts with the reference once, which is not asked again. Collective: every rank.

        Memory: two numbers per pair on every rank.
        """
        table: dict[bytes, tuple[float, float]] = {}
        size = _CHUNK * self._share.num_ranks
        for prompts in sources:
            for start in range(0, len(prompts), size):
                new = {key_of(prompt): prompt for prompt in prompts[start : start + size]}
                table |= self._reference_sums({key: new[key] for key in new if key not in table})
        self._table, self._scorers = table, replace(self._scorers, reference=None)

    def _reference_sums(self, prompts: Mapping[bytes, Prompt]) -> dict[bytes, tuple[float, float]]:
        """What the reference says of both completions of each pair. Collective: every rank."""
        batch = self._scorers.scored(self._batch(self._share.of(list(prompts.values()))), ["ref_logps"])
        rows = self._share.once(exchange([float(each) for each in self._shares(batch, "ref_logps")]))
        found = {}
        for index, key in enumerate(prompts):  # dealt to the groups of ranks one by one
            at = 2 * (index // len(rows))
            better, worse = rows[index % len(rows)][at : at + 2]
            found[key] = (better, worse)
        return found

    def take(self, rows: Sequence[Prompt]) -> Experience:
        """One step's pairs, this rank's part, with the log-probs that the loss needs. Collective: every rank."""
        mine = self._share.of(rows)
        lengths = [len(tokens) for prompt in mine for tokens in (prompt.completion, prompt.rejected)]
        columns, packed = self._algorithm.columns, scoring_of(self._scorers.policy).packed
        batch = self._scored(mine, columns if packed else columns | {"old_logps"})
        if not packed:
            batch = self._apart(batch)
        return Experience([], batch, mean_length(lengths, self._share))

    def held_out(self, rows: Sequence[Prompt]) -> dict[str, float]:
        """Loss, accuracy and margins of held-out pairs. Collective: every rank."""
        batch = self._scored(self._share.of(rows), self._algorithm.columns | {"old_logps"})
        policy = batch.columns["old_logps"]
        batch = self._algorithm.weigh(batch, float(len(rows)), self._share.sequence_parallel)
        return measured(self._algorithm.loss, batch, policy, self._share)

    def _batch(self, prompts: Sequence[Prompt]) -> Batch:
        return pair_batch(prompts, self._algorithm.settings.preference.ld_alpha)

    def _scored(self, prompts: Sequence[Prompt], columns: frozenset[str]) -> Batch:
        batch = self._batch(prompts)
        if self._table is None or "ref_logps" not in columns:
            return self._scorers.scored(batch, columns)
        known = [value for prompt in prompts for value in self._table[key_of(prompt)]]
        # A sum over tokens is known: each has the same part of it.
        shares = self._shares(batch)
        rows = [
            torch.full((length - 1,), value / max(float(share), 1e-30))
            for value, share, length in zip(known, shares, batch.lengths, strict=True)
        ]
        return self._scorers.scored(batch.with_column("ref_logps", rows), columns - {"ref_logps"})

    def _apart(self, batch: Batch) -> Batch:
        """The batch of a model that takes one sequence at a time: each has what is known of the other one of its pair."""
        logps = self._shares(batch, "old_logps")
        ratios = logps
        if "ref_logps" in batch.columns:
            ratios = [a - b for a, b in zip(logps, self._shares(batch, "ref_logps"), strict=True)]
        tokens = [mask.sum() for mask in batch.masks()]
        for name, values in (("logps", logps), ("ratio", ratios), ("tokens", tokens)):
            others = [torch.full((n - 1,), float(values[k ^ 1])) for k, n in enumerate(batch.lengths)]
            batch = batch.with_column(f"partner_{name}", others)
        return batch.kept_together(False)

    def _shares(self, batch: Batch, column: str | None = None) -> list[torch.Tensor]:
        """Of each sequence, the sum of a column over its counted tokens, or how much they count together."""
        masks, factors = batch.masks(), batch.columns.get("ld_factor") or batch.masks()
        values = batch.columns[column] if column is not None else [torch.ones_like(mask) for mask in masks]
        return [
            (value.double() * mask * factor).sum()
            for value, mask, factor in zip(values, masks, factors, strict=True)
        ]


def key_of(prompt: Prompt) -> bytes:
    """What tells a pair from others."""
    digest = hashlib.blake2b(digest_size=16)
    for tokens in (prompt.tokens, prompt.completion, prompt.rejected):
        digest.update(np.array([len(tokens), *tokens], dtype=np.int64).tobytes())
    return digest.digest()
