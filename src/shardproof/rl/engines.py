"""The rollout engine that a recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardproof.config.schema import Recipe, Rollout
from shardproof.dist.collectives import together
from shardproof.errors import fail
from shardproof.rollout.engine import Engine, Sampling
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.local import EmbeddedEngine, ShardedEngine
from shardproof.rollout.stop_strings import StopStrings
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.sleeping import can_sleep
from shardproof.user_code import import_named, is_user_name


def make_engine(recipe: Recipe, policy: ShardedModel, replay: ExpertShape | None = None) -> Engine:
    """The rollout engine that a recipe names; with `replay` it records the experts that it chooses.

    Collective: every rank.
    """
    if recipe.rollout.engine == "vllm":
        from shardproof.rollout.vllm_engine import VllmEngine

        rollout, settings = recipe.rollout, recipe.rollout.vllm
        if recipe.model.trust_remote_code:
            settings = replace(settings, args=[*settings.args, "--trust-remote-code"])
        tolerance, size = recipe.canary_tolerance, rollout.batch_size
        strings = bool(rollout.stop) or "stop" in rollout.row_overrides
        return VllmEngine(policy, settings, tolerance, size, bool(rollout.sleep), replay, strings)
    with together("rollout"):  # a replica may fit the memory of some ranks and not of others
        if is_user_name(recipe.rollout.engine):
            return _users_engine(recipe.rollout, policy)
        if recipe.rollout.engine == "sharded":
            return ShardedEngine(policy, recipe.rollout.batch_size, replay)
        rollout = recipe.rollout
        return EmbeddedEngine(
            policy,
            rollout.batch_size,
            rollout.cache_gib,
            replay,
            kv_cache_gib=rollout.kv_cache_gib,
            fp8=rollout.fp8,
            exact=rollout.exact,
            sleeps=sleeps(rollout, policy.device),
        )


def sleeps(rollout: Rollout, device: torch.device) -> bool:
    """Whether the engine sleeps during updates: as the recipe says, else where it then keeps its CUDA graphs."""
    if rollout.sleep is not None:
        return rollout.sleep
    return rollout.engine == "embedded" and rollout.fp8 == "off" and can_sleep(device)


def _users_engine(rollout: Rollout, policy: ShardedModel) -> Engine:
    engine: Engine = import_named("engine", rollout.engine)(policy, rollout)
    missing = [name for name in vars(Engine) if not name.startswith("_") and not hasattr(engine, name)]
    if missing:
        message = f"engine {rollout.engine!r} lacks {', '.join(missing)}."
        raise fail("C001", "rollout", message, fix="see docs/extending.md")
    return engine


def make_sampling(rollout: Rollout, stop_ids: Sequence[int], tokenizer: Any) -> Sampling:
    """How a recipe's completions are sampled; `stop_ids` are those that the model's files name."""
    reads_strings = bool(rollout.stop) or "stop" in rollout.row_overrides
    return Sampling(
        rollout.max_new_tokens,
        rollout.temperature,
        rollout.top_p,
        tuple(sorted({*stop_ids, *rollout.stop_ids})),
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        presence_penalty=rollout.presence_penalty,
        frequency_penalty=rollout.frequency_penalty,
        min_new_tokens=rollout.min_new_tokens,
        stop=StopStrings(rollout.stop, tokenizer) if reads_strings else None,
        include_stop=rollout.include_stop,
    )
