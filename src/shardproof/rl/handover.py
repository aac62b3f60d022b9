"""The hand-over of weights to the engine, and the proof that it samples from them."""

from __future__ import annotations

import math
import time

import torch

from shardproof.bounds import largest, within
from shardproof.dist.collectives import exchange
from shardproof.errors import fail
from shardproof.export.manifest import ExportReceipt
from shardproof.export.stream import WeightStream
from shardproof.rl.proofs import Proof
from shardproof.rollout.engine import Engine, Request, Sampling, generate
from shardproof.rollout.fp8 import Float8Weights
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.score import logprobs

_CANARY_TOKENS = 8


def hand_over(
    engine: Engine,
    weights: WeightStream,
    canary: Request,
    sampling: Sampling,
    tolerance: float,
    proof: Proof,
) -> dict[str, float]:
    """Send the weights to the engine, and prove on a canary that it samples from them; returns the metrics.

    `proof` takes the receipt, and the canary's gap whether it is allowed or not. Of an engine that rounds its weights the
    log-probs before rounding are compared, and how far rounding moves those of the canary is a metric. Collective: every
    rank.
    """
    started = time.perf_counter()
    receipt = engine.load_weights(weights)
    if not isinstance(receipt, ExportReceipt):
        message = f"the engine's load_weights returned {type(receipt).__name__}, not the stream's receipt."
        raise fail("R500", "sync", message, fix="see docs/extending.md#an-engine")
    synced = time.perf_counter()
    gap = engine.canary_gap
    if gap is None:
        gap = canary_gap(engine, weights.policy, canary, sampling)
    proof.take(receipt)
    metrics = {"time/sync": synced - started}
    rounded: Float8Weights | None = getattr(engine, "float8", None)
    if rounded is not None:
        metrics["canary/rounding"] = proof.details["rounding"] = gap
        gap = _unrounded_gap(rounded, weights.policy)
        proof.text += "; compared before its weights were rounded to 8 bits"
    proof.details["gap"] = metrics["canary/gap"] = gap
    version = weights.policy.version
    if not within(gap, tolerance):
        message = (
            f"engine and trainer log-probs of the canary differ by {gap:.3g}, the tolerance is {tolerance:g}."
        )
        raise fail("R503", "sync", f"after version {version} {message}")
    if not math.isfinite(metrics.get("canary/rounding", 0.0)):
        message = (
            "the engine's log-probs of the canary are not finite once its weights are rounded to 8 bits."
        )
        raise fail("R503", "sync", f"after version {version} {message}", fix="set rollout.fp8='off'")
    return metrics


def _unrounded_gap(rounded: Float8Weights, policy: ShardedModel) -> float:
    """The largest difference between the trainer's log-probs of some tokens and the engine's before it rounded its weights.

    Collective: every rank.
    """
    trained = logprobs(policy, rounded.canary, 1.0)
    gaps = [abs(float(each[-1]) - said) for each, said in zip(trained, rounded.said, strict=True)]
    return largest(exchange(largest(gaps)))


def canary_gap(engine: Engine, policy: ShardedModel, canary: Request, sampling: Sampling) -> float:
    """The largest difference between the engine's and the trainer's log-probs of a few sampled tokens, over ranks.

    Collective: every rank.
    """
    num_tokens = min(_CANARY_TOKENS, sampling.max_new_tokens)
    # The whole distribution, to the end: a nucleus has other log-probs, and a stop token would leave too few.
    plain = Sampling(num_tokens, sampling.temperature)
    (trajectory,) = generate(engine, [canary], plain)
    (trained,) = logprobs(policy, [list(trajectory.tokens)], sampling.temperature)
    (drawn,) = trajectory.sampled
    gap = (trained.cpu()[-len(drawn.tokens) :] - torch.tensor(drawn.logprobs)).abs().max()
    return largest(exchange(float(gap)))
