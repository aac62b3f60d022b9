"""Updates on ranks, which need not import TRL."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.rl.experience import Experience, masked
from shardproof.rl.updates import Schedule, update
from shardproof.shard.moving import move_towards
from shardproof.train.trainer import Trainer
from tests.rl.parity.cases import algorithm_of, batch_of, trajectories_of, with_failures
from tests.shard.test_serve import full_state


def part_of(drawn, share):
    """The numbers of this rank's completions; of three ranks or more, the last group has none."""
    group, num_groups = dist.get_rank() // share, dist.get_world_size() // share
    busy = num_groups - 1 if num_groups > 2 else num_groups
    return [i for i, prompt in enumerate(drawn.groups) if prompt % busy == group]


def step_on_rank(folder, drawn, settings, layout):
    """{case: (loss, gradients)} of the loop's own update: with SGD at a rate of 1 the weights move by just the gradient."""
    _, micro_batch_tokens, share = layout
    load = partial(sp.load, folder, compute_dtype=torch.float32, sequence_parallel=share, progress=False)
    start, policy = load(role="reference"), load()
    before, found = full_state(policy), {}
    for case, given in settings.items():
        move_towards(policy, start, 1.0)
        given = dict(given)
        failed, rollout = given.pop("failed", False), given.pop("rollout", False)
        every = with_failures(drawn) if failed else drawn
        mine, algorithm = every.select(part_of(every, share)), algorithm_of(**given)
        trajectories = trajectories_of(mine)
        batch = algorithm.advantages(batch_of(mine, rollout=rollout), trajectories)
        experience = Experience(*masked(trajectories, batch, algorithm))
        trainer = Trainer(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
        options = {"micro_batch_tokens": micro_batch_tokens, "max_grad_norm": None}
        (result,) = update(
            trainer, None, algorithm, experience, Schedule(), 0, temperature=1.0, router_coef=0.0, **options
        )
        gradients = {name: before[name] - after for name, after in full_state(policy).items()}
        found[case] = result.policy.loss, gradients if dist.get_rank() == 0 else {}
    return found


def critic_step_on_rank(folder, drawn, settings, layout):
    """(loss, weights before, gradients) of the critic's update, with rewards that failed and old values as drawn."""
    _, micro_batch_tokens, share = layout
    mine, algorithm = with_failures(drawn), algorithm_of(**settings)
    mine = mine.select(part_of(mine, share))
    critic = sp.load(
        folder, role="critic", compute_dtype=torch.float32, sequence_parallel=share, progress=False
    )
    before = full_state(critic)
    batch = algorithm.advantages(batch_of(mine), trajectories_of(mine))
    result = sp.train_step(
        critic,
        algorithm.weigh(batch, len(drawn.groups), share),
        torch.optim.SGD(critic.parameters(), lr=1.0),
        loss=algorithm.value_loss,
        micro_batch_tokens=micro_batch_tokens,
        max_grad_norm=None,
    )
    gradients = {name: before[name] - after for name, after in full_state(critic).items()}
    return result.loss, before, gradients


def chosen_on_rank(drawn, settings, share, column="chosen"):
    """{completion's number: which of its predictions this column marks}, of those on this rank."""
    group, num_groups = dist.get_rank() // share, dist.get_world_size() // share
    mine = [i for i, prompt in enumerate(drawn.groups) if prompt % num_groups == group]
    algorithm = algorithm_of(**settings)
    part = drawn.select(mine)
    batch = algorithm.advantages(batch_of(part), trajectories_of(part))
    batch = algorithm.weigh(batch, len(drawn.groups), share)
    return {i: row.tolist() for i, row in zip(mine, batch.columns[column], strict=True)}


def advantages_on_rank(drawn, cases, share):
    """{case: {completion's number: its advantage}}, of those on this rank."""
    mine = part_of(drawn, share)
    part = drawn.select(mine)
    found = {}
    for case, settings in cases.items():
        batch = algorithm_of(**settings).advantages(batch_of(part), trajectories_of(part))
        rows = zip(mine, batch.columns["advantages"], strict=True)
        found[case] = {i: float(row[-1]) for i, row in rows}
    return found
