"""From trajectories to the batch that a step trains on: one function, for whatever wrote the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.dist.collectives import together
from shardproof.rollout.expert_records import sequence_experts
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.trajectory import Trajectory, conversations_of
from shardproof.train.batching import Batch


def make_batch(trajectories: Sequence[Trajectory], replay: ExpertShape | None = None) -> Batch:
    """This rank's sequences, with a `mask` of the tokens that are trained on and, where tokens were drawn, `rollout_logps`.

    With `replay`, the policy's `expert_shape`, the batch names the experts that the engine chose. An answer that came
    without them raises on every rank. Collective with `replay`: every rank.
    """
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
    batch = Batch(sequences, mask=masks, rollout_logps=drawn).in_conversations(conversations)
    if replay is None:
        return batch
    with together("rollout"):
        return batch.with_experts([sequence_experts(trajectory, replay) for trajectory in trajectories])
