"""Combinations of settings that cannot work, each with what to do about it."""

from __future__ import annotations

from shardproof.config.algorithms import PER_COMPLETION, SPECS, AlgorithmSpec, compares_group
from shardproof.config.dynamics_problems import dynamics_problem
from shardproof.config.evaluation_sets import evaluation_problem, held_out_sets, named_sources
from shardproof.config.given_sets import given_problem
from shardproof.config.judges import judge_problem
from shardproof.config.optimizer import phases
from shardproof.config.reward_problems import is_rewarded, reward_problem
from shardproof.config.sections import Sections

_VLLM_TEMPERATURES = 0.01, 2.0  # below the first it draws at the first; above the second it refuses to draw


def problem_of(recipe: Sections) -> str | None:
    """The first combination in the recipe that cannot work; None if all can."""
    checks = (
        _algorithm,
        _roles,
        _divergence,
        _sampling,
        _drawing,
        _float8,
        _exact,
        _turns,
        _batching,
        _curriculum,
        judge_problem,
        given_problem,
        evaluation_problem,
        dynamics_problem,
        reward_problem,
        _schedule,
        _packed,
    )
    return next(filter(None, (check(recipe) for check in checks)), None)


def spec_problem(recipe: Sections, spec: AlgorithmSpec) -> str | None:
    """What in the recipe does not fit its algorithm; None if all does."""
    name, settings = recipe.algorithm.name, recipe.algorithm
    if recipe.reward is None and recipe.environment is None and spec.samples and not spec.has_teacher:
        return f"reward is missing: {name} learns from rewards; name a function in reward.functions"
    if recipe.environment is not None and not spec.samples:
        return f"environment: {name} learns from given completions; remove the section"
    if recipe.critic is not None and not spec.has_critic:
        return f"critic: {name} has no critic; remove the section or use algorithm.name='ppo'"
    if not spec.samples and (settings.kl_coef or settings.entropy_coef):
        return f"algorithm.kl_coef and algorithm.entropy_coef are for algorithms that sample, not for {name}"
    if not spec.samples and settings.updates_per_step > 1:
        return (
            f"algorithm.epochs_per_batch and algorithm.updates_per_epoch: {name} takes one update per batch; raise "
            "train.steps instead"
        )
    if not spec.samples and (settings.correction != "auto" or settings.trust_region != "auto"):
        return (
            f"algorithm.correction and algorithm.trust_region are for algorithms that sample, not for {name}"
        )
    if not spec.samples and recipe.data.curriculum is not None:
        return f"data.curriculum is for algorithms that sample, not for {name}"
    if not spec.samples and recipe.rollout.replay_experts:
        return f"rollout.replay_experts is for algorithms that sample, not for {name}"
    if not spec.samples and recipe.rollout.fp8 != "off":
        return f"rollout.fp8 is for algorithms that sample, not for {name}"
    if not spec.samples and recipe.rollout.exact:
        return f"rollout.exact is for algorithms that sample, not for {name}"
    rewarded = recipe.reward is not None or recipe.environment is not None
    if rewarded and compares_group(settings, spec) and recipe.rollout.group_size < 2:
        return f"rollout.group_size=1: {name} compares completions of one prompt and needs at least 2"
    by_group = settings.baseline in PER_COMPLETION and settings.compared_over == "group"
    if spec.has_teacher and by_group and recipe.rollout.group_size < 2:
        return _of_one(recipe)
    if settings.credit == "turn" and not compares_group(settings, spec):
        return (
            f"algorithm.credit='turn' is for algorithms that compare a group; {name} gives each token the rewards that "
            "follow it: remove the key"
        )
    over = settings.scale_over if settings.scale != "off" else None
    if settings.credit == "turn" and (settings.compared_over == "batch" or over in ("batch", "advantages")):
        return (
            "algorithm.credit='turn' compares turns within a group: it needs algorithm.compared_over='group', and "
            "algorithm.scale_over='group' or 'tokens'"
        )
    return None


