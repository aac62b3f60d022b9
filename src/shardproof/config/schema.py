"""The schema of a recipe. Frozen, and free of torch: a recipe is checked in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from shardproof.config.algorithms import SPECS, AlgorithmSpec
from shardproof.config.numbers import (
    MAX_TOKENS,
    Bound,
    Coefficient,
    Count,
    CountOrNone,
    Decay,
    Fraction,
    LearningRate,
    Limit,
    Processes,
    Seconds,
    Steps,
    StepsOrNever,
    Tokens,
)
from shardproof.config.vllm import VllmSettings
from shardproof.errors import did_you_mean
from shardproof.user_code import is_user_name

DtypeName = Literal["float32", "bfloat16", "float16"]
StrategyName = Literal["fsdp2", "fsdp1"]
ENGINES = ("embedded", "sharded", "vllm")
OPTIMIZERS = ("adamw", "muon")
_OPTIMIZER_KEYS = ("name", "lr", "weight_decay", "betas")  # that every optimizer is given


def keys_of(kind: type) -> dict[str, Any]:
    """The keys of a section, a model or a dataclass, with their types; none for what is no section."""
    if is_dataclass(kind):
        return {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
    known = kind.model_fields if issubclass(kind, BaseModel) else {}
    return {name: field.annotation for name, field in known.items()}


def read_none(kind: type, data: Any) -> Any:
    """TOML has no null: the string "none" switches off a setting that may be off."""
    if not isinstance(data, dict):
        return data
    optional = {name for name, annotation in keys_of(kind).items() if type(None) in get_args(annotation)}
    return {key: None if key in optional and value == "none" else value for key, value in data.items()}


def _known_or_users(name: str, known: Iterable[str]) -> str:
    """`name`, if it is one of `known` or a user's module:name."""
    if name not in known and not is_user_name(name):
        hint = did_you_mean(name, known)
        raise ValueError(f"{name!r} is not one of {', '.join(known)}, or module:name.{hint}")
    return name


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        return read_none(cls, data)


class Lora(Section):
    """Low-rank adapters."""

    r: Annotated[int, Bound(gt=0, le=2**16)] = 16
    alpha: Count = 32
    target_modules: list[str] | str = "all-linear"


class Model(Section):
    """The policy, and how it is sharded."""

    path: str
    random_init: bool = False  # draw the weights from train.seed; path needs a config and a tokenizer only
    strategy: StrategyName = "fsdp2"
    replicate: Count = 1
    param_dtype: DtypeName = "float32"
    compute_dtype: DtypeName = "bfloat16"
    cpu_offload: bool = False
    sequence_parallel: Processes = 1
    checkpoint_activations: bool | CountOrNone | Literal["auto"] = False  # k: every k-th block
    reshard_after_forward: bool | None = None  # False: gather once per step; None: if "auto" finds the memory
    compile: bool | None = None  # the blocks; None: on CUDA in 16 bits with FSDP2, where Triton is installed
    lora: Lora | None = None
    trust_remote_code: bool = False


class Role(Section):
    """Another role beside the policy. Empty values are the policy's."""

    path: str | None = None
    strategy: StrategyName | None = None
    cpu_offload: bool | None = None
    lr: LearningRate | None = None


