"""The parts of a run on this rank: models, engine, data, optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from shardproof.config.schema import Recipe, Role, Rollout
from shardproof.dist.collectives import exchange, together
from shardproof.dist.launch import init_distributed
from shardproof.dist.mesh import make_mesh
from shardproof.environments.pool import EnvironmentPool
from shardproof.errors import fail
from shardproof.export.stream import WeightStream
from shardproof.model.exact import make_exact
from shardproof.model.roles import RoleModule
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.algorithms.registry import make_algorithm
from shardproof.rl.background import BackgroundRollouts
from shardproof.rl.buffer import Buffer
from shardproof.rl.checks import Inputs, check_ahead, make_lora
from shardproof.rl.conversations.prepare import start_workers
from shardproof.rl.conversations.waves import Conversations
from shardproof.rl.data import Prompt, PromptStream, Share
from shardproof.rl.drift import MismatchWatch
from shardproof.rl.experience import Scorers
from shardproof.rl.finished import FinishedBuffer
from shardproof.rl.inputs import read_inputs
from shardproof.rl.proofs import Ledger, proved_load
from shardproof.rl.rewards import RewardRunner, RewardSpec
from shardproof.rl.rollouts import Sampler
from shardproof.rl.rounds import Means
from shardproof.rollout.engine import BackgroundEngine, Engine, Sampling
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.local import EmbeddedEngine, ShardedEngine
from shardproof.rollout.recording import expert_shape
from shardproof.shard.load import load
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.sleeping import can_sleep
from shardproof.train.optim import make_optimizer, make_schedule
from shardproof.train.trainer import Trainer
from shardproof.user_code import import_named, is_user_name
from shardproof.weights.source import RandomInit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The parts of a run. The loop hands each function those that it reads."""

    recipe: Recipe
    algorithm: Algorithm
    policy: Trainer
    critic: Trainer | None
    scorers: Scorers
    sampler: Sampler
    buffer: Buffer  # of what is sampled to be trained on
    weights: WeightStream  # what the engine is sent
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    stream: PromptStream
    sampling: Sampling
    share: Share  # of the prompts, that this rank takes
    canary: tuple[int, ...]  # a prompt on which engine and trainer are compared
    sleeps: bool  # the engine, while the policy is updated
    drift: MismatchWatch = field(default_factory=MismatchWatch)

    @property
    def background(self) -> BackgroundRollouts | None:
        """What samples while the policy trains; None if the engine computes in this process."""
        return self.buffer.means.background

    def close(self) -> None:
        """Give up what is begun, and end engine, environment and rewards' workers."""
        self.buffer.close()
        if self.background is not None:
            self.background.close()
        self.sampler.close()


def set_up(recipe: Recipe, ledger: Ledger | None = None, step: int = 0) -> Run:
    """Load every model and part of a run; the ledger gets a line per load. Collective: every rank."""
    init_distributed()
    workers: EnvironmentPool | None = None
    try:
        if recipe.environment is not None:
            logger.info("starting the environment ...")
            with together("data"):
                workers = start_workers(recipe.environment)
        logger.info("reading the data ...")
        inputs = read_inputs(recipe, workers)
        with together("data"):
            algorithm = make_algorithm(recipe.algorithm, recipe.rollout)
        return _load(recipe, inputs, algorithm, workers, ledger, step)
    except BaseException:
        if workers is not None:
            workers.close()
        raise


def _load(
    recipe: Recipe,
    inputs: Inputs,
    algorithm: Algorithm,
    workers: EnvironmentPool | None,
    ledger: Ledger | None,
    step: int,
) -> Run:
    logger.info("%d prompts to train on, %d held out", len(inputs.prompts), len(inputs.held_out))
    load_role = partial(_load_role, recipe, config=inputs.config, ledger=ledger, step=step)
    policy = load_role(None, "policy")
    needs_reference = "ref_logps" in algorithm.columns and recipe.model.lora is None
    reference = load_role(recipe.reference, "reference") if needs_reference else None
    critic = None
    if algorithm.spec.has_critic:
        section = recipe.critic or Role()
        critic = _trainer(recipe, load_role(section, "critic"), section.lr)
    # SFT samples for its evaluation alone, and a replica would have to be kept up to date for that.
    replay = expert_shape(policy) if recipe.rollout.replay_experts and algorithm.spec.samples else None
    engine = (
        make_engine(recipe, policy, replay)
        if algorithm.spec.samples
        else ShardedEngine(policy, recipe.rollout.batch_size)
    )
    trainer = _trainer(recipe, policy, None)
    sampler = _make_sampler(recipe, inputs, workers, engine, trainer)
    # One of the hosts may have a file that another lacks.
    stop_ids = tuple(sorted({token for row in exchange(list(inputs.stop_ids)) for token in row}))
    rollout, train = recipe.rollout, recipe.train
    sampling = Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, stop_ids)
    share = Share(dist.get_rank(), dist.get_world_size(), policy.sequence_parallel)
    stream = PromptStream(len(inputs.prompts), train.seed)
    return Run(
        recipe=recipe,
        algorithm=algorithm,
        policy=trainer,
        critic=critic,
        scorers=Scorers(
            policy,
            reference,
            critic.model if critic is not None else None,
            rollout.temperature,
            train.micro_batch_tokens,
            replay,
        ),
        sampler=sampler,
        buffer=_make_buffer(
            recipe, Means(sampler, sampling, inputs.prompts, rollout.group_size, share), stream
        ),
        weights=WeightStream(policy, policy.settings.compute_dtype, deadline_s=train.deadline_s),
        prompts=inputs.prompts,
        held_out=inputs.held_out,
        stream=stream,
        sampling=sampling,
        share=share,
        canary=inputs.canary,
        # To wake is collective: all ranks sleep, or none.
        sleeps=algorithm.spec.samples and all(exchange(sleeps(rollout, policy.device))),
    )


