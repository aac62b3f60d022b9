"""The parts of a run on this rank: models, engine, data, optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist

from shardproof.config.schema import Critic, Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.dist.launch import init_distributed
from shardproof.environments.pool import EnvironmentPool
from shardproof.errors import fail
from shardproof.export.stream import WeightStream
from shardproof.model.roles import REWARD
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.algorithms.registry import make_algorithm
from shardproof.rl.background import BackgroundRollouts
from shardproof.rl.buffer import Buffer
from shardproof.rl.checks import Inputs, check_ahead
from shardproof.rl.controllers import Controllers
from shardproof.rl.conversations.prepare import start_workers
from shardproof.rl.conversations.waves import Conversations
from shardproof.rl.data import HeldOutPrompts, Prompt, PromptStream, Share
from shardproof.rl.drift import MismatchWatch
from shardproof.rl.engines import make_engine, make_sampling, sleeps
from shardproof.rl.finished import FinishedBuffer
from shardproof.rl.given_data import make_offline
from shardproof.rl.inputs import read_inputs
from shardproof.rl.models import check_contexts, check_vocabularies, load_role, longest_sequence, make_trainer
from shardproof.rl.offline import OfflineData
from shardproof.rl.proofs import Ledger
from shardproof.rl.reward_models import RewardModels, load_reward_models
from shardproof.rl.reward_pairs import with_padding
from shardproof.rl.rewards.from_recipe import make_rewards
from shardproof.rl.rollouts import Sampler
from shardproof.rl.rounds import Means
from shardproof.rl.saves import Kept
from shardproof.rl.scorers import Scorers, keeps_reference
from shardproof.rl.sources.streams import make_stream
from shardproof.rl.teacher import load_teacher
from shardproof.rollout.engine import BackgroundEngine, Engine, Sampling
from shardproof.rollout.local import ShardedEngine
from shardproof.rollout.recording import expert_shape
from shardproof.shard.moving import check_movable
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The parts of a run. The loop hands each function those that it reads."""

    recipe: Recipe
    algorithm: Algorithm
    policy: Trainer
    critic: Trainer | None
    scorers: Scorers
    offline: OfflineData | None  # what is trained on where nothing is sampled
    sampler: Sampler
    buffer: Buffer  # of what is sampled to be trained on
    weights: WeightStream  # what the engine is sent
    prompts: Sequence[Prompt]
    held_out: HeldOutPrompts
    stream: PromptStream
    sampling: Sampling
    share: Share  # of the prompts, that this rank takes
    canary: tuple[int, ...]  # a prompt on which engine and trainer are compared
    sleeps: bool  # the engine, while the policy is updated
    controllers: Controllers
    drift: MismatchWatch = field(default_factory=MismatchWatch)

    @property
    def kept(self) -> Kept:
        """What a checkpoint has to hold of the run."""
        moves = bool(self.recipe.algorithm.reference_sync_every)
        rest = self.drift, self.scorers.reference, moves
        return Kept(self.policy, self.critic, self.buffer, self.controllers, *rest)

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
    logger.info(
        "%d prompts to train on, %d held out", len(inputs.prompts), sum(map(len, inputs.held_out.values()))
    )
    models = _load_models(recipe, inputs, algorithm, ledger, step)
    policy, replay = models.scorers.policy, models.scorers.replay
    # SFT samples for its evaluation alone, and a replica would have to be kept up to date for that.
    engine = (
        make_engine(recipe, policy, replay)
        if algorithm.spec.samples
        else ShardedEngine(policy, recipe.rollout.batch_size)
    )
    trainer = make_trainer(recipe, policy, None)
    sampler = _make_sampler(recipe, inputs, workers, engine, trainer, models.rewards)
    # One of the hosts may have a file that another lacks.
    named = [token for row in exchange(list(inputs.stop_ids)) for token in row]
    rollout, train = recipe.rollout, recipe.train
    sampling = make_sampling(rollout, named, inputs.tokenizer)
    share = Share(dist.get_rank(), dist.get_world_size(), policy.sequence_parallel)
    stream = make_stream(recipe, inputs.prompts, inputs.sources, inputs.rates)
    scorers = models.scorers
    offline = make_offline(recipe, algorithm, scorers, share, inputs.prompts, inputs.held_out)
    if recipe.algorithm.preference.precompute:
        scorers = replace(scorers, reference=None)  # it has scored all rows, and its memory is free again
    return Run(
        recipe=recipe,
        algorithm=algorithm,
        policy=trainer,
        critic=models.critic,
        scorers=scorers,
        offline=offline,
        sampler=sampler,
        buffer=_make_buffer(
            recipe,
            Means(
                sampler, sampling, inputs.prompts, rollout.group_size, share, None, algorithm.greedy_baseline
            ),
            stream,
        ),
        weights=WeightStream(policy, policy.settings.compute_dtype, deadline_s=train.deadline_s),
        prompts=inputs.prompts,
        held_out=inputs.held_out,
        stream=stream,
        sampling=sampling,
        share=share,
        canary=inputs.canary,
        controllers=Controllers(algorithm),
        # To wake is collective: all ranks sleep, or none.
        sleeps=algorithm.spec.samples and all(exchange(sleeps(rollout, policy.device))),
    )