class Rollout(Section):
    """How completions are made."""

    engine: str = "embedded"  # or "sharded", "vllm", or module:name, one of your own: docs/extending.md
    group_size: Count = 8
    max_new_tokens: Tokens = 256
    temperature: Annotated[float, Bound(gt=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Bound(gt=0.0, le=1.0)] = 1.0
    batch_size: Count = 256  # completions that a rank decodes at a time
    offload_policy: bool = False  # move the policy to host memory while completions are made
    sleep: bool = False  # give up the engine's memory while the policy is updated
    # How far log-probs of engine and trainer may be apart; None: 0.001 in float32, 0.5 in half precision.
    canary_tolerance: Limit | None = None
    max_version_lag: CountOrNone = 0  # how many versions older than the policy's a completion may be
    vllm: Annotated[VllmSettings, BeforeValidator(partial(read_none, VllmSettings))] = VllmSettings()

    @field_validator("engine")
    @classmethod
    def _is_known(cls, engine: str) -> str:
        return _known_or_users(engine, ENGINES)


class Algorithm(Section):
    """The algorithm and its numbers."""

    name: str = "grpo"  # or module:name, a class of your own: docs/extending.md
    clip_low: Annotated[float, Bound(gt=0.0, le=1.0)] = 0.2
    clip_high: Limit | None = None  # None: the algorithm's own
    kl_coef: Coefficient = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_ratio_correction: bool = (
        False  # multiply k3 in the loss by the ratio: the gradient is then the KL's own
    )
    entropy_coef: Coefficient = 0.0
    router_coef: Coefficient = 0.0
    tis_cap: Limit | None = 2.0  # truncated importance sampling between rollout and trainer; None: off
    updates_per_batch: Count = 1
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    value_clip: Limit | None = 0.2
    dynamic_sampling: bool | None = (
        None  # drop groups whose rewards are all equal; None: as the algorithm does
    )
    # Completion length from which reward is taken away, down to -1 at the limit.
    overlong_from: Annotated[int, Bound(ge=0, le=MAX_TOKENS)] | None = None
    options: dict[str, bool | int | float | str] = {}  # further settings of module:name

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return _known_or_users(name, SPECS)

    @model_validator(mode="after")
    def _has_options(self) -> Algorithm:
        if self.options and not is_user_name(self.name):
            raise ValueError(f"options are for an algorithm of yours, module:name, not for {self.name!r}")
        return self


class Reward(Section):
    """A reward function and its weight."""

    name: str
    weight: Annotated[float, Bound(ge=-1e6, le=1e6)] = (
        1.0  # below 0: a penalty; 0: reported, not learned from
    )


class Environment(Section):
    """What answers the policy's turns. Without this section it has one turn."""

    name: str  # module:name of a class whose objects have reply(row, turns): docs/extending.md
    max_turns: Annotated[int, Field(gt=0, le=1024)] = 4  # of the policy, in one conversation

    @field_validator("name")
    @classmethod
    def _is_users(cls, name: str) -> str:
        if not is_user_name(name):
            raise ValueError(f"{name!r} is not of the form module:name")
        return name


class Data(Section):
    """Prompts."""

    train: str
    evaluation: str | None = None
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    completion_column: str = "completion"  # what sft trains on
    chat: bool = False
    max_prompt_tokens: Tokens | None = None


class Rewards(Section):
    """What completions are worth."""

    functions: list[Reward] = Field(min_length=1)
    timeout_s: Seconds = 10.0
    num_workers: Processes = 2
    on_error: Literal["zero", "stop"] = "zero"


class Optimizer(Section):
    """The optimizer and its schedule."""

    name: str = "adamw"  # or "muon", or module:name, a class of your own: docs/training.md
    lr: LearningRate = 1e-6
    weight_decay: Coefficient = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # of AdamW, also for what Muon leaves to it
    momentum: Decay | None = None  # of Muon; None: 0.95
    options: dict[str, bool | int | float | str] = {}  # further arguments of module:name
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: StepsOrNever = 0
    final_ratio: Fraction = 0.0  # of lr, where the cosine ends
    max_grad_norm: Limit | None = 1.0

    @model_validator(mode="after")
    def _fits_its_name(self) -> Optimizer:
        is_ours = not is_user_name(_known_or_users(self.name, OPTIMIZERS))
        if self.momentum is not None and self.name != "muon":
            raise ValueError(f"momentum is for name='muon', not for {self.name!r}")
        if self.options and is_ours:
            raise ValueError(f"options are for an optimizer of yours, module:name, not for {self.name!r}")
        taken = sorted(self.options.keys() & set(_OPTIMIZER_KEYS))
        if taken:
            raise ValueError(f"options.{taken[0]}: set optimizer.{taken[0]} instead")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """What `make_optimizer` takes by keyword."""
        momentum = {} if self.momentum is None else {"momentum": self.momentum}
        return self.options | momentum | {key: getattr(self, key) for key in _OPTIMIZER_KEYS}


class Train(Section):
    """How long, how much at a time."""

    steps: Steps
    prompts_per_step: Count = 32
    micro_batch_tokens: Tokens = 8192
    seed: Annotated[int, Bound(ge=0, lt=2**63)] = 0
    ranks: Processes | None = None  # processes on this node; None: one per GPU, or 1
    max_consecutive_skips: Count = 3


class Output(Section):
    """What a run leaves behind."""

    folder: str
    save_every: StepsOrNever = 50
    keep: Count = 2
    eval_every: StepsOrNever = 0
    eval_samples: Count = 1  # completions per held-out prompt; 1 is greedy, more are sampled, for pass@k
    eval_prompts: Count = 64
    samples_per_step: CountOrNone = 4
    save_model: bool = True
    model_dtype: DtypeName | None = None  # of the final model; None: as in the checkpoint it came from
    tensorboard: bool = True


class Recipe(Section):
    """A whole run."""

    model: Model
    data: Data
    reward: Rewards | None = None
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    train: Train
    output: Output
    reference: Role | None = None
    critic: Role | None = None
    environment: Environment | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        """Combinations that cannot work, refused before anything starts."""
        checks = (_algorithm, _roles, _divergence, _sampling, _batching)
        problem = next(filter(None, (check(self) for check in checks)), None)
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def user_code(self) -> list[tuple[str, str]]:
        """(kind, module:name) of what is taken from users' modules, apart from rewards."""
        named = [
            ("algorithm", self.algorithm.name),
            ("engine", self.rollout.engine),
            ("optimizer", self.optimizer.name),
            ("environment", self.environment.name if self.environment is not None else ""),
        ]
        return [(kind, name) for kind, name in named if is_user_name(name)]

    @property
    def canary_tolerance(self) -> float:
        """How far log-probs of engine and trainer may be apart after a sync."""
        if self.rollout.canary_tolerance is not None:
            return self.rollout.canary_tolerance
        return 1e-3 if self.model.compute_dtype == "float32" else 0.5


def spec_problem(recipe: Recipe, spec: AlgorithmSpec) -> str | None:
    """What in the recipe does not fit its algorithm; None if all does."""
    name, settings = recipe.algorithm.name, recipe.algorithm
    if recipe.reward is None and spec.samples:
        return f"reward is missing: {name} learns from rewards; name a function in reward.functions"
    if recipe.critic is not None and not spec.has_critic:
        return f"critic: {name} has no critic; remove the section or use algorithm.name='ppo'"
    if not spec.samples and (settings.kl_coef or settings.entropy_coef):
        return f"algorithm.kl_coef and algorithm.entropy_coef are for algorithms that sample, not for {name}"
    if not spec.samples and settings.updates_per_batch > 1:
        return f"algorithm.updates_per_batch: {name} takes one update per batch; raise train.steps instead"
    if spec.compares_group and recipe.rollout.group_size < 2:
        return f"rollout.group_size=1: {name} compares completions of one prompt and needs at least 2"
    return None


def _algorithm(recipe: Recipe) -> str | None:
    """Of a user's algorithm nothing is known before it is imported: `rl.checks` asks then."""
    spec = SPECS.get(recipe.algorithm.name)
    return None if spec is None else spec_problem(recipe, spec)


def _roles(recipe: Recipe) -> str | None:
    if recipe.reference is not None and not recipe.algorithm.kl_coef:
        return "reference: without algorithm.kl_coef no KL is taken; set it, or remove the section"
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
        return "rollout.offload_policy: the sharded engine samples from the policy, which must stay"
    if settings.overlong_from is not None and settings.overlong_from >= rollout.max_new_tokens:
        return "algorithm.overlong_from must be below rollout.max_new_tokens"
    if settings.dynamic_sampling and rollout.group_size < 2:
        return (
            "algorithm.dynamic_sampling drops groups of equal rewards: rollout.group_size must be at least 2"
        )
    return None


def _batching(recipe: Recipe) -> str | None:
    prompts, updates = recipe.train.prompts_per_step, recipe.algorithm.updates_per_batch
    if prompts % updates:
        return f"train.prompts_per_step={prompts} is not divisible by algorithm.updates_per_batch={updates}"
    if recipe.output.eval_every and recipe.data.evaluation is None:
        return "output.eval_every needs held-out prompts: set data.evaluation"
    return None