def _of_one(recipe: Sections) -> str | None:
    """What a teacher's algorithm would compare within a group, where each completion is alone in its own."""
    name, settings = recipe.algorithm.name, recipe.algorithm
    if is_rewarded(recipe):
        return (
            f"rollout.group_size=1: the rewards of {name} compare completions of one prompt and need at least 2; set "
            "algorithm.baseline='off', or weight=0 for rewards that are only to be measured"
        )
    changes = {
        "algorithm.kl_in='reward'": settings.kl_coef > 0 and settings.kl_in == "reward",
        f"algorithm.overlong_from={settings.overlong_from}": settings.overlong_from is not None,
    }
    for key, is_set in changes.items():
        if is_set:
            return (
                f"{key} with rollout.group_size=1: it changes rewards, which {name} compares with those of the same "
                "prompt, and there is one alone; raise rollout.group_size to at least 2, set algorithm.baseline='off', or "
                "remove the key"
            )
    return None


def _algorithm(recipe: Sections) -> str | None:
    """Of a user's algorithm nothing is known before it is imported: `rl.checks` asks then."""
    spec = SPECS.get(recipe.algorithm.name)
    return None if spec is None else spec_problem(recipe, spec)


def _roles(recipe: Sections) -> str | None:
    spec = SPECS.get(recipe.algorithm.name)
    compares = spec is not None and spec.has_preference and not recipe.algorithm.preference.reference_free
    if recipe.reference is not None and not recipe.algorithm.kl_coef and not compares:
        if spec is not None and spec.has_preference:
            return "reference: algorithm.preference.reference_free=true uses no reference; remove the section"
        return "reference: no KL is computed when algorithm.kl_coef is 0; set it, or remove the section"
    if recipe.reference is not None and recipe.model.lora is not None:
        return (
            "reference: with model.lora the reference is the policy without its adapters; remove the section"
        )
    if recipe.reference is not None and recipe.reference.lr is not None:
        return f"reference.lr={recipe.reference.lr:g}: a reference is never trained; remove the key"
    return None


def _divergence(recipe: Sections) -> str | None:
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


def _sampling(recipe: Sections) -> str | None:
    rollout, settings = recipe.rollout, recipe.algorithm
    if rollout.offload_policy and rollout.engine == "sharded":
        return "rollout.offload_policy: the sharded engine samples from the policy itself, which must stay on the device"
    if settings.overlong_from is not None and settings.overlong_from >= rollout.max_new_tokens:
        return "algorithm.overlong_from must be below rollout.max_new_tokens"
    whole = {
        "correction='mis'": settings.correction == "mis",
        "trust_region='behaviour'": settings.trust_region == "behaviour",
        "off_policy_limit": settings.off_policy_limit is not None,
    }
    asked = [key for key, is_set in whole.items() if is_set]
    if asked and not rollout.is_whole:
        return (
            f"algorithm.{asked[0]} with {rollout.shaped_by}: engines report probabilities of what they drew from, and the "
            "ratio would mostly measure how that differs from the model; remove it, or use correction='tis' or 'icepop'"
        )
    if settings.dynamic_sampling and rollout.group_size < 2:
        return (
            "algorithm.dynamic_sampling drops groups of equal rewards: rollout.group_size must be at least 2"
        )
    return None


def _curriculum(recipe: Sections) -> str | None:
    if recipe.data.curriculum is not None and recipe.reward is None and recipe.environment is None:
        return (
            "data.curriculum draws by how often prompts are solved, which nothing says: name a function in "
            "reward.functions, with weight=0 if it is only to be measured"
        )
    return None


def _drawing(recipe: Sections) -> str | None:
    rollout = recipe.rollout
    if rollout.min_new_tokens > rollout.max_new_tokens:
        return f"rollout.min_new_tokens must be at most rollout.max_new_tokens={rollout.max_new_tokens}"
    counting = [key for key in ("presence_penalty", "frequency_penalty") if getattr(rollout, key)]
    counting += [key for key in ("presence_penalty", "frequency_penalty") if key in rollout.row_overrides]
    if counting and rollout.engine == "vllm" and rollout.ahead:
        return (
            f"rollout.{counting[0]} with rollout.engine='vllm' and rollout.ahead={rollout.ahead}: a server that goes on "
            "with an interrupted completion has not counted its tokens; use rollout.repetition_penalty, or ahead=0"
        )
    if rollout.engine == "vllm" and (key := _too_hot_or_cold(recipe)):
        return (
            f"{key} with rollout.engine='vllm': it draws at temperatures from {_VLLM_TEMPERATURES[0]:g} to "
            f"{_VLLM_TEMPERATURES[1]:g}; choose one of these, or another engine"
        )
    if not rollout.include_stop and recipe.environment is not None:
        return "rollout.include_stop=false: an environment reads each turn as it was said; remove it"
    return None


