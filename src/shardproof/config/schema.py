"""The schema of a recipe. Frozen, and free of torch: a recipe is checked in milliseconds."""

from __future__ import annotations

from pydantic import model_validator

from shardproof.config.algorithm import Algorithm
from shardproof.config.combinations import problem_of
from shardproof.config.data import Data
from shardproof.config.environment import Environment
from shardproof.config.model import Critic, Lora, Model, Role
from shardproof.config.optimizer import Optimizer
from shardproof.config.output import Output
from shardproof.config.rewards import Reward, Rewards
from shardproof.config.rollout import Rollout
from shardproof.config.section import Section, keys_of
from shardproof.config.sections import Sections
from shardproof.config.train import Train
from shardproof.user_code import is_user_name

__all__ = [
    "Algorithm",
    "Critic",
    "Data",
    "Environment",
    "Lora",
    "Model",
    "Optimizer",
    "Output",
    "Recipe",
    "Reward",
    "Rewards",
    "Role",
    "Rollout",
    "Section",
    "Train",
    "keys_of",
]


class Recipe(Sections):
    """A whole run."""

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        """Combinations that cannot work, refused before anything starts."""
        problem = problem_of(self)
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def user_code(self) -> list[tuple[str, str]]:
        """(kind, module:name) of what a rank imports from users' modules; rewards and environments have workers."""
        named = [
            ("algorithm", self.algorithm.name),
            ("engine", self.rollout.engine),
            ("optimizer", self.optimizer.name),
            *(("tracker", name) for name in self.output.trackers),
        ]
        return [(kind, name) for kind, name in named if is_user_name(name)]

    @property
    def canary_tolerance(self) -> float:
        """How far log-probs of engine and trainer may be apart after a sync."""
        if self.rollout.canary_tolerance is not None:
            return self.rollout.canary_tolerance
        if self.rollout.exact:
            return 0.0
        return 1e-3 if self.model.compute_dtype == "float32" else 0.5
