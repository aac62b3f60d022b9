"""The parts of a run on this rank: roles, engine, data, optimizers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import PretrainedConfig

from shardproof.checkpoints.state import resume
from shardproof.config.schema import Recipe, Rewards, Role
from shardproof.dist.collectives import exchange, together
from shardproof.dist.launch import init_distributed
from shardproof.dist.mesh import make_mesh
from shardproof.export.stream import WeightStream
from shardproof.rl.agreement import agree_on
from shardproof.rl.checks import check_inputs, make_lora
from shardproof.rl.data import Prompt, PromptStream
from shardproof.rl.rewards import RewardRunner, RewardSpec
from shardproof.rollout.engine import Engine, Sampling
from shardproof.rollout.local import EmbeddedEngine, ShardedEngine
from shardproof.shard.load import load
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.optim import make_optimizer, make_schedule
from shardproof.weights.source import RandomInit


@dataclass
class Trained:
    """A model that is trained, with its optimizer and schedule."""

    model: ShardedModel
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR

    def resume(self, folder: Path, which: str) -> dict[str, Any]:
        """Load a checkpoint; returns its `extra`. Collective: every rank.

        Settings of optimizer and schedule stay the recipe's: what the user allowed to change takes effect, at once.
        """
        groups, scheduler = self.optimizer.param_groups, self.scheduler
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        base_lrs = list(scheduler.base_lrs)
        extra = resume(folder, self.model, self.optimizer, scheduler, which)
        scheduler.base_lrs = base_lrs
        ratios = [ratio(scheduler.last_epoch) for ratio in scheduler.lr_lambdas]
        scheduler._last_lr = [base * ratio for base, ratio in zip(base_lrs, ratios, strict=True)]
        for group, given, lr in zip(groups, settings, scheduler._last_lr, strict=True):
            group.update(given | {"lr": lr})
        return extra


@dataclass
class Run:
    """Everything a step needs."""

    recipe: Recipe
    tokenizer: Any
    policy: Trained
    reference: ShardedModel | None  # None: the policy's base with adapters off, or no KL at all
    critic: Trained | None
    engine: Engine
    weights: WeightStream  # what the engine is sent
    prompts: list[Prompt]
    held_out: list[Prompt]
    eval_prompts: list[Prompt]  # the first of those held out
    stream: PromptStream
    rewards: RewardRunner | None  # None: imitation without held-out completions to score
    sampling: Sampling

    @property
    def imitates(self) -> bool:
        """The completions are given (SFT), not sampled."""
        return self.recipe.algorithm.name == "sft"

    @property
    def data_rank(self) -> int:
        """Which share of the prompts this rank takes; ranks of one sequence-parallel group take the same."""
        return dist.get_rank() // self.policy.model.sequence_parallel

    @property
    def data_size(self) -> int:
        return dist.get_world_size() // self.policy.model.sequence_parallel


def set_up(recipe: Recipe) -> Run:
    """Load every role and part of a run. Collective: every rank."""
    init_distributed()
    with together("data"):
        inputs = check_inputs(recipe)
    agree_on(recipe, inputs)
    imitate = recipe.algorithm.name == "sft"
    policy = _load_role(recipe, None, "policy", inputs.config)
    needs_reference = recipe.algorithm.kl_coef > 0 and recipe.model.lora is None
    reference = _load_role(recipe, recipe.reference, "reference", inputs.config) if needs_reference else None
    critic = None
    if recipe.algorithm.name == "ppo":
        section = recipe.critic or Role()
        critic = _trained(recipe, _load_role(recipe, section, "critic", inputs.config), section.lr)
    # Imitation samples for its evaluation alone, and a replica would have to be kept up to date for that.
    size = recipe.rollout.batch_size
    engine = ShardedEngine(policy, size) if imitate else make_engine(recipe, policy)
    trained = _trained(recipe, policy, None)
    rollout = recipe.rollout
    # One of the hosts may have a file that another lacks.
    stop_ids = tuple(sorted({token for row in exchange(list(inputs.stop_ids)) for token in row}))
    return Run(
        recipe=recipe,
        tokenizer=inputs.tokenizer,
        policy=trained,
        reference=reference,
        critic=critic,
        engine=engine,
        weights=WeightStream(policy, policy.settings.compute_dtype),
        prompts=inputs.prompts,
        held_out=inputs.held_out,
        eval_prompts=inputs.held_out[: recipe.output.eval_prompts],
        stream=PromptStream(len(inputs.prompts), recipe.train.seed),
        rewards=_start_rewards(recipe.reward, engine),
        sampling=Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, stop_ids),
    )


def _start_rewards(settings: Rewards | None, engine: Engine) -> RewardRunner | None:
    """The rewards' workers on every rank, or on none: what one rank cannot start, all of them raise, and end the rest.

    Collective: every rank.
    """
    rewards = None
    try:
        with together("reward"):
            rewards = _make_rewards(settings)
    except BaseException:
        if rewards is not None:
            rewards.close()
        engine.close()
        raise
    return rewards


def _make_rewards(settings: Rewards | None) -> RewardRunner | None:
    if settings is None:
        return None
    return RewardRunner(
        [RewardSpec(spec.name, spec.weight) for spec in settings.functions],
        timeout_s=settings.timeout_s,
        num_workers=settings.num_workers,
        on_error=settings.on_error,
    )


def make_engine(recipe: Recipe, policy: ShardedModel) -> Engine:
    """The rollout engine that a recipe names. Collective: every rank."""
    if recipe.rollout.engine == "vllm":
        from shardproof.rollout.vllm_engine import VllmEngine

        rollout, settings = recipe.rollout, recipe.rollout.vllm
        if recipe.model.trust_remote_code:
            settings = replace(settings, args=[*settings.args, "--trust-remote-code"])
        return VllmEngine(policy, settings, recipe.canary_tolerance, rollout.batch_size, rollout.sleep)
    with together("rollout"):  # a replica may fit the memory of some ranks and not of others
        kind = EmbeddedEngine if recipe.rollout.engine == "embedded" else ShardedEngine
        return kind(policy, recipe.rollout.batch_size)


def _load_role(recipe: Recipe, section: Role | None, role: str, config: PretrainedConfig) -> ShardedModel:
    model, override = recipe.model, section or Role()
    source: str | RandomInit = override.path or model.path
    if model.random_init and override.path is None:
        source = RandomInit(config, recipe.train.seed)
    return load(
        source,
        role=role,
        strategy=override.strategy or model.strategy,
        mesh=make_mesh(replicate=model.replicate),
        param_dtype=getattr(torch, model.param_dtype),
        compute_dtype=getattr(torch, model.compute_dtype),
        cpu_offload=model.cpu_offload if override.cpu_offload is None else override.cpu_offload,
        lora=make_lora(model) if role == "policy" else None,
        sequence_parallel=model.sequence_parallel,
        checkpoint_activations=model.checkpoint_activations if role != "reference" else False,
        reshard_after_forward=model.reshard_after_forward,
        trust_remote_code=model.trust_remote_code,
        compile=model.compile,
    )


def _trained(recipe: Recipe, model: ShardedModel, lr: float | None) -> Trained:
    settings = recipe.optimizer
    optimizer = make_optimizer(
        model, settings.lr if lr is None else lr, settings.weight_decay, settings.betas
    )
    total = recipe.train.steps * recipe.algorithm.updates_per_batch
    return Trained(
        model,
        optimizer,
        make_schedule(optimizer, settings.schedule, settings.warmup_steps, total, settings.final_ratio),
    )
