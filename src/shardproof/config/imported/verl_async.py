"""verl's trainers that sample on GPUs of their own while they train: fully asynchronous, and one step off."""

from __future__ import annotations

import math

from shardproof.config.imported.draft import Draft, Foreign
from shardproof.config.imported.shared_settings import measure_from_engine
from shardproof.config.imported.verl_objective import ACTOR

_OWN, _SERVERS = "async_training", "rollout"


def running_ahead(draft: Draft, foreign: Foreign) -> None:
    """What samples ahead of the updates, and how much of it is a step of ours."""
    is_async = any(key.startswith(f"{_OWN}.") for key in foreign.values)
    if not (is_async or foreign.has(f"{_SERVERS}.n_gpus_per_node")):
        return
    ahead = 1
    if is_async:
        _between_syncs(draft, foreign)
        ahead = math.ceil(float(foreign.take(f"{_OWN}.staleness_threshold", 0.1)))
    draft.put(
        "rollout.ahead", ahead, f"{_OWN}.staleness_threshold" if is_async else "sampling runs one step off"
    )
    if is_async and ahead:
        draft.put("rollout.order", "finished", "verl trains on what is finished first")
    gpus = int(foreign.take(f"{_SERVERS}.n_gpus_per_node", 8)) * int(foreign.take(f"{_SERVERS}.nnodes", 1))
    if draft.values["rollout.engine"] == "vllm":
        each = int(draft.values["rollout.vllm.tensor_parallel_size"])
        draft.put("rollout.vllm.replicas", max(1, gpus // each), f"{_SERVERS}.nnodes, n_gpus_per_node")
        draft.put("rollout.sleep", False, "servers have GPUs of their own")
    draft.skip(foreign, f"{_SERVERS}.n", "actor_rollout_ref.rollout.n says it")
    draft.skip(foreign, f"{_SERVERS}.total_epochs", "see train.steps")
    draft.skip(foreign, f"{_OWN}.*", "see docs/running-ahead.md")


def updates_per_rate(draft: Draft, foreign: Foreign) -> int:
    """The updates of an epoch between two moves of verl's learning rate: a step's, or those of the batches that it waits for."""
    if any(key.startswith(f"{_OWN}.") for key in foreign.values):
        return int(foreign.take(f"{_OWN}.require_batches", 1))
    return int(draft.values["algorithm.updates_per_epoch"])


def _between_syncs(draft: Draft, foreign: Foreign) -> None:
    """A step is what verl trains on between two times that its servers get weights."""
    mini = int(foreign.take(f"{ACTOR}.ppo_mini_batch_size", 256))
    updates = int(foreign.take(f"{_OWN}.require_batches", 1))
    updates *= int(foreign.take(f"{_OWN}.trigger_parameter_sync_step", 4))
    origin = f"{_OWN}.require_batches x trigger_parameter_sync_step"
    draft.put("train.prompts_per_step", mini * updates, f"{origin} x {ACTOR}.ppo_mini_batch_size")
    draft.put("algorithm.updates_per_epoch", updates, origin)
    draft.to_fill.pop("algorithm.updates_per_epoch", None)
    draft.gaps = {gap: why for gap, why in draft.gaps.items() if not gap.startswith("data.gen_batch_size=")}
    asks_engine = foreign.take(f"{_OWN}.use_rollout_log_probs", True)
    computes = foreign.take(f"{_OWN}.compute_prox_log_prob", False)
    if asks_engine and not computes:
        measure_from_engine(draft, f"{_OWN}.use_rollout_log_probs")
