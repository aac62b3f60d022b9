"""SFT: the completions are given, not sampled. A warm start for what is to be rewarded later."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.dist.collectives import exchange
from shardproof.rl.data import Prompt, Share
from shardproof.rl.experience import Experience
from shardproof.rl.offline import mean_length
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch
from shardproof.train.score import logprobs


class CompletionData:
    """Rows whose completions are imitated."""

    def __init__(self, policy: ShardedModel, micro_batch_tokens: int, share: Share):
        self._policy, self._micro_batch_tokens, self._share = policy, micro_batch_tokens, share

    def take(self, rows: Sequence[Prompt]) -> Experience:
        """One step's prompts with their own completions, this rank's part. Collective: every rank."""
        mine = self._share.of(rows)
        return Experience(
            [], completion_batch(mine), mean_length([len(p.completion) for p in mine], self._share)
        )

    def held_out(self, rows: Sequence[Prompt]) -> dict[str, float]:
        """Cross-entropy of the held-out completions, over all their tokens. Collective: every rank."""
        batch = completion_batch(self._share.of(rows))
        scored = logprobs(self._policy, batch.sequences, micro_batch_tokens=self._micro_batch_tokens)
        total = sum(float((row.cpu() * mask).sum()) for row, mask in zip(scored, batch.masks(), strict=True))
        parts = exchange([total, float(batch.counts().sum())])
        return {"loss": -sum(part[0] for part in parts) / sum(part[1] for part in parts)}


def completion_batch(prompts: Sequence[Prompt]) -> Batch:
    """Prompts with the completions that the data gives, and a `mask` of the tokens that are trained on."""
    masks = [
        prompt.trained or (*[0] * len(prompt.tokens), *[1] * len(prompt.completion)) for prompt in prompts
    ]
    return Batch([(*prompt.tokens, *prompt.completion) for prompt in prompts], mask=masks)
