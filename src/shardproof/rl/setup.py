"""The parts of a run on this rank: roles, engine, data, optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from shardproof.config.schema import Model, Recipe, Role
from shardproof.dist.collectives import together
from shardproof.dist.launch import init_distributed
from shardproof.dist.mesh import make_mesh
from shardproof.errors import fail
from shardproof.rl.data import Prompt, PromptStream, encode_prompts, load_rows
from shardproof.rl.rewards import RewardRunner, RewardSpec, find_reward
from shardproof.rollout.engine import Engine, Sampling
from shardproof.rollout.local import EmbeddedEngine, ShardedEngine
from shardproof.shard.load import load
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.optim import make_optimizer, make_schedule


@dataclass
class Trained:
    """A model that is trained, with its optimizer and schedule."""

    model: ShardedModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


@dataclass
class Run:
    """Everything a step needs."""

    recipe: Recipe
    tokenizer: Any
    policy: Trained
    reference: ShardedModel | None  # None: the policy's base with adapters off, or no KL at all
    critic: Trained | None
    engine: Engine
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    stream: PromptStream
    rewards: RewardRunner
    sampling: Sampling

    @property
    def data_rank(self) -> int:
        """Which share of the prompts this rank takes; ranks of one sequence-parallel group take the same."""
        return dist.get_rank() // self.policy.model.sequence_parallel

    @property
    def data_size(self) -> int:
        return dist.get_world_size() // self.policy.model.sequence_parallel


def check_data(recipe: Recipe) -> tuple[Any, list[Prompt], list[Prompt]]:
    """(tokenizer, training prompts, held-out prompts), checked against the recipe."""
    folder = Path(recipe.model.path)
    tokenizer = AutoTokenizer.from_pretrained(
        recipe.model.path, trust_remote_code=recipe.model.trust_remote_code
    )
    data = recipe.data
    rows = load_rows(data.train, data.prompt_column, data.answer_column)
    prompts = encode_prompts(rows, tokenizer, data.prompt_column, data.chat, data.max_prompt_tokens)
    held_out: list[Prompt] = []
    if data.evaluation is not None:
        held_rows = load_rows(data.evaluation, data.prompt_column, data.answer_column)
        held_out = encode_prompts(held_rows, tokenizer, data.prompt_column, data.chat, data.max_prompt_tokens)
    for spec in recipe.reward.functions:
        find_reward(spec.name)
    limit = _context_length(folder)
    longest = max(len(prompt.tokens) for prompt in [*prompts, *held_out])
    if limit is not None and longest + recipe.rollout.max_new_tokens > limit:
        message = (
            f"the longest prompt has {longest} tokens; with rollout.max_new_tokens={recipe.rollout.max_new_tokens} it "
            f"does not fit the model's {limit} positions."
        )
        raise fail("C005", "data", message, fix="set data.max_prompt_tokens, or lower rollout.max_new_tokens")
    return tokenizer, prompts, held_out


def _context_length(folder: Path) -> int | None:
    from transformers import AutoConfig

    from shardproof.model.families import max_positions

    return max_positions(AutoConfig.from_pretrained(folder))


def set_up(recipe: Recipe) -> Run:
    """Load every role and part of a run. Collective: every rank."""
    init_distributed()
    with together("data"):
        tokenizer, prompts, held_out = check_data(recipe)
    policy = _load_role(recipe.model, None, "policy")
    needs_reference = recipe.algorithm.kl_coef > 0 and recipe.model.lora is None
    reference = _load_role(recipe.model, recipe.reference or Role(), "reference") if needs_reference else None
    critic = None
    if recipe.algorithm.name == "ppo":
        section = recipe.critic or Role()
        critic = _trained(recipe, _load_role(recipe.model, section, "critic"), section.lr)
    engine: Engine = EmbeddedEngine(policy) if recipe.rollout.engine == "embedded" else ShardedEngine(policy)
    stops = {tokenizer.eos_token_id} - {None}
    rollout = recipe.rollout
    return Run(
        recipe=recipe,
        tokenizer=tokenizer,
        policy=_trained(recipe, policy, None),
        reference=reference,
        critic=critic,
        engine=engine,
        prompts=prompts,
        eval_prompts=held_out[: recipe.output.eval_prompts],
        stream=PromptStream(len(prompts), recipe.train.seed),
        rewards=RewardRunner(
            [RewardSpec(spec.name, spec.weight) for spec in recipe.reward.functions],
            timeout_s=recipe.reward.timeout_s,
            num_workers=recipe.reward.num_workers,
            on_error=recipe.reward.on_error,
        ),
        sampling=Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, tuple(sorted(stops))),
    )


def _load_role(model: Model, section: Role | None, role: str) -> ShardedModel:
    lora = None
    if role == "policy" and model.lora is not None:
        from peft import LoraConfig

        lora = LoraConfig(
            r=model.lora.r, lora_alpha=model.lora.alpha, target_modules=model.lora.target_modules
        )
    override = section or Role()
    return load(
        override.path or model.path,
        role=role,
        strategy=override.strategy or model.strategy,
        mesh=make_mesh(replicate=model.replicate),
        param_dtype=getattr(torch, model.param_dtype),
        compute_dtype=getattr(torch, model.compute_dtype),
        cpu_offload=model.cpu_offload if override.cpu_offload is None else override.cpu_offload,
        lora=lora,
        sequence_parallel=model.sequence_parallel,
        checkpoint_activations=model.checkpoint_activations if role != "reference" else False,
        trust_remote_code=model.trust_remote_code,
    )


def _trained(recipe: Recipe, model: ShardedModel, lr: float | None) -> Trained:
    settings = recipe.optimizer
    optimizer = make_optimizer(model, lr or settings.lr, settings.weight_decay, settings.betas)
    total = recipe.train.steps * recipe.algorithm.updates_per_batch
    return Trained(
        model, optimizer, make_schedule(optimizer, settings.schedule, settings.warmup_steps, total)
    )
