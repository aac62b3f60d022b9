"""SFT: the completions are given, not sampled. A warm start for what is to be rewarded later."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.dist.collectives import exchange
from shardproof.rl.batches import make_batch
from shardproof.rl.data import Prompt, PromptStream, Share
from shardproof.rl.experience import Experience
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch
from shardproof.train.score import logprobs


def sft_batch(prompts: Sequence[Prompt], stream: PromptStream, num_prompts: int, share: Share) -> Experience:
    """One step's prompts with their own completions, this rank's part. Collective: every rank."""
    mine = share.of([prompts[row] for row in stream.take(num_prompts)])
    lengths = [length for row in exchange([len(p.completion) for p in mine]) for length in row]
    return Experience([], _given(mine), {"completion/length": sum(lengths) / len(lengths)})


def held_out_loss(
    policy: ShardedModel, prompts: Sequence[Prompt], micro_batch_tokens: int, share: Share
) -> dict[str, float]:
    """Cross-entropy of the held-out completions, over all their tokens. Collective: every rank."""
    mine = share.of(prompts)
    batch = _given(mine)
    scored = logprobs(policy, batch.sequences, micro_batch_tokens=micro_batch_tokens)
    total = sum(float((row.cpu() * mask).sum()) for row, mask in zip(scored, batch.masks(), strict=True))
    parts = exchange([total, sum(len(prompt.completion) for prompt in mine)])
    return {"eval/loss": -sum(part[0] for part in parts) / sum(part[1] for part in parts)}


def _given(prompts: Sequence[Prompt]) -> Batch:
    """Prompts with the completions that the data gives; only these are trained on."""
    return make_batch(
        [
            Trajectory.of_prompt(prompt.tokens, group).extended(
                Segment(prompt.completion, "data", trained=True)
            )
            for group, prompt in enumerate(prompts)
        ]
    )
