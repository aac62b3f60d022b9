"""The switches of the algorithms that sample: what each name is a preset over, and which of them go together."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import field_validator, model_validator

from shardproof.config.algorithms import (
    BOUNDED,
    OWN_RATIO,
    PER_COMPLETION,
    SPECS,
    UNCLIPPED,
    AlgorithmSpec,
    fill_in,
    preset_problem,
    preset_values,
)
from shardproof.config.numbers import Bound, Coefficient, Limit
from shardproof.config.section import Section, known_or_users
from shardproof.user_code import is_user_name

SWITCHES = (
    *("aggregation", "baseline", "compared_over", "scale", "scale_over", "scale_eps"),
    *("ratio", "surrogate", "dual_clip"),
)
ADVANTAGE_SWITCHES = ("baseline", "compared_over", "scale", "scale_over", "scale_eps")
# What "none" could also mean: it takes back what a recipe says, and TRL's scale_rewards="none" divides by nothing.
_OFF = {"scale": "'off'", "baseline": "'off'", "dual_clip": "0", "dynamic_sampling": "false"}
_OF_SURROGATES = {
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    **dict.fromkeys(("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"), ("vespo",)),
    "cov_ratio": ("clip_cov", "kl_cov"),
    "cov_bounds": ("clip_cov",),
    "cov_kl_coef": ("kl_cov",),
}


class Switches(Section):
    """Which advantages, which ratio, which loss and which weights an algorithm has."""

    name: str = "grpo"
    """One of the algorithms of docs/algorithms.md, such as `grpo`, `dapo`, `rloo`, `ppo`, `sft` or `dpo`, or your own
    class as `module:name`. A name is a preset: it decides on the switches below that you do not set."""
    preset: Literal["trl", "verl"] | None = None
    """Whose variant of the named algorithm: that of TRL or of verl, where the two differ or shardproof's own does."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] | None = None
    """How the losses of tokens are added up. `"token_mean"`: their mean over the batch. `"sequence_mean"`: the mean
    over completions of each one's mean. `"sequence_sum"`: the mean over completions of each one's sum. `"constant"`:
    the same sum, divided by `rollout.max_new_tokens`. By default the algorithm's own."""
    baseline: Literal["mean", "leave_one_out", "greedy", "critic", "off"] | None = None
    """What is subtracted from a completion's return: the mean of those that it is compared with, the mean of the
    others, or nothing (`"off"`); the reward of the prompt's greedy completion (`remax`); the critic's value (`ppo`
    only). By default the algorithm's own."""
    compared_over: Literal["group", "batch"] | None = None
    """The completions that `baseline = "mean"` and `"leave_one_out"` compare: those of one prompt, or all of the
    batch. By default the algorithm's own."""
    scale: Literal["off", "sample", "population"] | None = None
    """The deviation that advantages are divided by: none (`"off"`), that of a sample (with n - 1) or that of the population
    (with n). By default the algorithm's own."""
    scale_over: Literal["group", "batch", "advantages", "tokens"] | None = None
    """Whose deviation: of the rewards in the `"group"`, or in the `"batch"`; or of the advantages of the batch's
    completions (`"advantages"`) or of all its `"tokens"`, whose mean is then subtracted, too. By default the
    algorithm's own."""
    scale_eps: Annotated[float, Bound(gt=0.0, le=1.0)] | None = None
    """What is added to the deviation before advantages are divided by it. By default the algorithm's own."""
    ratio: Literal["token", "sequence", "product"] | None = None
    """The ratio of new to old probability: of each token, of the sequence as the geometric mean of its tokens'
    (`gspo`), or of the sequence as their product. By default the algorithm's own."""
    surrogate: (
        Literal["clip", "cispo", "sapo", "vespo", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl"]
        | None
    ) = None
    """What is made of ratio and advantage: the clipped objective of PPO, that of the algorithm with this name, that of
    `gmpo` (`"geo_mean"`), or one of the two of `dppo`. By default the algorithm's own."""
    clip_low: Annotated[float, Bound(gt=0.0, le=1.0)] = 0.2
    """How far the ratio of new to old probability may fall below 1 before it is clipped. For `cispo` 1.0, no bound;
    with a `preset` of `gspo` 0.0003. For `gmpo` 0.4, how far the ratio's logarithm may fall below 0; for `dppo` how far
    the probability may fall, as a divergence."""
    clip_high: Limit | None = None
    """How far the ratio may rise above 1 before it is clipped, or what `clip_low` says of `gmpo` and `dppo`. By default
    the algorithm's own: 0.28 for `dapo` and `cispo`, `clip_low` for the others."""
    dual_clip: Annotated[float, Bound(ge=0.0, le=1e6)] | None = None
    """Largest ratio that counts where the advantage is negative (verl's `clip_ratio_c`, TRL's `delta`), for `dppo`
    wherever; 0 for no such bound. By default the algorithm's own: none, or 3.0 with `preset = "verl"`."""
    sapo_temperature_pos: Limit = 1.0
    """Temperature of the soft gate where the advantage is positive, for `surrogate = "sapo"`."""
    sapo_temperature_neg: Limit = 1.05
    """Temperature of the soft gate where the advantage is not positive, for `surrogate = "sapo"`."""
    vespo_k_pos: Limit = 2.0
    """Exponent of the ratio where the advantage is not negative, for `surrogate = "vespo"`."""
    vespo_lambda_pos: Limit = 3.0
    """How fast a large ratio loses weight where the advantage is not negative, for `surrogate = "vespo"`."""
    vespo_k_neg: Limit = 3.0
    """Exponent of the ratio where the advantage is negative, for `surrogate = "vespo"`."""
    vespo_lambda_neg: Limit = 2.0
    """How fast a large ratio loses weight where the advantage is negative, for `surrogate = "vespo"`."""
    cov_ratio: Annotated[float, Bound(gt=0.0, le=1.0)] = 0.0002
    """Share of the batch's tokens, at least one, that `surrogate = "clip_cov"` leaves out or `"kl_cov"` holds back,
    among those with the largest covariance of log-prob and advantage."""
    cov_bounds: tuple[Limit, Limit] = (1.0, 5.0)
    """Smallest and largest covariance of tokens that may be left out, for `surrogate = "clip_cov"`."""
    cov_kl_coef: Coefficient = 0.1
    """Weight of the distance to the old policy for the tokens that are held back, for `surrogate = "kl_cov"`."""

    @model_validator(mode="before")
    @classmethod
    def _has_the_presets_values(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled_in = fill_in(data)
        for key, off in _OFF.items() if filled_in != data else ():
            if data.get(key) == "none":
                raise ValueError(f"{key}='none' could mean two things: write {key}={off}, or remove the key")
        return filled_in

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return known_or_users(name, SPECS)

    @model_validator(mode="after")
    def _go_together(self) -> Switches:
        problem = preset_problem(self.name, self.preset) or switch_problem(self)
        if problem is not None:
            raise ValueError(problem)
        return self


SomeSwitches = TypeVar("SomeSwitches", bound=Switches)


def switch_problem(settings: Switches, spec: AlgorithmSpec | None = None) -> str | None:
    """The first two switches that do not go together; None if all do. Those that are open fit everything.

    `spec` is that of a user's own algorithm, where its class is known.
    """
    spec = SPECS.get(settings.name, spec)
    if spec is not None and not spec.samples:
        found = [key for key in SWITCHES if getattr(settings, key) is not None]
        return f"{found[0]} is for algorithms that sample, not for {settings.name!r}" if found else None
    if settings.baseline is None and not is_user_name(settings.name):
        return None
    return _advantage_problem(settings) or _scale_problem(settings, spec) or _loss_problem(settings)


def _advantage_problem(settings: Switches) -> str | None:
    spec, baseline, scale = SPECS.get(settings.name), settings.baseline, settings.scale
    has_critic = spec is not None and spec.has_critic
    if spec is not None and (baseline == "critic") != has_critic:
        if has_critic:
            return f"baseline={baseline!r}: ppo's baseline is its critic; remove the key or use another name"
        return "baseline='critic' is for name='ppo', which trains a critic"
    if baseline is None:
        return None
    of_tokens = baseline not in PER_COMPLETION
    if of_tokens and scale not in (None, "off") and settings.scale_over not in (None, "tokens"):
        return (
            f"scale_over={settings.scale_over!r} with baseline={baseline!r}: tokens have returns of their own there; "
            "use scale_over='tokens' or scale='off'"
        )
    by_group = scale not in (None, "off") and settings.scale_over == "group"
    if settings.compared_over == "batch" and by_group and not of_tokens:
        return (
            "compared_over='batch' with scale_over='group': a group of equal rewards would be divided by nothing; use "
            "scale_over='batch' or 'advantages', or scale='off'"
        )
    if of_tokens and settings.compared_over == "batch":
        return f"compared_over='batch' is for baseline='mean' or 'leave_one_out', not for {baseline!r}"
    return None


def _scale_problem(settings: Switches, spec: AlgorithmSpec | None) -> str | None:
    """A key about the deviation, where the algorithm by itself divides by none."""
    if spec is None or settings.scale != "off":
        return None
    given = {key: value for key, value in settings.model_dump().items() if value is not None}
    values = preset_values(spec, settings.preset, given)
    for key in ("scale_over", "scale_eps") if values["scale"] == "off" else ():
        if getattr(settings, key) not in (None, values[key]):
            return (
                f"{key}={getattr(settings, key)!r}: {settings.name} divides by no deviation (scale='off'); set "
                "scale='sample' or 'population', or remove the key"
            )
    return None


def _loss_problem(settings: Switches) -> str | None:
    surrogate = settings.surrogate or "clip"
    for key, owners in _OF_SURROGATES.items():
        if surrogate not in owners and getattr(settings, key) != type(settings).model_fields[key].default:
            return f"{key} is for surrogate={owners[0]!r}, not for {surrogate!r}"
    if surrogate in OWN_RATIO and settings.ratio not in (None, "token"):
        return f"ratio={settings.ratio!r}: surrogate={surrogate!r} takes its own ratio; remove the key"
    clips = settings.clip_low != 0.2 or settings.clip_high not in (None, 0.2)
    if surrogate in UNCLIPPED and clips:
        return f"clip_low and clip_high: surrogate={surrogate!r} has no clip; remove them"
    if surrogate == "clip_cov" and not settings.cov_bounds[0] < settings.cov_bounds[1]:
        return f"cov_bounds: the first must be below the second, not {settings.cov_bounds}"
    if settings.dual_clip and surrogate not in BOUNDED:
        return f"dual_clip is for surrogate='clip', 'dppo_tv' or 'dppo_kl', not for {surrogate!r}"
    high = settings.clip_high if settings.clip_high is not None else settings.clip_low
    if settings.dual_clip and surrogate == "clip" and settings.dual_clip <= 1.0 + high:
        return f"dual_clip={settings.dual_clip} must be above 1 + clip_high, which is {1.0 + high:g}"
    if settings.dual_clip and settings.dual_clip <= 1.0:
        return f"dual_clip={settings.dual_clip} must be above 1, the ratio of tokens whose probability is what it was"
    return None


def filled(settings: SomeSwitches, spec: AlgorithmSpec) -> SomeSwitches:
    """The settings of a user's own algorithm, with the values of its class where they are open; others are whole."""
    if not spec.samples:
        return settings
    given = {key: value for key, value in settings.model_dump().items() if value is not None}
    values = preset_values(spec, None, given)
    missing = {key: value for key, value in values.items() if getattr(settings, key, key) is None}
    return settings.model_copy(update=missing) if missing else settings
