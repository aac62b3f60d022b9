"""From trajectories to the batch that a step trains on: one function, for whatever wrote the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.rollout.trajectory import Trajectory, conversations_of
from shardproof.train.batching import Batch


def make_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """This rank's sequences, with a `mask` of the tokens that are trained on and, where tokens were drawn, `rollout_logps`."""
    sequences = [trajectory.tokens for trajectory in trajectories]
    conversations = conversations_of(trajectories)
    masks = [
        [float(segment.trained) for segment in trajectory.segments for _ in segment.tokens]
        for trajectory in trajectories
    ]
    if not all(trajectory.sampled for trajectory in trajectories):
        return Batch(sequences, mask=masks).in_conversations(conversations)
    drawn = [
        [logp for segment in t.segments for logp in segment.logprobs or [0.0] * len(segment.tokens)]
        for t in trajectories
    ]
    return Batch(sequences, mask=masks, rollout_logps=drawn).in_conversations(conversations)
