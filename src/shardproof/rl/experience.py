"""One step's experience: trajectories with rewards, the batch that is made of them, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardproof.dist.collectives import exchange
from shardproof.errors import fail
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.batches import make_batch
from shardproof.rl.buffer import Buffer
from shardproof.rl.experience_metrics import Success, in_groups, measure, value_of, without_totals
from shardproof.rl.rewards.failures import notice_silence
from shardproof.rl.rollouts import await_rewards
from shardproof.rl.scorers import Scorers
from shardproof.rl.sources.measures import learn
from shardproof.rl.versions import check_usable
from shardproof.rollout.trajectory import Trajectory, reward_of
from shardproof.train.batching import Batch


@dataclass(frozen=True)
class Experience:
    """This rank's part of a step's experience, and the metrics of the whole of it."""

    trajectories: list[Trajectory]  # conversations, in the batch's order; none where completions are given
    batch: Batch
    metrics: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # of rewards, the first few of every rank
    order: list[int] = field(default_factory=list)  # the groups of all ranks that are trained on

    @property
    def sequences(self) -> list[Trajectory]:
        """The batch's rows: a trajectory each, of which a conversation may have several."""
        return sequences_of(self.trajectories)


@dataclass
class _Seen:
    """What a step's rounds have sampled so far, on this rank."""

    trajectories: list[Trajectory] = field(default_factory=list)
    greedy: list[Trajectory] = field(default_factory=list)  # what they are compared with, and not trained on
    kept: list[int] = field(default_factory=list)  # groups of all ranks
    num_prompts: int = 0
    num_rounds: int = 0
    waited_s: float = 0.0
    batch: Batch | None = None  # with scores, if all of it is trained on


def collect(buffer: Buffer, scorers: Scorers, algorithm: Algorithm, *, step: int) -> Experience:
    """One step's experience: its prompts' trajectories, scored and weighed; sampling goes on for later steps as is allowed.

    Collective: every rank.
    """
    sampler, share = buffer.means.sampler, buffer.means.share
    num_prompts, environment_s = buffer.num_prompts, sampler.waited_s
    buffer.begin(step)
    seen = _sample(buffer, scorers, algorithm, step)
    buffer.end_step(step)
    # The last round may give more than a batch: which groups stay must not depend on the number of ranks.
    order = sorted(seen.kept)[:num_prompts]
    chosen = set(order)
    trajectories = [trajectory for trajectory in seen.trajectories if trajectory.group in chosen]
    batch = seen.batch
    if batch is None:
        batch = scorers.scored(make_batch(sequences_of(trajectories), scorers.replay), algorithm.columns)
    about = buffer.facts(trajectories) if buffer.is_ahead else None
    solved = Success.by(algorithm.settings, sampler.deciding)
    metrics, errors = measure(seen.trajectories, seen.greedy, share, about, solved)
    if not sampler.is_rewarded:
        metrics = without_totals(metrics)
    notice_silence(metrics, sampler.rewards.noticed)
    metrics |= learn(buffer.stream, seen.trajectories, share, solved.of)
    metrics |= {"prompts/kept": len(order) / seen.num_prompts, "time/reward": seen.waited_s}
    if algorithm.drops_equal_rewards:
        metrics["prompts/missing"] = float(num_prompts - len(order))
        metrics["prompts/rounds"] = float(seen.num_rounds)
    if buffer.means.background is not None:
        metrics["time/trainer_idle"] = buffer.waited_s
    if sampler.conversations is not None:
        metrics["time/environment"] = sampler.waited_s - environment_s
    batch = algorithm.advantages(batch, sequences_of(trajectories))
    if not isinstance(batch, Batch) or "advantages" not in batch.columns:
        found = f"columns {', '.join(batch.columns)}" if isinstance(batch, Batch) else type(batch).__name__
        message = (
            f"{type(algorithm).__name__}.advantages returned {found}; expected the batch with 'advantages'."
        )
        raise fail("C001", "rollout", message, fix="see docs/extending.md#an-algorithm")
    return Experience(*masked(trajectories, batch, algorithm), metrics, errors, order)


