"""What is kept of a step's completions."""

from __future__ import annotations

import pytest

from shardproof.rl.experience import Experience
from shardproof.rl.samples import sample_lines
from shardproof.rollout.trajectory import Reward, Segment, Trajectory
from shardproof.train.batching import Batch


def made(group: int, sample: int, reward: float, **facts: object) -> Trajectory:
    segments = (Segment((1, 2), "prompt"), Segment((3, 4), "policy", (-0.1, -0.2), 0, trained=True))
    return Trajectory(
        segments,
        group,
        sample,
        text=f"answer {sample}",
        reward=Reward(reward, {"exact": reward}),
        facts={"prompt": f"question {group}", **facts},
    )


def test_groups_stay_together_and_the_first_line_has_the_rewards_of_all():
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (3, 0): 0.5, (3, 1): 0.5}
    trajectories = [made(group, sample, reward) for (group, sample), reward in rewards.items()]
    found = list(sample_lines(Experience(trajectories, Batch([[1, 2, 3, 4]] * 4))))
    assert [(line["group"], line["sample"], line["reward"]) for line in found] == [
        (*k, v) for k, v in rewards.items()
    ]
    assert [line.get("group_rewards") for line in found] == [[1.0, 0.0], None, [0.5, 0.5], None]
    assert found[2]["prompt"] == "question 3" and found[3]["completion"] == "answer 1"
    assert found[0]["rewards"] == {"exact": 1.0}
    assert "answer" not in found[0] and "advantage" not in found[0]


def test_the_advantage_is_the_mean_over_trained_tokens():
    batch = Batch([[1, 2, 3, 4]], mask=[[0, 0, 1, 1]], advantages=[[9.0, 9.0, 1.0, 2.0]])
    (line,) = sample_lines(Experience([made(0, 0, 1.0)], batch))
    assert line["advantage"] == pytest.approx(1.5)
    nothing = Batch([[1, 2, 3, 4]], mask=[[0, 0, 0, 0]], advantages=[1.0])
    (line,) = sample_lines(Experience([made(0, 0, 1.0)], nothing))
    assert "advantage" not in line


def test_a_long_answer_is_cut_and_any_answer_is_text():
    trajectories = [made(0, 0, 1.0, answer="x" * 5000), made(1, 0, 1.0, answer=[1, 2])]
    first, second = sample_lines(Experience(trajectories, Batch([[1, 2]] * 2)))
    assert len(first["answer"]) == 1000 and second["answer"] == "[1, 2]"
