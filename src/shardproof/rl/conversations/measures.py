"""What conversations are worth and what is measured of them: the environment's part of rewards and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardproof.rollout.trajectory import TRUNCATED, Reward, Trajectory

NAME = "environment"  # of the environment's part of a reward, and of its metrics


def with_environment(trajectory: Trajectory, scored: Reward, masks: bool) -> Reward:
    """The reward functions' reward with the environment's: the sum over all turns, in the total as it is weighed there.

    A conversation whose environment failed has no reward. One is silent if neither has anything to say. With `masks`, one
    that a limit ended keeps its reward for the metrics and is left out of what is learned: its tokens do not count in
    the loss, and it is no part of its group's mean and deviation, like those that failed.
    """
    if not trajectory.ended:
        return scored
    if trajectory.ended == "failed":
        error = trajectory.facts[NAME]["error"]
        return Reward(0.0, {NAME: 0.0}, {NAME: error}, failed=True)
    turns = trajectory.facts["turns"]
    return replace(
        scored,
        total=scored.total + sum(segment.reward for segment in trajectory.sampled),
        parts={**scored.parts, NAME: sum(turn["reward"] for turn in turns)},
        left_out=masks and trajectory.ended in TRUNCATED,
        silent=scored.silent and trajectory.facts.get(NAME, {}).get("silent", False),
    )


def all_rewards(trajectories: Iterable[Trajectory], scored: Iterable[Reward], masks: bool) -> list[Reward]:
    """The rewards of trajectories, environments' included.

    `scored` are what functions say, in order, of those that have no reward yet and whose environment did not fail.
    """
    found, nothing = iter(scored), Reward(0.0)
    return [
        made.reward
        if made.reward is not None
        else with_environment(made, nothing if made.ended == "failed" else next(found), masks)
        for made in trajectories
    ]


def answer_of(trajectory: Trajectory) -> str:
    """What the policy said; of a conversation its last turn, where its answer is."""
    return str(trajectory.facts["turns"][-1]["text"]) if trajectory.ended else trajectory.text


def reward_sample(trajectory: Trajectory, row: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """What reward functions read: the prompt's text, the completion, and the data row.

    Of a conversation they read the policy's last turn, where its answer is; all its turns are in the row as `turns`,
    and the ids of all that the policy wrote as `completion_ids`. Columns of these names, of completions that somebody
    sampled before, are not read.
    """
    prompt = trajectory.facts["prompt"]
    written = [token for segment in trajectory.sampled for token in segment.tokens]
    turns = {"turns": trajectory.facts["turns"]} if trajectory.ended else {}
    return prompt, answer_of(trajectory), {**row, **turns, "completion_ids": written}


def conversation_facts(trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """What the metrics need of each conversation, JSON-able; nothing of trajectories without an environment."""
    return [
        {
            "turns": len(trajectory.facts["turns"]),
            "reward": sum(turn["reward"] for turn in trajectory.facts["turns"]),
            "failed": trajectory.ended == "failed",
            "truncated": trajectory.ended in TRUNCATED,
            "calls": sum(len(turn["calls"]) for turn in trajectory.facts["turns"]),
            "malformed_calls": sum(len(turn["malformed"]) for turn in trajectory.facts["turns"]),
            "seconds": trajectory.facts[NAME]["seconds"],
            "facts": trajectory.facts[NAME]["facts"],
        }
        for trajectory in trajectories
        if trajectory.ended
    ]


def environment_metrics(conversations: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics of all ranks' conversations: means over conversations, `environment/failed` a number of them.

    Those that failed count in nothing else but turns, calls and seconds. An environment's own facts are means over all
    replies that have them.
    """
    if not conversations:
        return {}
    facts: dict[str, list[float]] = {}
    for each in conversations:
        for name, values in each["facts"].items():
            facts.setdefault(name, []).extend(values)
    found = {f"{NAME}/{name}": _mean(values) for name, values in sorted(facts.items())}
    known = [each for each in conversations if not each["failed"]]
    for name in ("reward", "truncated"):
        found[f"{NAME}/{name}"] = _mean([each[name] for each in known])
    for name in ("turns", "calls", "malformed_calls", "seconds"):
        found[f"{NAME}/{name}"] = _mean([each[name] for each in conversations])
    found[f"{NAME}/failed"] = float(len(conversations) - len(known))
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
