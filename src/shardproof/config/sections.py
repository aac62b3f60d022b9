"""The sections of a recipe, each with what it is for."""

from __future__ import annotations

from shardproof.config.algorithm import Algorithm
from shardproof.config.data import Data
from shardproof.config.environment import Environment
from shardproof.config.evaluation import Evaluation
from shardproof.config.model import Critic, Model, Role
from shardproof.config.optimizer import Optimizer
from shardproof.config.output import Output
from shardproof.config.rewards import Rewards
from shardproof.config.roles import Teacher
from shardproof.config.rollout import Rollout
from shardproof.config.section import Section
from shardproof.config.train import Train


class Sections(Section):
    """What a recipe holds."""

    model: Model
    """The model to train, and how it is sharded."""
    data: Data
    """The prompts to train and to evaluate on."""
    reward: Rewards | None = None
    """What completions are worth. Required for algorithms that learn from rewards, unless an environment gives
    them."""
    rollout: Rollout = Rollout()
    """How completions are sampled."""
    algorithm: Algorithm = Algorithm()
    """The training algorithm and its coefficients."""
    optimizer: Optimizer = Optimizer()
    """The optimizer and its learning-rate schedule."""
    train: Train
    """How long to train, and on how much at a time."""
    output: Output
    """What the run writes, and how often it evaluates."""
    evaluation: Evaluation = Evaluation()
    """How the policy is evaluated on held-out rows, and on which."""
    reference: Role | None = None
    """The frozen model that the policy is compared with, for `algorithm.kl_coef` above 0 and for `dpo` and `kto`.
    By default the policy's starting weights."""
    critic: Critic | None = None
    """The critic of `ppo`. By default the policy's starting weights with a new value head."""
    teacher: Teacher | None = None
    """The model that `distillation` learns from."""
    environment: Environment | None = None
    """What answers the policy in conversations of several turns."""

    @property
    def critic_updates(self) -> int:
        """Updates of everything that is trained from the first step on."""
        return self.train.steps * self.algorithm.updates_per_step

    @property
    def policy_updates(self) -> int:
        """Updates of the policy, which waits while its critic learns alone."""
        steps = max(self.train.steps - self.algorithm.critic_warmup_steps, 1)
        return steps * self.algorithm.updates_per_step
