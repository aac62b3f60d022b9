"""The section about how long to train, and on how much at a time."""

from __future__ import annotations

from typing import Annotated

from shardproof.config.numbers import Bound, Count, Processes, Seconds, Steps, Tokens
from shardproof.config.section import Section


class Train(Section):
    """How long to train, and on how much at a time."""

    steps: Steps
    """Number of steps. Each step samples completions, scores them, updates the policy and syncs the engine.
    """
    prompts_per_step: Count = 32
    """Prompts per step over all ranks. A step trains on this many times `rollout.group_size` completions."""
    micro_batch_tokens: Tokens = 8192
    """Tokens that each rank runs through the model at a time. Lower it if an update runs out of memory; the
    result is the same, unless `algorithm.router_coef` is above 0."""
    seed: Annotated[int, Bound(ge=0, lt=2**63)] = 0
    """Seed of the order of prompts and of sampling. The same seed gives the same run."""
    ranks: Processes | None = None
    """Processes on this machine. By default one per GPU, or 1 without GPUs."""
    max_consecutive_skips: Count = 3
    """Stop the run after this many updates in a row that were skipped because a loss or gradient was not
    finite."""
    deadline_s: Seconds = 600.0
    """Seconds that a rank waits for the others in one stage (loading, a step, a sync, a checkpoint) before the run ends
    with an error that names the ranks and hosts that did not answer."""
