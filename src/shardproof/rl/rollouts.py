"""From prompts to trajectories: what the policy says, what an environment answers, and what all of it is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from shardproof.bounds import require_number
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.conversations.measures import NAME, reward_sample
from shardproof.rl.conversations.steps import Start, starts_of, with_text
from shardproof.rl.conversations.waves import Conversations
from shardproof.rl.data import Prompt
from shardproof.rl.reward_models import RewardModels
from shardproof.rl.rewards.failures import rewards_together
from shardproof.rl.rewards.runner import PendingRewards, RewardRunner
from shardproof.rl.versions import Versions
from shardproof.rollout.engine import Engine, Request, Sampling, answers
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Reward, Trajectory
from shardproof.shard.sharded_model import ShardedModel


@dataclass(frozen=True)
class Sampler:
    """What makes a run's trajectories on this rank."""

    engine: Engine
    tokenizer: Any
    rewards: RewardRunner | None  # None: nothing is scored, and nothing sampled
    policy: ShardedModel  # whose weights the engine samples from
    seed: int
    conversations: Conversations | None = None  # None: the policy has one turn
    lending: Callable[[], AbstractContextManager[object]] = (
        nullcontext  # of the policy's memory, while it samples
    )
    versions: Versions = field(default_factory=Versions)  # that the engine was handed
    models: RewardModels | None = None  # that score conversations when they are there
    asks: str | None = None  # the rows' column that reward models read the prompt from
    share: int = 1  # ranks that have the same trajectories, of which the first asks reward functions for all

    def pending(self) -> PendingRewards:
        """Rewards of trajectories still to be sampled."""
        assert self.rewards is not None, "nothing scores these completions"
        return self.rewards.start()

    @property
    def reward_names(self) -> list[str]:
        """The reward functions', the reward models', and the environment's at the end."""
        functions = [spec.key for spec in self.rewards.specs] if self.rewards is not None else []
        functions += [spec.name for spec in self.models.specs] if self.models is not None else []
        return functions if self.conversations is None else [*functions, NAME]

    @property
    def deciding(self) -> list[str]:
        """The rewards of which the first that has something to say decides, by default, whether a completion is solved.

        That is the first of all, or of functions that are about some of the rows the first that is about this one.
        """
        specs = self.rewards.specs if self.rewards is not None else ()
        num_partial = next((k for k, spec in enumerate(specs) if not spec.only), len(specs))
        return self.reward_names[: num_partial + 1]

    def function_of(self, key: str) -> str:
        """The reward function whose values are called so, which a label may hide."""
        specs = self.rewards.specs if self.rewards is not None else []
        return next((spec.name for spec in specs if spec.key == key), key)

    @property
    def is_rewarded(self) -> bool:
        """Whether some reward counts; otherwise all are only measured."""
        weights = [spec.weight for spec in self.rewards.specs] if self.rewards is not None else []
        weights += [spec.weight for spec in self.models.specs] if self.models is not None else []
        return self.conversations is not None or any(weights)

    def judged(self, trajectories: Sequence[Trajectory], rewards: list[Reward]) -> list[Reward]:
        """The rewards with what reward models say, where there are any. Collective: every rank."""
        if self.models is None:
            return rewards
        assert self.rewards is not None, "what has reward models has rewards"
        return self.models.added(trajectories, rewards, self.rewards.noticed)

    def shaped(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The trajectories with what is learned from, where that is not the total of their rewards."""
        models = () if self.models is None else self.models.specs
        return trajectories if self.rewards is None else self.rewards.shaped(trajectories, models)

    @property
    def masks_truncated(self) -> bool:
        """Whether conversations that a limit ended are left out of the update."""
        return self.conversations is not None and self.conversations.rules.masks

    @property
    def waited_s(self) -> float:
        """The seconds that this rank has waited for an environment so far."""
        return 0.0 if self.conversations is None else self.conversations.waited_s

    def close(self) -> None:
        """End the engine, the environment and the rewards' workers."""
        self.engine.close()
        if self.conversations is not None:
            self.conversations.close()
        if self.rewards is not None:
            self.rewards.close()

    def roll_out(
        self,
        asked: Sequence[tuple[int, Prompt]],
        size: int,
        step: int,
        sampling: Sampling,
        pending: PendingRewards,
    ) -> list[Trajectory]:
        """`size` trajectories of each (group, prompt), in this order; `pending` gets them as they come.

        The draws depend on seed, step, group and place in the group, and on nothing else. Collective: every rank.
        """
        return self.sample(starts_of(self.seed, asked, size, step), sampling, pending)

    def sample(
        self,
        starts: Sequence[Start],
        sampling: Sampling,
        pending: PendingRewards,
        ledger: TokenLedger | None = None,
        places: Sequence[int] | None = None,
    ) -> list[Trajectory]:
        """The trajectories that begin so, in this order; `pending` and `ledger` get them as they come.

        `places` are those of their rewards in the result of `pending`. Collective: every rank.
        """
        found: dict[int, Trajectory] = {}
        with self.lending():
            for ready in self._finished(starts, sampling, ledger):
                scored = {k: t for k, t in ready if t.ended != "failed"}
                if dist.get_rank() % self.share == 0:
                    samples = [reward_sample(t, starts[k].prompt.row) for k, t in scored.items()]
                    pending.add(samples, [k if places is None else places[k] for k in scored])
                found |= dict(ready)
        return [found[k] for k in range(len(starts))]

    def _finished(
        self, starts: Sequence[Start], sampling: Sampling, ledger: TokenLedger | None
    ) -> Iterator[list[tuple[int, Trajectory]]]:
        """(place, trajectory) of those that are over, as they come. Collective: every rank."""
        if self.conversations is not None:
            yield from self.conversations.run(self.engine, starts, sampling, ledger)
            return
        requests = [
            Request(
                Trajectory.of_prompt(s.prompt.asked, s.group, s.sample),
                s.seed,
                sampling=s.own_sampling(sampling),
            )
            for s in starts
        ]
        for ready in answers(self.engine, requests, sampling, ledger):
            yield [
                (
                    place,
                    with_text(t, starts[place].prompt, self.tokenizer, self.asks, sampling.include_stop),
                )
                for place, t in ready
            ]


def await_rewards(
    trajectories: Sequence[Trajectory],
    find: Callable[[], list[Reward]],
    noticed: set[str],
    algorithm: Algorithm | None = None,
    judged: Callable[[Sequence[Trajectory], list[Reward]], list[Reward]] | None = None,
    shaped: Callable[[Sequence[Trajectory]], Sequence[Trajectory]] = list,
    share: int = 1,
) -> tuple[list[Trajectory], float]:
    """(the trajectories with their rewards and the algorithm's penalties, the seconds that were spent waiting).

    `find` waits for the rewards and returns them; `noticed` are the kinds of failures that were shown; `judged` adds what
    reward models say; `shaped` decides what is learned from if that is not the total; `share` ranks have the same
    trajectories. Collective: every rank.
    """
    started = time.perf_counter()
    rewards = rewards_together(find, noticed, share)
    if judged is not None:
        rewards = judged(trajectories, rewards)
    waited_s = time.perf_counter() - started
    rewarded = []
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        penalty = algorithm.penalty(trajectory) if algorithm is not None else 0.0
        require_number("rollout", "penalty", penalty)
        rewarded.append(replace(trajectory, reward=replace(reward, penalty=penalty)))
    return list(shaped(rewarded)), waited_s
