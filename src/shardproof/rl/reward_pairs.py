"""Pairs of texts that a reward model is trained on, and what it says of held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.data import Prompt, Share
from shardproof.rl.experience import Experience
from shardproof.rl.offline import mean_length, measured
from shardproof.rl.sources.given import margin_of
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch
from shardproof.train.score import scored_text, scores


def with_padding(config: PretrainedConfig, tokenizer: Any) -> None:
    """Name the tokenizer's padding in a config that names none: transformers' classifiers take no batch without it."""
    config, padding = config.get_text_config(), getattr(tokenizer, "pad_token_id", None)
    if config.pad_token_id is None and padding is not None and padding < config.vocab_size:
        config.pad_token_id = padding


def scored_pairs(prompts: Sequence[Prompt], padding: int | None) -> Batch:
    """Two sequences per prompt, its better text and its worse one, each with one counted prediction: its score.

    Columns: `mask`, `side` (1: better, -1: worse), and `margin`, 0 where a row has none. `padding` is the model's padding token.
    """
    sequences: list[list[int]] = []
    columns: dict[str, list[Any]] = {"mask": [], "side": [], "margin": []}
    numbers = []
    for number, prompt in enumerate(prompts):
        for side, said in ((1.0, prompt.completion), (-1.0, prompt.rejected)):
            tokens = scored_text((*prompt.tokens, *said), padding)
            sequences.append(tokens)
            columns["mask"].append([*[0.0] * (len(tokens) - 2), 1.0])
            columns["side"].append(side)
            columns["margin"].append(margin_of(prompt.text[:60], prompt.row))
            numbers.append(number)
    return Batch(sequences, **columns).in_conversations(numbers).kept_together()


class RewardPairs:
    """What a reward model trains on."""

    def __init__(self, algorithm: Algorithm, model: ShardedModel, micro_batch_tokens: int, share: Share):
        self._algorithm, self._model, self._share = algorithm, model, share
        self._micro_batch_tokens = micro_batch_tokens
        self._padding = model.model.config.get_text_config().pad_token_id

    def take(self, rows: Sequence[Prompt]) -> Experience:
        """One step's pairs, this rank's part. Collective: every rank."""
        mine = self._share.of(rows)
        lengths = [len(tokens) for prompt in mine for tokens in (prompt.completion, prompt.rejected)]
        return Experience([], scored_pairs(mine, self._padding), mean_length(lengths, self._share))

    def held_out(self, rows: Sequence[Prompt]) -> dict[str, float]:
        """Loss, accuracy and margins of held-out pairs. Collective: every rank."""
        batch = scored_pairs(self._share.of(rows), self._padding)
        # The token that follows each text is none of it.
        texts = [sequence[:-1] for sequence in batch.sequences]
        found = scores(self._model, texts, self._micro_batch_tokens).cpu()
        values = []
        for length, score in zip(batch.lengths, found, strict=True):
            row = torch.zeros(length - 1)
            row[-1] = score
            values.append(row)
        batch = self._algorithm.weigh(batch, float(len(rows)), self._share.sequence_parallel)
        return measured(self._algorithm.loss, batch, values, self._share)
