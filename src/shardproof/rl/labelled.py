"""Completions with a label, desirable or not, and the KL that is measured on those of other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardproof.dist.collectives import exchange
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.data import Prompt, Share
from shardproof.rl.experience import Experience
from shardproof.rl.offline import mean_length, measured
from shardproof.rl.scorers import Scorers
from shardproof.rl.sft import completion_batch
from shardproof.rl.sources.given import label_of
from shardproof.train.batching import Batch


def labelled_batch(prompts: Sequence[Prompt], label_column: str) -> Batch:
    """One sequence per prompt with its `mask`, and its `side`: 1 if the row says that it is desirable, else -1."""
    sides = [1.0 if label_of(p.text[:60], p.row, label_column) else -1.0 for p in prompts]
    return completion_batch(prompts).with_column(
        "side", [torch.full((len(p.tokens) + len(p.completion) - 1,), s) for p, s in zip(prompts, sides)]
    )


def mismatched(rows: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Each prompt with the completion of the one before it, the first with the last one's; what exceeds `limit` is cut.

    Those whose prompt leaves no room are left out.
    """
    others = [rows[-1], *rows[:-1]]
    paired = [
        replace(row, completion=other.completion, trained=()) for row, other in zip(rows, others, strict=True)
    ]
    if limit is None:
        return paired
    return [
        replace(pair, completion=pair.completion[: limit - len(pair.tokens)])
        for pair in paired
        if len(pair.tokens) < limit
    ]


class LabelledData:
    """Labelled completions; `limit` is the most tokens of a sequence."""

    def __init__(
        self, algorithm: Algorithm, scorers: Scorers, share: Share, label_column: str, limit: int | None
    ):
        self._algorithm, self._scorers, self._share = algorithm, scorers, share
        self._label_column, self._limit = label_column, limit

    def take(self, rows: Sequence[Prompt]) -> Experience:
        """One step's completions, this rank's part, with what the loss needs. Collective: every rank."""
        mine = self._share.of(rows)
        lengths = mean_length([len(prompt.completion) for prompt in mine], self._share)
        return Experience([], self._scored(rows, self._algorithm.columns), lengths)

    def held_out(self, rows: Sequence[Prompt]) -> dict[str, float]:
        """Loss and rewards of held-out completions. Collective: every rank."""
        batch = self._scored(rows, self._algorithm.columns | {"old_logps"})
        policy = batch.columns["old_logps"]
        batch = self._algorithm.weigh(batch, float(len(rows)), self._share.sequence_parallel)
        return measured(self._algorithm.loss, batch, policy, self._share)

    def _scored(self, rows: Sequence[Prompt], columns: frozenset[str]) -> Batch:
        batch = labelled_batch(self._share.of(rows), self._label_column)
        batch = self._scorers.scored(batch, columns)
        if "kl" not in self._algorithm.loss.columns:
            return batch
        kl = self._kl(rows, "ref_logps" in columns)
        return batch.with_column("kl", [torch.full((length - 1,), kl) for length in batch.lengths])

    def _kl(self, rows: Sequence[Prompt], has_reference: bool) -> float:
        """The mean log-ratio of completions to which other prompts belong, at least 0. Collective: every rank."""
        batch = completion_batch(self._share.of(mismatched(rows, self._limit)))
        batch = self._scorers.scored(batch, ["old_logps", *(["ref_logps"] if has_reference else [])])
        ratios = []
        for index, mask in enumerate(batch.masks()):
            gap = batch.columns["old_logps"][index]
            if has_reference:
                gap = gap - batch.columns["ref_logps"][index]
            ratios.append(float((gap.double() * mask).sum()))
        every = [ratio for row in self._share.once(exchange(ratios)) for ratio in row]
        return max(sum(every) / len(every), 0.0) if every else 0.0
