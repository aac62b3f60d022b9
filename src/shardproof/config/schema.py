"""The schema of a recipe. Frozen, and free of torch: a recipe is checked in milliseconds."""

from __future__ import annotations

from pydantic import model_validator

from shardproof.config.algorithms import SPECS, AlgorithmSpec
from shardproof.config.data import Data, Reward, Rewards
from shardproof.config.environment import Environment
from shardproof.config.learning import Algorithm, Optimizer, Train
from shardproof.config.model import Lora, Model, Role
from shardproof.config.output import Output
from shardproof.config.rollout import Rollout
from shardproof.config.section import Section, keys_of
from shardproof.user_code import is_user_name

__all__ = [
    "Algorithm",
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
    "spec_problem",
]


class Recipe(Section):
    """A whole run."""

    model: Model
    """The model to train, and how it is sharded."""
    data: Data
    """The prompts to train and to evaluate on."""
    reward: Rewards | None = None
    """What completions are worth. Required for every algorithm except `sft`, unless an environment rewards
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
    reference: Role | None = None
    """The frozen model that the KL is measured from, for `algorithm.kl_coef` above 0. By default the policy's
    starting weights."""
    critic: Role | None = None
    """The critic of `ppo`. By default the policy's starting weights with a new value head."""
    environment: Environment | None = None
    """What answers the policy in conversations of several turns."""

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        """Combinations that cannot work, refused before anything starts."""
        checks = (_algorithm, _roles, _divergence, _sampling, _float8, _exact, _turns, _batching)
        problem = next(filter(None, (check(self) for check in checks)), None)
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


def spec_problem(recipe: Recipe, spec: AlgorithmSpec) -> str | None:
    """What in the recipe does not fit its algorithm; None if all does."""
    name, settings = recipe.algorithm.name, recipe.algorithm
    if recipe.reward is None and recipe.environment is None and spec.samples:
        return f"reward is missing: {name} learns from rewards; name a function in reward.functions"
    if recipe.environment is not None and not spec.samples:
        return f"environment: {name} learns from given completions; remove the section"
    if recipe.critic is not None and not spec.has_critic:
        return f"critic: {name} has no critic; remove the section or use algorithm.name='ppo'"
    if not spec.samples and (settings.kl_coef or settings.entropy_coef):
        return f"algorithm.kl_coef and algorithm.entropy_coef are for algorithms that sample, not for {name}"
    if not spec.samples and settings.updates_per_batch > 1:
        return f"algorithm.updates_per_batch: {name} takes one update per batch; raise train.steps instead"
    if not spec.samples and (settings.correction != "auto" or settings.trust_region != "auto"):
        return (
            f"algorithm.correction and algorithm.trust_region are for algorithms that sample, not for {name}"
        )
    if not spec.samples and recipe.rollout.replay_experts:
        return f"rollout.replay_experts is for algorithms that sample, not for {name}"
    if not spec.samples and recipe.rollout.fp8 != "off":
        return f"rollout.fp8 is for algorithms that sample, not for {name}"
    if not spec.samples and recipe.rollout.exact:
        return f"rollout.exact is for algorithms that sample, not for {name}"
    if spec.compares_group and recipe.rollout.group_size < 2:
        return f"rollout.group_size=1: {name} compares completions of one prompt and needs at least 2"
    if settings.credit == "turn" and not spec.compares_group:
        return (
            f"algorithm.credit='turn' is for algorithms that compare a group; {name} gives each token the rewards that "
            "follow it: remove the key"
        )
    return None


def _algorithm(recipe: Recipe) -> str | None:
    """Of a user's algorithm nothing is known before it is imported: `rl.checks` asks then."""
    spec = SPECS.get(recipe.algorithm.name)
    return None if spec is None else spec_problem(recipe, spec)


def _roles(recipe: Recipe) -> str | None:
    if recipe.reference is not None and not recipe.algorithm.kl_coef:
        return "reference: no KL is computed when algorithm.kl_coef is 0; set it, or remove the section"
    if recipe.reference is not None and recipe.model.lora is not None:
        return (
            "reference: with model.lora the reference is the policy without its adapters; remove the section"
        )
    return None


