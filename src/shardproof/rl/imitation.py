"""SFT: the completions are given, not sampled. A warm start for what is to be rewarded later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardproof.dist.collectives import exchange
from shardproof.rl.data import Prompt
from shardproof.rl.experience import Experience
from shardproof.rl.setup import Run
from shardproof.train.batching import Batch
from shardproof.train.score import logprobs


def demonstrate(run: Run) -> Experience:
    """One step's prompts with their own completions, this rank's part. Collective: every rank."""
    indices = run.stream.take(run.recipe.train.prompts_per_step)
    mine = [run.prompts[row] for row in indices][run.data_rank :: run.data_size]
    lengths = [length for row in exchange([len(p.completion) for p in mine]) for length in row]
    metrics = {"completion/length": sum(lengths) / len(lengths)}
    return Experience([], _batch(mine), metrics)


def held_out_loss(run: Run) -> dict[str, float]:
    """Cross-entropy of the held-out completions, over all their tokens. Collective: every rank."""
    mine = run.eval_prompts[run.data_rank :: run.data_size]
    batch = _batch(mine)
    size = run.recipe.train.micro_batch_tokens
    scored = logprobs(run.policy.model, batch.sequences, micro_batch_tokens=size)
    total = sum(float((row.cpu() * mask).sum()) for row, mask in zip(scored, batch.masks(), strict=True))
    parts = exchange([total, sum(len(prompt.completion) for prompt in mine)])
    return {"eval/loss": -sum(part[0] for part in parts) / sum(part[1] for part in parts)}


def _batch(prompts: Sequence[Prompt]) -> Batch:
    """Prompt and completion end to end; only the completion's tokens count."""
    masks = [
        torch.cat([torch.zeros(len(prompt.tokens) - 1), torch.ones(len(prompt.completion))])
        for prompt in prompts
    ]
    return Batch([[*prompt.tokens, *prompt.completion] for prompt in prompts], mask=masks)
