"""The settings of TRL's GRPO and RLOO trainers: sampling, objective, engine and rewards."""

from __future__ import annotations

from shardproof.config.imported.draft import Draft, Foreign, Same, copy
from shardproof.config.imported.engine_arguments import engine_arguments
from shardproof.config.imported.shared_settings import measure_from_engine, whole

_REWARDS: dict[str, dict[str, str]] = {
    "accuracy_reward": {"name": "math_verify"},
    "reasoning_accuracy_reward": {"name": "math_verify"},
    "think_format_reward": {"name": "trl.rewards:think_format_reward", "signature": "trl"},
}
# Those that TRL's scripts make for themselves, by a call that a recipe cannot hold.
_MADE = {
    "get_soft_overlong_punishment": (
        "a module of yours with `get_soft_overlong_punishment = "
        "trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)`, as TRL's script has "
        "it, or algorithm.overlong_from in its place"
    ),
}
_NO_LIMIT = 1e6
_SCALES = ("group", "batch", "none", True, False)
# Each loss with the mean that it takes.
LOSSES = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
    "luspo": "sequence_sum",
    "vespo": "token_mean",
}
_OF_LOSSES = (
    "sapo_temperature",
    "vespo_k",
    "vespo_lambda",
)  # each with an end of its own by the advantage's sign
_LACKING = {
    "vllm_structured_outputs_regex": "completions are not constrained",
}
_SAMPLING = (
    Same("max_completion_length", "rollout.max_new_tokens", 512),
    Same("temperature", "rollout.temperature", 1.0, float),
    Same("top_p", "rollout.top_p", 1.0, float),
    Same("top_k", "rollout.top_k", None, lambda k: max(int(k), 0)),
    Same("min_p", "rollout.min_p", None, float),
    Same("repetition_penalty", "rollout.repetition_penalty", None, float),
    Same("top_entropy_quantile", "algorithm.entropy_share", None, float),
    Same("off_policy_mask_threshold", "algorithm.off_policy_limit", None, float),
    Same("num_iterations", "algorithm.epochs_per_batch", 1),
    Same(
        "mask_truncated_completions",
        "algorithm.overlong",
        False,
        lambda masks: "mask" if masks else "neither",
    ),
)


def sampled(draft: Draft, foreign: Foreign, trainer: str, ranks: int) -> int:
    """The settings of GRPO and RLOO; returns the optimizer updates per step of ours."""
    group = int(foreign.take("num_generations", 8 if trainer == "grpo" else 2))
    draft.put("rollout.group_size", group, "num_generations")
    copy(draft, foreign, _SAMPLING)
    engine_arguments(draft, foreign, "generation_kwargs")
    _clip(draft, foreign)
    device, accumulated = (
        int(foreign.take("per_device_train_batch_size", 8)),
        int(foreign.take("gradient_accumulation_steps", 1)),
    )
    per_generation = int(foreign.take("steps_per_generation", accumulated))
    size = int(foreign.take("generation_batch_size", device * ranks * per_generation))
    per_generation = size // (device * ranks) or 1
    key = "generation_batch_size" if foreign.has("generation_batch_size") else "per_device_train_batch_size"
    origin = f"{key}: {size} completions per generation on {ranks} ranks"
    whole(draft, "train.prompts_per_step", size / group, "prompts per generation", origin)
    parts = whole(
        draft,
        "algorithm.updates_per_epoch",
        per_generation / accumulated,
        "updates per generation",
        "steps_per_generation / gradient_accumulation_steps",
    )
    updates = parts * int(draft.values["algorithm.epochs_per_batch"])
    _objective(draft, foreign, trainer)
    moving_reference(draft, foreign, updates)
    _engine(draft, foreign, trainer, ranks)
    draft.lack(foreign, "shuffle_dataset", "rows are always shuffled, by train.seed", unless=(True,))
    for key, why in _LACKING.items():
        draft.lack(foreign, key, why, unless=(1.0, {}))
    return updates


def _clip(draft: Draft, foreign: Foreign) -> None:
    low, high = float(foreign.take("epsilon", 0.2)), foreign.take("epsilon_high")
    if foreign.take("loss_type") == "cispo":  # the ratio itself is bounded, and from above alone
        if high is not None:
            draft.put("algorithm.clip_high", float(high) - 1.0, "epsilon_high, which bounds the ratio itself")
        else:
            draft.gaps["loss_type='cispo' without epsilon_high"] = (
                "5.0 is used, which TRL recommends, not epsilon"
            )
        return
    if foreign.take("loss_type") in ("sapo", "vespo"):  # which bound no ratio
        return
    draft.put("algorithm.clip_low", low, "epsilon")
    if high is not None:
        draft.put("algorithm.clip_high", float(high), "epsilon_high")