def _too_hot_or_cold(recipe: Sections) -> str | None:
    """A temperature that vLLM refuses, or takes for another one, which the trainer does not know; None for none."""
    used = {f"rollout.temperature={recipe.rollout.temperature}": recipe.rollout.temperature}
    for each in held_out_sets(recipe):
        used[f"temperature={each.temperature} of the evaluation of {each.name or 'data.evaluation'}"] = (
            each.temperature
        )
    least, most = _VLLM_TEMPERATURES
    return next((key for key, value in used.items() if value and not least <= value <= most), None)


def _float8(recipe: Sections) -> str | None:
    rollout = recipe.rollout
    if rollout.fp8 == "off":
        return None
    key = f"rollout.fp8={rollout.fp8!r}"
    if rollout.engine != "embedded":
        return f"{key} is for rollout.engine='embedded', not for {rollout.engine!r}: remove the key"
    if rollout.exact:
        return f"{key} with rollout.exact=true: rounded weights cannot give the trainer's log-probs; choose one of them"
    return None


def _exact(recipe: Sections) -> str | None:
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
        rollout.shaped_by: (
            not rollout.is_whole,
            "the engine reports probabilities of what it draws from, not the model's; remove it",
        ),
        f"rollout.ahead={rollout.ahead}": (
            rollout.ahead > 0,
            "tokens are drawn with older weights than the trainer's; set it to 0",
        ),
        f"algorithm.epochs_per_batch * algorithm.updates_per_epoch={settings.updates_per_step}": (
            settings.updates_per_step > 1 and settings.trust_region == "behaviour",
            "with algorithm.trust_region='behaviour' later updates have newer weights; use 'proximal'",
        ),
    }
    for key, (is_set, reason) in reasons.items():
        if rollout.exact and is_set:
            return f"rollout.exact=true does not work with {key}: {reason}, or set rollout.exact=false"
    return None


def _turns(recipe: Sections) -> str | None:
    keys = {"credit": "trajectory", "turn_gamma": 1.0}
    changed = [key for key, default in keys.items() if getattr(recipe.algorithm, key) != default]
    if changed and recipe.environment is None:
        return f"algorithm.{changed[0]} is for conversations of several turns; remove it, or add an [environment]"
    return None


def _batching(recipe: Sections) -> str | None:
    prompts, updates = recipe.train.prompts_per_step, recipe.algorithm.updates_per_epoch
    if prompts % updates:
        return f"train.prompts_per_step={prompts} is not divisible by algorithm.updates_per_epoch={updates}"
    for key, source in named_sources(recipe).items():
        if source.startswith("environment:") and recipe.environment is None:
            return f"{key}={source!r} are rows of an environment: add an [environment]"
    return None


def _schedule(recipe: Sections) -> str | None:
    """Rates that stay and then fall need as many updates as they rise and fall for."""
    optimizer = recipe.optimizer
    for total in (recipe.policy_updates, recipe.critic_updates) if optimizer.schedule == "wsd" else ():
        rise = optimizer.warmup_steps, optimizer.warmup_ratio
        warmup, decay = phases(total, *rise, optimizer.decay_steps, optimizer.decay_ratio)
        if warmup + decay > total:
            return (
                f"optimizer.schedule='wsd': a warm-up of {warmup} and a decay of {decay} updates do not fit into {total}, "
                f"of train.steps={recipe.train.steps}: shorten one of them, or raise train.steps"
            )
    return None


def _packed(recipe: Sections) -> str | None:
    model, critic = recipe.model, recipe.critic
    held = {"model": (model.lora, model.strategy)}
    if critic is not None:
        held["critic"] = (critic.lora, critic.strategy or model.strategy)
    for key, (lora, strategy) in held.items():
        if lora is not None and lora.base is not None and strategy == "fsdp1":
            return (
                f"{key}.lora.base={lora.base!r} with strategy='fsdp1', which joins tensors of one dtype and cuts rows: use "
                "strategy='fsdp2', or remove the key"
            )
    served = recipe.rollout.engine == "vllm" and recipe.rollout.vllm.lora == "adapter"
    if served and model.lora is not None and model.lora.base is not None:
        return (
            f"rollout.vllm.lora='adapter' with model.lora.base={model.lora.base!r}: vLLM would load the base as it is on "
            "disk, and the adapter is trained on its values in 4 bits: use rollout.vllm.lora='merge'"
        )
    return None