def _sample(buffer: Buffer, scorers: Scorers, algorithm: Algorithm, step: int) -> _Seen:
    """The rounds of a step: one, or as many as it takes to find enough groups with a signal. Collective: every rank."""
    sampler, settings = buffer.means.sampler, algorithm.settings
    assert sampler.rewards is not None, "nothing scores these completions"
    drops, seen = algorithm.drops_equal_rewards, _Seen()
    most = settings.dynamic_sampling_rounds if drops else 1
    while seen.num_rounds < most and len(seen.kept) < buffer.num_prompts:
        taken = buffer.take(step, buffer.num_prompts - len(seen.kept))
        fresh = taken.trajectories
        check_usable(fresh, sampler.versions, buffer.ahead)
        if not drops:
            # Every group stays, so the models score them all while rewards run.
            trained = sequences_of(each for each in fresh if not buffer.means.is_greedy(each))
            seen.batch = scorers.scored(make_batch(trained, scorers.replay), algorithm.columns)
        fresh, seconds = await_rewards(
            fresh,
            taken.rewards,
            sampler.rewards.noticed,
            algorithm,
            sampler.judged,
            sampler.shaped,
            sampler.share,
        )
        greedy = [each for each in fresh if buffer.means.is_greedy(each)]
        fresh = with_greedy([each for each in fresh if not buffer.means.is_greedy(each)], greedy)
        seen.trajectories += fresh
        seen.greedy += greedy
        seen.num_prompts += len(taken.groups)
        seen.num_rounds += 1
        seen.waited_s += seconds
        seen.kept += _with_signal(fresh, settings.dynamic_sampling_on) if drops else taken.groups
    return seen


def with_greedy(trajectories: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories with what their prompt's greedy completion is worth; all are left out if nobody knows that."""
    if not greedy:
        return list(trajectories)
    worth = {each.group: reward_of(each) for each in greedy}
    found = []
    for each in trajectories:
        reward, base = reward_of(each), worth[each.group]
        compared = replace(reward, greedy=base.trained, left_out=reward.left_out or not base.counts)
        found.append(replace(each, reward=compared))
    return found


def sequences_of(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """The sequences of all conversations, in order."""
    return [sequence for trajectory in trajectories for sequence in trajectory.sequences]


def _with_signal(trajectories: Sequence[Trajectory], part: str | None) -> list[int]:
    """The groups of all ranks whose completions a reward function, or the total if None, tells apart.

    Penalties do not count: they nearly always do. Collective: every rank.
    """
    mine = []
    for group in in_groups(trajectories):
        counted = [reward for reward in map(reward_of, group) if reward.counts]
        values = [value for reward in counted if (value := value_of(reward, part)) is not None]
        # As exact as advantages are: in float64 two sums of the same parts may differ by their last bit.
        if len(torch.tensor(values, dtype=torch.float64).float().unique()) > 1:
            mine.append(group[0].group)
    return sorted({group for row in exchange(mine) for group in row})


def masked(
    trajectories: Sequence[Trajectory], batch: Batch, algorithm: Algorithm
) -> tuple[list[Trajectory], Batch]:
    """Both without what the algorithm masks: it counts in no loss, and its advantages have been compared by now."""
    hidden = [algorithm.masks(trajectory) for trajectory in trajectories]
    if not any(hidden):
        return list(trajectories), batch
    of_rows = [is_hidden for t, is_hidden in zip(trajectories, hidden, strict=True) for _ in t.sequences]
    masks = [
        torch.zeros_like(mask) if is_hidden else mask
        for mask, is_hidden in zip(batch.columns["mask"], of_rows, strict=True)
    ]
    told = [_untrained(t) if is_hidden else t for t, is_hidden in zip(trajectories, hidden, strict=True)]
    nothing = [
        row * (not is_hidden) for row, is_hidden in zip(batch.columns["advantages"], of_rows, strict=True)
    ]
    return told, batch.with_column("mask", masks).with_column("advantages", nothing)


def _untrained(trajectory: Trajectory) -> Trajectory:
    segments = tuple(replace(segment, trained=False) for segment in trajectory.segments)
    return replace(trajectory, segments=segments, earlier=tuple(map(_untrained, trajectory.earlier)))