def _objective(draft: Draft, foreign: Foreign, trainer: str) -> None:
    draft.put("algorithm.preset", "trl", "the config is TRL's")
    if trainer == "grpo":
        _grpo_loss(draft, foreign)
    else:
        if foreign.take("normalize_advantages", False):
            draft.put("algorithm.scale", "sample", "normalize_advantages")
            draft.put("algorithm.scale_over", "advantages", "normalize_advantages")
        if foreign.has("reward_clip_range"):
            low, high = foreign.take("reward_clip_range")
            draft.put("reward.clip", [float(low), float(high)], "reward_clip_range")
    beta = float(foreign.take("beta", 0.0 if trainer == "grpo" else 0.05))
    draft.put("algorithm.kl_coef", beta, "beta")
    copy(draft, foreign, [Same("router_aux_loss_coef", "algorithm.router_coef", None, float)])


def moving_reference(draft: Draft, foreign: Foreign, updates: int) -> None:
    """The moving reference; TRL counts optimizer updates, of which a step makes several."""
    every, mix = foreign.take("ref_model_sync_steps", 512), foreign.take("ref_model_mixup_alpha", 0.6)
    if foreign.take("sync_ref_model", False):
        draft.put(
            "algorithm.reference_sync_every",
            max(1, round(every / updates)),
            "sync_ref_model, ref_model_sync_steps",
        )
        draft.put("algorithm.reference_mix", float(mix), "ref_model_mixup_alpha")


