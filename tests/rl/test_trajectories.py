"""Trajectories: frozen, the same after a trip through JSON, and one function makes a batch of them."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from shardproof.rl.batches import make_batch
from shardproof.rollout.trajectory import Reward, Segment, Trajectory


def random_trajectory(draw: random.Random) -> Trajectory:
    """A prompt and up to four segments of any author, with the reward of some functions or none."""
    tokens = lambda: tuple(draw.randrange(100) for _ in range(draw.randint(1, 5)))  # noqa: E731
    trajectory = Trajectory.of_prompt(tokens(), group=draw.randrange(9), sample=draw.randrange(9))
    for _ in range(draw.randint(0, 4)):
        drawn = tokens()
        if draw.random() < 0.5:
            segment = Segment(drawn, "policy", tuple(-draw.random() for _ in drawn), draw.randrange(5), True)
        else:
            segment = Segment(drawn, draw.choice(["environment", "template", "data"]))
        trajectory = trajectory.extended(segment, finished=draw.random() < 0.5)
    if draw.random() < 0.5:
        reward = Reward(draw.random(), {"exact": 1.0}, {"other": "it raised"}, draw.random() < 0.5, -0.25)
        trajectory = dataclasses.replace(trajectory, reward=reward, text="é\u2028", facts={"prompt": "1+1="})
    return trajectory


def test_json_gives_the_same_trajectory_back():
    draw = random.Random(0)
    for _ in range(200):
        trajectory = random_trajectory(draw)
        assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory


def test_a_trajectory_does_not_change():
    trajectory = random_trajectory(random.Random(1))
    for one in (trajectory, trajectory.segments[0], Reward(1.0)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, dataclasses.fields(one)[0].name, ())


def test_the_oldest_weights_are_a_trajectorys_version():
    drawn = [Segment((1,), "policy", (-1.0,), version, True) for version in (4, 3, 5)]
    trajectory = Trajectory.of_prompt((1, 2))
    assert trajectory.version is None
    for segment in drawn:
        trajectory = trajectory.extended(segment)
    assert trajectory.version == 3 and trajectory.num_sampled == 3


def test_a_batch_trains_on_every_drawn_token_and_on_no_other():
    """Against a walk over single tokens; a prediction belongs to the token that it predicts."""
    draw = random.Random(2)
    trajectories = [t for t in (random_trajectory(draw) for _ in range(300)) if t.sampled]
    batch = make_batch(trajectories)
    assert batch.sequences == [list(t.tokens) for t in trajectories]
    for trajectory, mask, logps in zip(
        trajectories, batch.columns["mask"], batch.columns["rollout_logps"], strict=True
    ):
        tokens = [
            (float(s.author == "policy"), s.logprobs[k] if s.logprobs is not None else 0.0)
            for s in trajectory.segments
            for k in range(len(s.tokens))
        ]
        assert mask.tolist() == [counted for counted, _ in tokens[1:]]
        assert logps.tolist() == pytest.approx([logp for _, logp in tokens[1:]])


def test_given_completions_have_no_log_probs_of_an_engine():
    given = Trajectory.of_prompt((1, 2)).extended(Segment((3, 4), "data", trained=True))
    batch = make_batch([given])
    assert "rollout_logps" not in batch.columns
    assert batch.columns["mask"][0].tolist() == [0.0, 1.0, 1.0]
