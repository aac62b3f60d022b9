"""`samples.jsonl`: the completions of a step that are kept for reading."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch.distributed as dist

from shardproof.report.read import SAMPLES_NAME
from shardproof.rl.experience import Experience, in_groups
from shardproof.rl.folder import RunFolder
from shardproof.rollout.trajectory import reward_of
from shardproof.train.batching import Batch

_MAX_ANSWER = 1000  # characters of an expected answer


def write_samples(folder: RunFolder, experience: Experience, step: int) -> None:
    """Keep the first `output.samples_per_step` completions of a step. Only rank 0 writes, of its own completions.

    Completions of one prompt follow each other, so that a few samples are mostly one group, and can be compared.
    """
    if dist.get_rank() == 0:
        for line in islice(sample_lines(experience), folder.recipe.output.samples_per_step):
            folder.append(SAMPLES_NAME, {"step": step, **line})


def sample_lines(experience: Experience) -> Iterator[dict[str, Any]]:
    """Each completion with its prompt, reward and advantage; the first of a group also has the group's rewards."""
    place = 0
    for group in in_groups(experience.trajectories):
        rewards = [reward_of(trajectory).trained for trajectory in group]
        for trajectory in group:
            reward = reward_of(trajectory)
            line = {
                "group": trajectory.group,
                "sample": trajectory.sample,
                "prompt": trajectory.facts["prompt"],
                "completion": trajectory.text,
                "reward": reward.trained,
                "rewards": dict(reward.parts),
            }
            if (answer := trajectory.facts.get("answer")) is not None:
                line["answer"] = str(answer)[:_MAX_ANSWER]
            if (advantage := _advantage(experience.batch, place)) is not None:
                line["advantage"] = advantage
            if trajectory is group[0]:
                line["group_rewards"] = rewards
            yield line
            place += 1


def _advantage(batch: Batch, place: int) -> float | None:
    """The mean advantage of a completion's trained tokens; None if none are trained."""
    columns = batch.columns
    if "advantages" not in columns or "mask" not in columns:
        return None
    mask = columns["mask"][place]
    num = float(mask.sum())
    return round(float((columns["advantages"][place] * mask).sum()) / num, 4) if num else None
