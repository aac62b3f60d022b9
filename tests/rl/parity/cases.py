"""Random batches, and what shardproof makes of them: advantages, weights, loss and gradient of one update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shardproof.config.schema import Algorithm, Rollout
from shardproof.rl.algorithms.registry import make_algorithm
from shardproof.rl.experience import masked
from shardproof.rollout.trajectory import Reward, Segment, Trajectory
from shardproof.train.batching import Batch
from shardproof.train.loss import Scored

MAX_NEW_TOKENS = 9
END = 1  # the token that ends a completion; those without it were cut off
EMPTY = torch.empty(0)
Rows = list[torch.Tensor]


@dataclass(frozen=True)
class Drawn:
    """Completions of several prompts; log-probs are of their own tokens."""

    prompts: list[list[int]]
    completions: list[list[int]]
    groups: list[int]
    samples: list[int]
    rewards: list[float | None]  # None: failed
    greedy: list[float]  # of each completion: the reward of its prompt's greedy one
    logps: Rows
    old: Rows
    ref: Rows
    rollout: Rows
    values: Rows
    entropy: Rows

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.completions]

    def select(self, mine: list[int]) -> Drawn:
        return Drawn(**{name: [rows[i] for i in mine] for name, rows in vars(self).items()})


def draw(
    seed: int,
    *,
    num_prompts: int = 4,
    group_size: int = 4,
    failed: bool = False,
    spread: float = 0.35,
    longest: int = MAX_NEW_TOKENS,
) -> Drawn:
    """Prompts and completions of many lengths, the longest cut off at the limit; one group has equal rewards."""
    rng = np.random.default_rng(seed)
    num = num_prompts * group_size
    groups = [i // group_size for i in range(num)]
    lengths = [int(n) for n in rng.integers(1, longest + 1, num)]
    lengths[1] = lengths[-2] = longest
    prompt_lengths = rng.integers(2, 6, num_prompts)
    prompts = [rng.integers(0, 100, prompt_lengths[g]).tolist() for g in groups]
    rewards = [float(x) for x in rng.choice([0.0, 0.25, 1.0], num)]
    rewards[group_size : 2 * group_size] = [0.25] * group_size
    logps = [torch.tensor(rng.normal(-1.5, 0.8, n)).float() for n in lengths]

    def near(rows: Rows, scale: float) -> Rows:
        return [row + torch.tensor(rng.normal(0.0, scale, len(row))).float() for row in rows]

    old = near(logps, spread)
    drawn = Drawn(
        prompts=prompts,
        completions=[ended(rng.integers(0, 100, n).tolist(), longest) for n in lengths],
        groups=groups,
        samples=[i % group_size for i in range(num)],
        rewards=rewards,
        greedy=[float(g % 2) / 2 for g in groups],
        logps=logps,
        old=old,
        ref=near(logps, 0.3),
        rollout=near(old, 0.15),
        values=near([torch.zeros(n) for n in lengths], 0.5),
        entropy=[row.abs() for row in near(logps, 0.1)],
    )
    return with_failures(drawn) if failed else drawn


def with_probabilities(drawn: Drawn) -> Drawn:
    """The same with log-probs of at most -0.01: DPPO asks for the probability of all other tokens."""
    logps, old = ([row.clamp(max=-0.01) for row in rows] for rows in (drawn.logps, drawn.old))
    return replace(drawn, logps=logps, old=old)


def ended(tokens: list[int], longest: int) -> list[int]:
    """The tokens of a completion with an end, unless it was cut off at the limit."""
    said = [token + 2 if token <= END else token for token in tokens]
    return said if len(said) == longest else [*said[:-1], END]


def with_failures(drawn: Drawn) -> Drawn:
    """The same with two rewards that failed, one of them in the group of equal rewards."""
    return replace(drawn, rewards=[None if i in (2, 5) else r for i, r in enumerate(drawn.rewards)])


def trajectories_of(drawn: Drawn) -> list[Trajectory]:
    return [
        Trajectory(
            (
                Segment(tuple(prompt), "prompt"),
                Segment(tuple(tokens), "policy", (0.0,) * len(tokens), 0, trained=True),
            ),
            group,
            sample,
            finished=tokens[-1] == END,
            reward=Reward(reward or 0.0, failed=reward is None, greedy=greedy),
        )
        for prompt, tokens, group, sample, reward, greedy in zip(
            drawn.prompts,
            drawn.completions,
            drawn.groups,
            drawn.samples,
            drawn.rewards,
            drawn.greedy,
            strict=True,
        )
    ]


def batch_of(drawn: Drawn, *, on_policy: bool = False, rollout: bool = False) -> Batch:
    """The batch with its columns; the prompt's tokens do not count. `rollout`: the engine's log-probs differ."""

    def padded(rows: Rows) -> Rows:
        return [torch.cat([torch.zeros(len(p) - 1), row]) for p, row in zip(drawn.prompts, rows, strict=True)]

    old = drawn.logps if on_policy else drawn.old
    return Batch(
        [p + c for p, c in zip(drawn.prompts, drawn.completions, strict=True)],
        mask=padded([torch.ones_like(row) for row in drawn.logps]),
        old_logps=padded(old),
        ref_logps=padded(drawn.ref),
        rollout_logps=padded(drawn.rollout if rollout else old),
        values=padded(drawn.values),
        old_entropy=padded(drawn.entropy),
    )


def algorithm_of(**settings: Any) -> Any:
    return make_algorithm(Algorithm(**settings), Rollout(max_new_tokens=MAX_NEW_TOKENS))


def prepared(algorithm: Any, drawn: Drawn, **options: Any) -> Batch:
    """The batch of one update: with advantages and weights. Collective: every rank."""
    trajectories = trajectories_of(drawn)
    batch = algorithm.advantages(batch_of(drawn, **options), trajectories)
    _, batch = masked(trajectories, batch, algorithm)
    return algorithm.weigh(batch, float((batch.counts() > 0).sum()), 1)


def ours(drawn: Drawn, **settings: Any) -> tuple[float, Rows, Rows]:
    """(loss, its gradient by each completion's log-probs, advantages) on one rank."""
    rollout = settings.pop("rollout", False)
    algorithm = algorithm_of(**settings)
    batch = prepared(algorithm, drawn, rollout=rollout)
    starts = [len(prompt) - 1 for prompt in drawn.prompts]
    leaves = [row.clone().requires_grad_() for row in drawn.logps]
    flat = torch.cat([torch.cat([torch.zeros(k), row]) for k, row in zip(starts, leaves, strict=True)])
    entropy = torch.cat([torch.cat([torch.zeros(k), r]) for k, r in zip(starts, drawn.entropy, strict=True)])
    columns = {name: batch.flat(name) for name in batch.columns} | {"sequence": batch.sequence_indices()}
    row, metrics = algorithm.loss.function(Scored(flat, entropy, EMPTY), columns)
    assert set(metrics) == set(algorithm.loss.metrics)
    total = (columns["weights"] * row).sum()
    advantages = [r[k:] for k, r in zip(starts, batch.columns["advantages"], strict=True)]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return (
        float(total.detach()),
        [torch.zeros_like(a) if g is None else g for g, a in zip(gradients, leaves, strict=True)],
        advantages,
    )