def _make_sampler(
    recipe: Recipe, inputs: Inputs, workers: EnvironmentPool | None, engine: Engine, policy: Trainer
) -> Sampler:
    """What samples, with the rewards' workers on every rank, or on none: what one rank cannot start, all of them raise.

    Collective: every rank.
    """
    rewards = None
    try:
        with together("reward"):
            rewards = _make_rewards(recipe)
    except BaseException:
        if rewards is not None:
            rewards.close()
        engine.close()
        raise
    conversations = None
    if recipe.environment is not None and workers is not None and inputs.rules is not None:
        stops = recipe.environment.on_error == "stop"
        conversations = Conversations(workers, inputs.rules, stops, policy.model.sequence_parallel)
    lending = partial(_lending, policy) if recipe.rollout.offload_policy else nullcontext
    return Sampler(
        engine,
        inputs.tokenizer,
        rewards,
        policy.model,
        recipe.train.seed,
        conversations,
        lending,
    )


def _make_buffer(recipe: Recipe, means: Means, stream: PromptStream) -> Buffer:
    """What is sampled to be trained on; in the background, if the engine can do that."""
    sampler, rollout, train = means.sampler, recipe.rollout, recipe.train
    sizes = {"num_prompts": train.prompts_per_step, "num_steps": train.steps, "ahead": rollout.ahead}
    if not isinstance(sampler.engine, BackgroundEngine) or sampler.rewards is None:
        # What is begun is complete at once: both orders are the same.
        return Buffer(means, stream, **sizes)
    try:
        check_ahead(rollout)
    except BaseException:
        sampler.close()
        raise
    background = BackgroundRollouts(sampler.engine, sampler.tokenizer, sampler.rewards, sampler.conversations)
    means = replace(means, background=background)
    if rollout.order == "finished":
        return FinishedBuffer(means, stream, **sizes, drops=rollout.too_old == "drop")
    return Buffer(means, stream, **sizes)


@contextmanager
def _lending(policy: Trainer) -> Iterator[None]:
    """Lend the policy's device memory to the engine inside the block."""
    policy.model.offload(policy.optimizer)
    try:
        yield
    finally:
        policy.model.onload()


def _make_rewards(recipe: Recipe) -> RewardRunner | None:
    """What scores completions: None where nothing does, and without functions where the environment alone does."""
    settings = recipe.reward
    if settings is None:
        return None if recipe.environment is None else RewardRunner([])
    return RewardRunner(
        [RewardSpec(spec.name, spec.weight) for spec in settings.functions],
        timeout_s=settings.timeout_s,
        num_workers=settings.num_workers,
        on_error=settings.on_error,
    )


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
        return VllmEngine(policy, settings, tolerance, size, bool(rollout.sleep), replay)
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


def _load_role(
    recipe: Recipe,
    section: Role | None,
    role: str,
    *,
    config: PretrainedConfig,
    ledger: Ledger | None,
    step: int,
) -> ShardedModel:
    model, override = recipe.model, section or Role()
    exact = recipe.rollout.exact and role == "policy"
    source: str | RandomInit = override.path or model.path
    if model.random_init and override.path is None:
        source = RandomInit(config, recipe.train.seed)
    make = partial(
        load,
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
        compile=False if exact else model.compile,
    )
    loaded = proved_load(ledger, step, role, make)
    if exact:
        roots = (module for module in loaded.module.modules() if isinstance(module, RoleModule))
        make_exact(loaded.model, loaded.device, *roots)
    return loaded


def _trainer(recipe: Recipe, model: ShardedModel, lr: float | None) -> Trainer:
    settings = recipe.optimizer
    # A user's may fail on one rank alone; making it issues no collectives.
    with together("settings") if is_user_name(settings.name) else nullcontext():
        optimizer = make_optimizer(model, **(settings.arguments | ({} if lr is None else {"lr": lr})))
    total = recipe.train.steps * recipe.algorithm.updates_per_batch
    schedule = make_schedule(optimizer, settings.schedule, settings.warmup_steps, total, settings.final_ratio)
    return Trainer(model, optimizer, schedule)