def _grpo_loss(draft: Draft, foreign: Foreign) -> None:
    kind = foreign.take("loss_type", "dapo")
    level = foreign.take("importance_sampling_level", "token")
    if kind == "bnpo":
        draft.put("algorithm.name", "grpo", "loss_type=bnpo")
        draft.put("algorithm.aggregation", "token_mean", "loss_type=bnpo, over the whole batch")
    else:
        draft.put("algorithm.name", kind, "loss_type")
    draft.put("algorithm.ratio", level, "importance_sampling_level")
    scale = foreign.take("scale_rewards", "group")
    if scale not in _SCALES:
        raise ValueError(f"expected one of {', '.join(map(str, _SCALES))}")
    if scale in (False, "none"):
        draft.put("algorithm.scale", "off", "scale_rewards")
    else:
        draft.put("algorithm.scale", "sample", "scale_rewards")
        draft.put("algorithm.scale_over", "batch" if scale == "batch" else "group", "scale_rewards")
    if foreign.has("delta"):
        draft.put("algorithm.dual_clip", float(foreign.take("delta")), "delta")
    for key in (f"{own}_{end}" for own in _OF_LOSSES for end in ("pos", "neg")):
        if key.startswith(kind):
            copy(draft, foreign, [Same(key, f"algorithm.{key}", None, float)])
        foreign.take(key)
    draft.put(
        "algorithm.kl_ratio_correction",
        bool(foreign.take("use_bias_correction_kl", True)),
        "use_bias_correction_kl",
    )
    copy(draft, foreign, [Same("entropy_coef", "algorithm.entropy_coef", None, float)])
    if foreign.take("use_adaptive_entropy", False):
        draft.put(
            "algorithm.entropy_target",
            float(foreign.take("entropy_target", 0.2)),
            "use_adaptive_entropy, entropy_target",
        )
        draft.put(
            "algorithm.entropy_step", float(foreign.take("entropy_coef_delta", 0.005)), "entropy_coef_delta"
        )
        for end, own in (("min", 0.0), ("max", 1.0)):
            draft.lack(foreign, f"entropy_coef_{end}", "the weight has no such bound", unless=(own,))
    for key in ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"):
        foreign.take(key)
    if foreign.take("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        _of_each_reward(draft, kind)


def _of_each_reward(draft: Draft, kind: str) -> None:
    """Rewards that are normalised one by one, and their sum over the batch, with the loss that the config names."""
    draft.put("algorithm.name", "gdpo", "multi_objective_aggregation")
    draft.put("reward.normalise", "each", "multi_objective_aggregation")
    draft.put("algorithm.aggregation", LOSSES[kind], "loss_type")
    if kind in ("cispo", "sapo", "vespo"):
        draft.put("algorithm.surrogate", kind, "loss_type")
    if kind == "cispo":
        draft.put("algorithm.clip_low", 1.0, "the ratio has no lower bound")
        draft.values.setdefault("algorithm.clip_high", 4.0)
    for key in ("scale", "scale_over"):  # whatever scale_rewards says
        draft.values.pop(f"algorithm.{key}", None)


def _engine(draft: Draft, foreign: Foreign, trainer: str, ranks: int) -> None:
    uses_vllm = foreign.take("use_vllm", False)
    corrects = foreign.take("vllm_importance_sampling_correction", True)
    if uses_vllm and corrects and trainer == "grpo":
        _correction(draft, foreign)
    else:
        draft.put("algorithm.correction", "none", "vllm_importance_sampling_correction")
    if not uses_vllm:
        draft.skip(foreign, "vllm_*", "the config does not use vLLM")
        return
    draft.put("rollout.engine", "vllm", "use_vllm")
    copy(draft, foreign, [Same("vllm_max_model_length", "rollout.vllm.max_model_len")])
    if foreign.take("vllm_mode", "colocate") == "server":
        _server(draft, foreign)
        return
    table = (
        Same("vllm_gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", 0.3, float),
        Same("vllm_tensor_parallel_size", "rollout.vllm.tensor_parallel_size"),
        Same("vllm_enable_sleep_mode", "rollout.sleep"),
    )
    copy(draft, foreign, table)
    each = int(foreign.take("vllm_tensor_parallel_size", 1))
    if (engines := ranks // int(foreign.take("num_machines", 1)) // each) > 1:
        draft.put("rollout.vllm.replicas", engines, "an engine beside each process, or group of them")
    draft.skip(foreign, "vllm_server_*", "the run starts its own server")


def _server(draft: Draft, foreign: Foreign) -> None:
    """A server that is running already; TRL reaches one on every address at port 8000 where nothing is said."""
    host, port = foreign.take("vllm_server_host", "0.0.0.0"), foreign.take("vllm_server_port", 8000)
    address = f"http://{'localhost' if host == '0.0.0.0' else host}:{port}"
    draft.put("rollout.vllm.mode", "server", "vllm_mode")
    draft.put("rollout.vllm.url", foreign.take("vllm_server_base_url", address), "vllm_server_*")
    copy(draft, foreign, [Same("vllm_server_timeout", "rollout.vllm.start_timeout_s", 240.0, float)])
    for pattern in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode"):
        draft.skip(foreign, pattern, "whoever starts the server says it")


def _correction(draft: Draft, foreign: Foreign) -> None:
    key = "vllm_importance_sampling_clip_max"
    high = _NO_LIMIT if foreign.is_null(key) else float(foreign.take(key, 3.0))
    high = float(foreign.take("vllm_importance_sampling_cap", high))  # the name of before wins in TRL
    low = foreign.take("vllm_importance_sampling_clip_min")
    mode = foreign.take("vllm_importance_sampling_mode", "sequence_mask")
    if foreign.take("loss_type") == "vespo":
        measure_from_engine(draft, "loss_type=vespo")
        draft.gaps[f"{key}={high:g}"] = "the importance weights in the ratio of vespo have no bounds"
        return
    if mode == "token_mask":
        draft.put("algorithm.correction", "icepop", "vllm_importance_sampling_mode")
        draft.put("algorithm.icepop_bounds", [float(low or 1e-6), high], "vllm_importance_sampling_clip_*")
        return
    kind = "tis" if mode == "token_truncate" else "mis"
    draft.put("algorithm.correction", kind, "vllm_importance_sampling_mode")
    draft.put(f"algorithm.{kind}_cap", high, key)
    if low is not None:
        draft.gaps[f"vllm_importance_sampling_clip_min={low!r}"] = "weights have no lower bound"
    if mode not in ("sequence_mask", "token_truncate"):
        draft.gaps[f"vllm_importance_sampling_mode={mode!r}"] = (
            "sequences above the cap are masked, not cut off"
        )


def rewards(draft: Draft, foreign: Foreign) -> None:
    """The reward functions and models, with their weights."""
    named, weights = foreign.take("reward_funcs", []), foreign.take("reward_weights") or []
    functions, models, asked = [], [], []
    model = foreign.take("reward_model_name_or_path")  # which TRL puts before the functions
    names = [*([] if model is None else [model]), *([named] if isinstance(named, str) else named)]
    if weights and not names:
        draft.gaps[f"reward_weights={weights!r}"] = "the functions are not named: give each its weight"
    elif weights and len(weights) != len(names):
        foreign.last = "reward_weights"
        raise ValueError(f"{len(weights)} weights for {len(names)} reward functions")
    for place, name in enumerate(names):
        weight = {"weight": float(weights[place])} if place < len(weights) else {}
        if model is not None and place == 0:
            models.append({"path": name, **weight})
        elif name in _REWARDS:
            functions.append({**_REWARDS[name], **weight})
        elif "/" in name:
            models.append({"path": name, **weight})
        elif "." in name:
            module, _, function = name.rpartition(".")
            functions.append({"name": f"{module}:{function}", "signature": "trl", **weight})
        else:
            functions.append({"name": f"my_rewards:{name}", "signature": "trl", **weight})
            asked.append(_MADE.get(name, f"the module of {name}"))
    if any(each["name"] == "math_verify" for each in functions):
        draft.put("data.answer_column", "solution", "accuracy_reward reads this column")
    elif functions or models:
        draft.put("data.answer_column", None, "TRL's rewards read the columns that they name")
    if functions:
        draft.put("reward.functions", functions, "reward_funcs")
    if asked:
        draft.to_fill["reward.functions"] = "; ".join(asked)
    if models:
        draft.put("reward.models", models, "reward_funcs")
