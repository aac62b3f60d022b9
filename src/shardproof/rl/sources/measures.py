"""What is measured of the data in a step: rewards and shares per source, and how often each prompt was solved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardproof.dist.collectives import exchange
from shardproof.rl.data import Prompt, PromptStream, Share
from shardproof.rollout.trajectory import Reward, Trajectory, reward_of

Fact = tuple[str, float | None]  # a completion's source, and its reward unless that failed


def source_facts(trajectories: Iterable[Trajectory]) -> list[Fact]:
    """Of the completions of one rank; none where the rows have one source. JSON-able."""
    found = []
    for made in trajectories:
        if source := made.facts.get("source"):
            reward = reward_of(made)
            found.append((str(source), reward.measured if reward.known else None))
    return found


def source_metrics(facts: Sequence[Fact]) -> dict[str, float]:
    """The mean reward of each source, and its part of the completions."""
    metrics = {}
    for name in sorted({source for source, _ in facts}):
        rewards = [reward for source, reward in facts if source == name]
        known = [reward for reward in rewards if reward is not None]
        if known:
            metrics[f"reward/mean/{name}"] = sum(known) / len(known)
        metrics[f"data/share/{name}"] = len(rewards) / len(facts)
    return metrics


def shares_of(prompts: Iterable[Prompt]) -> dict[str, float]:
    """The part of each source in a step's prompts of all ranks, where their completions are given."""
    return source_metrics([(prompt.source, None) for prompt in prompts if prompt.source])


def learn(
    stream: PromptStream, trajectories: Iterable[Trajectory], share: Share, solved: Callable[[Reward], bool]
) -> dict[str, float]:
    """Tell the stream how often each prompt was solved, where it draws by that; what it says then. Collective: every rank."""
    if not stream.learns:
        return {}
    mine: dict[int, list[int]] = {}
    for made in trajectories:
        reward = reward_of(made)
        if reward.counts:
            counts = mine.setdefault(int(made.facts["row"]), [0, 0])
            counts[0] += solved(reward)
            counts[1] += 1
    merged: dict[int, tuple[int, int]] = {}
    for rows in share.once(exchange([[row, *counts] for row, counts in mine.items()])):
        for row, num_solved, num in rows:
            before = merged.get(row, (0, 0))
            merged[row] = (before[0] + num_solved, before[1] + num)
    stream.learn(merged)
    return stream.metrics()