@dataclass(frozen=True)
class _Models:
    """The models of a run: those that score batches, what trains the critic, and those that reward."""

    scorers: Scorers
    critic: Trainer | None
    rewards: RewardModels | None


def _load_models(
    recipe: Recipe, inputs: Inputs, algorithm: Algorithm, ledger: Ledger | None, step: int
) -> _Models:
    """Load every role that a run needs. Collective: every rank."""
    with together("settings"):
        check_vocabularies(recipe, inputs.tokenizer)
        check_contexts(recipe, inputs)
    load = partial(load_role, recipe, config=inputs.config, ledger=ledger, step=step)
    policy = load(None, algorithm.spec.role)
    if algorithm.spec.role == REWARD:
        with_padding(policy.model.config, inputs.tokenizer)
    reference = load(recipe.reference, "reference") if keeps_reference(recipe, algorithm) else None
    if recipe.algorithm.reference_sync_every:
        with together("reference"):
            _check_moving(recipe, reference, policy)
    critic = None
    if algorithm.spec.has_critic:
        section = recipe.critic or Critic()
        critic = make_trainer(recipe, load(section, "critic"), section.lr)
    rewards = load_reward_models(recipe, load)
    longest = partial(longest_sequence, recipe, inputs)
    teacher = load_teacher(recipe, load, inputs.tokenizer, policy.sequence_parallel, longest)
    scorers = Scorers(
        policy,
        reference,
        critic.model if critic is not None else None,
        recipe.rollout.temperature,
        recipe.train.micro_batch_tokens,
        expert_shape(policy) if recipe.rollout.replay_experts and algorithm.spec.samples else None,
        teacher,
    )
    return _Models(scorers, critic, rewards)


def _check_moving(recipe: Recipe, reference: ShardedModel | None, policy: ShardedModel) -> None:
    """Raise unless there is a reference that can move towards the policy."""
    if reference is None:
        message = (
            f"algorithm.reference_sync_every: {recipe.algorithm.name!r} has no reference with these settings."
        )
        raise fail("C001", "reference", message, fix="remove the key")
    check_movable(reference, policy)


def _make_sampler(
    recipe: Recipe,
    inputs: Inputs,
    workers: EnvironmentPool | None,
    engine: Engine,
    policy: Trainer,
    models: RewardModels | None,
) -> Sampler:
    """What samples, with the rewards' workers on every rank, or on none: what one rank cannot start, all of them raise.

    Collective: every rank.
    """
    rewards = None
    try:
        with together("reward"):
            rewards = make_rewards(recipe, dist.get_world_size() // policy.model.sequence_parallel)
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
        models=models,
        asks=recipe.data.prompt_column if models is not None else None,
        share=policy.model.sequence_parallel,
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
    background = BackgroundRollouts(
        sampler.engine, sampler.tokenizer, sampler.rewards, sampler.conversations, sampler.asks
    )
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