def _divergence(recipe: Recipe) -> str | None:
    settings = recipe.algorithm
    in_loss = settings.kl_in == "loss"
    if settings.kl_coef and in_loss and settings.kl_estimator == "k1":
        return (
            "algorithm.kl_estimator='k1' has an expected gradient of zero in the loss; use 'k2', or 'k3' with "
            "algorithm.kl_ratio_correction=true, or set algorithm.kl_in='reward'"
        )
    if settings.kl_ratio_correction and not (in_loss and settings.kl_estimator == "k3"):
        return "algorithm.kl_ratio_correction is for algorithm.kl_estimator='k3' with algorithm.kl_in='loss'"
    return None


def _sampling(recipe: Recipe) -> str | None:
    rollout, settings = recipe.rollout, recipe.algorithm
    if rollout.offload_policy and rollout.engine == "sharded":
        return "rollout.offload_policy: the sharded engine samples from the policy itself, which must stay on the device"
    if settings.overlong_from is not None and settings.overlong_from >= rollout.max_new_tokens:
        return "algorithm.overlong_from must be below rollout.max_new_tokens"
    if rollout.top_p < 1.0 and (settings.correction == "mis" or settings.trust_region == "behaviour"):
        key = "correction='mis'" if settings.correction == "mis" else "trust_region='behaviour'"
        return (
            f"algorithm.{key} with rollout.top_p={rollout.top_p}: engines report probabilities within the nucleus, and "
            "the ratio would mostly measure the nucleus; set rollout.top_p=1.0, or use correction='tis' or 'icepop'"
        )
    if settings.dynamic_sampling and rollout.group_size < 2:
        return (
            "algorithm.dynamic_sampling drops groups of equal rewards: rollout.group_size must be at least 2"
        )
    return None


def _float8(recipe: Recipe) -> str | None:
    rollout = recipe.rollout
    if rollout.fp8 == "off":
        return None
    key = f"rollout.fp8={rollout.fp8!r}"
    if rollout.engine != "embedded":
        return f"{key} is for rollout.engine='embedded', not for {rollout.engine!r}: remove the key"
    if rollout.exact:
        return f"{key} with rollout.exact=true: rounded weights cannot give the trainer's log-probs; choose one of them"
    return None


def _exact(recipe: Recipe) -> str | None:
    model, rollout, settings = recipe.model, recipe.rollout, recipe.algorithm
    reasons = {
        f"rollout.engine={rollout.engine!r}": (
            rollout.engine != "embedded",
            "only the embedded engine runs the trainer's own operations",
        ),
        f"model.sequence_parallel={model.sequence_parallel}": (
            model.sequence_parallel > 1,
            "attention is not exact when its heads are spread over ranks; set it to 1",
        ),
        "model.lora": (
            model.lora is not None,
            "the engine merges the adapters into its weights, which rounds them; remove the section",
        ),
        "model.compile=true": (model.compile is True, "compiled blocks are rounded differently; remove it"),
        f"rollout.top_p={rollout.top_p}": (
            rollout.top_p < 1.0,
            "the engine reports probabilities within the nucleus; set it to 1.0",
        ),
        f"rollout.ahead={rollout.ahead}": (
            rollout.ahead > 0,
            "tokens are drawn with older weights than the trainer's; set it to 0",
        ),
        f"algorithm.updates_per_batch={settings.updates_per_batch}": (
            settings.updates_per_batch > 1 and settings.trust_region == "behaviour",
            "with algorithm.trust_region='behaviour' later updates have newer weights; use 'proximal'",
        ),
    }
    for key, (is_set, reason) in reasons.items():
        if rollout.exact and is_set:
            return f"rollout.exact=true does not work with {key}: {reason}, or set rollout.exact=false"
    return None


def _turns(recipe: Recipe) -> str | None:
    keys = {"credit": "trajectory", "turn_gamma": 1.0}
    changed = [key for key, default in keys.items() if getattr(recipe.algorithm, key) != default]
    if changed and recipe.environment is None:
        return f"algorithm.{changed[0]} is for conversations of several turns; remove it, or add an [environment]"
    return None


def _batching(recipe: Recipe) -> str | None:
    prompts, updates = recipe.train.prompts_per_step, recipe.algorithm.updates_per_batch
    if prompts % updates:
        return f"train.prompts_per_step={prompts} is not divisible by algorithm.updates_per_batch={updates}"
    for key in ("train", "evaluation"):
        source = getattr(recipe.data, key)
        if source is not None and source.startswith("environment:") and recipe.environment is None:
            return f"data.{key}={source!r} are rows of an environment: add an [environment]"
    if recipe.output.eval_every and recipe.data.evaluation is None:
        return "output.eval_every needs held-out prompts: set data.evaluation"
    return None
