"""How often the policy solves each prompt before it is trained: what `shardproof data --measure` writes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.dist.deadline import deadline
from shardproof.dist.launch import init_distributed
from shardproof.errors import fail
from shardproof.model.families import max_positions
from shardproof.rl.experience_metrics import Success
from shardproof.rl.handover import hand_over
from shardproof.rl.proofs import Proof
from shardproof.rl.rewards.failures import result_together
from shardproof.rl.setup import Run, set_up
from shardproof.rl.sources.pass_rates import write_rates
from shardproof.rollout.engine import Request
from shardproof.rollout.trajectory import Trajectory
from shardproof.terminal import Bar

logger = logging.getLogger(__name__)


def measure_pass_rates(recipe: Recipe, num_samples: int, path: Path) -> dict[str, float]:
    """Sample completions of every prompt with the recipe's engine, and write the pass rates; returns their mean.

    A completion is solved as in training. What is drawn depends on the seed and the row alone. Collective: every rank.
    """
    seconds = recipe.train.deadline_s
    init_distributed(timeout_s=seconds)
    with deadline("run", seconds=seconds):
        run = set_up(recipe)
        try:
            _require_room(run)
            _bring_weights(run)
            counts = _counts(run, num_samples)
        finally:
            run.close()
        with together("output"):
            if dist.get_rank() == 0:
                write_rates(path, run.prompts, counts)
    rates = [solved / num for solved, num in counts.values() if num]
    return {
        "prompts": float(len(rates)),
        "mean": sum(rates) / max(len(rates), 1),
        "never": float(sum(rate == 0.0 for rate in rates)),
        "always": float(sum(rate == 1.0 for rate in rates)),
    }


def _require_room(run: Run) -> None:
    """Raise if a completion may not fit: rows whose completions are given were read for these alone."""
    context, most = max_positions(run.policy.model.model.config), run.recipe.rollout.max_new_tokens
    longest = max(len(prompt.tokens) for prompt in run.prompts)
    if context is not None and run.offline is not None and longest + most > context:
        message = f"a prompt of {longest} tokens with rollout.max_new_tokens={most} does not fit the model's {context} positions."
        raise fail("C005", "data", message, fix="lower rollout.max_new_tokens, or data.max_prompt_tokens")


def _bring_weights(run: Run) -> None:
    logger.info("sending the weights to the engine and comparing its log-probs ...")
    if run.algorithm.spec.samples:
        if run.sleeps:
            run.sampler.engine.wake()
        canary = Request(Trajectory.of_prompt(run.canary), run.recipe.train.seed)
        hand_over(run.sampler.engine, run.weights, canary, run.sampling, run.recipe.canary_tolerance, Proof())
    run.sampler.versions.hand_over(run.policy.model.version)


def _counts(run: Run, num_samples: int) -> dict[int, tuple[int, int]]:
    """{row: (completions that are solved, completions that were judged)}. Collective: every rank."""
    sampler, share = run.sampler, run.share
    solved = Success.by(run.recipe.algorithm, sampler.deciding)
    groups = max(1, run.recipe.rollout.batch_size // num_samples) * (
        share.num_ranks // share.sequence_parallel
    )
    counts: dict[int, tuple[int, int]] = {}
    for begin in range(0, len(run.prompts), groups):
        numbers = range(begin, min(begin + groups, len(run.prompts)))
        mine = [(number, run.prompts[number]) for number in share.of(numbers)]
        with sampler.pending() as pending:
            made = sampler.roll_out(mine, num_samples, -1, run.sampling, pending)
            rewards = sampler.judged(made, result_together(pending, made, sampler.share))
        found: dict[int, list[int]] = {number: [0, 0] for number, _ in mine}
        for each in (replace(one, reward=reward) for one, reward in zip(made, rewards, strict=True)):
            if each.reward is not None and each.reward.counts:
                found[each.group][0] += solved.of(each.reward)
                found[each.group][1] += 1
        for rows in share.once(exchange([[number, *count] for number, count in found.items()])):
            counts |= {number: (num_solved, num) for number, num_solved, num in rows}
        bar = Bar("prompt", len(counts), len(run.prompts), ended=len(counts) == len(run.prompts))
        logger.info("measured %d of %d prompts", len(counts), len(run.prompts), extra={"bar": bar})
    return counts
