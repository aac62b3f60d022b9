"""TRL's configs, as its command line and `TrainingArguments` read them (TRL 1.16)."""

from __future__ import annotations

import fnmatch
import json
import re
from typing import Any

from shardproof.config.imported.draft import Draft, Foreign, Same, copy
from shardproof.config.imported.files import flatten
from shardproof.config.imported.shared_settings import fill_in_missing, hub_source, steps
from shardproof.config.imported.trl_given import GIVEN, rows_of_a_step
from shardproof.config.imported.trl_others import (
    OF_LAUNCHER,
    OWN_VALUES,
    of_scripts,
    processes,
    refuse_others,
)
from shardproof.config.imported.trl_sampled import LOSSES, rewards, sampled
from shardproof.config.imported.trl_training import optimizer, output, schedule
from shardproof.config.imported.yaml_text import load_argument
from shardproof.errors import fail

# How each trainer is told from the others where the config does not name it: settings that it alone has.
TRAINERS: dict[str, tuple[str, ...]] = {
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "grpo": (
        *("scale_rewards", "delta", "importance_sampling_level", "multi_objective_aggregation"),
        *("top_entropy_quantile", "off_policy_mask_threshold", "use_bias_correction_kl", "entropy_coef"),
        *("vllm_importance_sampling_mode", "vllm_importance_sampling_correction"),
    ),
    "dpo": (
        *("f_divergence_type", "label_smoothing", "rpo_alpha", "ld_alpha", "loss_weights"),
        *("use_weighting", "discopop_tau", "precompute_ref_batch_size"),
    ),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "sft": (
        *("packing", "packing_strategy", "eval_packing", "completion_only_loss", "assistant_only_loss"),
        *("dataset_text_field", "dataset_kwargs"),
    ),
}
# Settings of GRPO and RLOO alone: GRPO, which has its name from them, unless another setting says RLOO.
_SAMPLED = (
    *("num_generations", "max_completion_length", "reward_funcs", "use_vllm", "num_iterations"),
    *("epsilon", "epsilon_high", "reward_weights", "temperature", "steps_per_generation"),
)
_LOSSES = {
    "grpo": tuple(LOSSES),
    "kto": ("kto", "apo_zero_unpaired"),
    "sft": ("nll", "dft", "chunked_nll"),
    "dpo": (
        *("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sft"),
        *("sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop"),
    ),
}
# What tells a config of TRL from others, of any trainer.
_SHARED = (
    *("model_name_or_path", "dataset_name", "output_dir", "learning_rate", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "max_steps", "num_train_epochs", "loss_type", "beta", "max_length"),
)
_TEXTS = ("*name*", "*path*", "*_dir", "*_id", "*dataset*", "*revision*", "*token*", "project", "*column*")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_NAMES = {"reward": "reward_model"}
_LEARNING_RATES = {"sft": 2e-5, "reward": 1e-4}
_DTYPES = {"auto": "bfloat16", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
_UNNEEDED = {
    "logging_*": "every step is logged",
    "log_*": "see output.samples_per_step",
    "num_completions_to_print": "see output.samples_per_step",
    "dataloader_*": "data is read once per host",
    "dataset_num_proc": "data is read once per host",
    "preprocessing_num_workers": "data is read once per host",
    "remove_unused_columns": "rewards see every column",
    "disable_tqdm": "use --quiet",
    "ddp_*": "models are sharded by FSDP",
    "fsdp*": "see model.strategy",
    "deepspeed*": "models are sharded by FSDP",
    "ds3_gather_for_generation": "engines have weights of their own",
    "accelerator_config*": "models are sharded by FSDP",
    "per_device_eval_batch_size": "see rollout.batch_size",
    "eval_accumulation_steps": "see rollout.batch_size",
    "tf32": "torch's own setting",
    "torch_compile*": "see model.compile",
    "use_liger*": "kernels are chosen for the device",
    "liger_kernel_config*": "kernels are chosen for the device",
    "gradient_checkpointing_kwargs*": "see model.checkpoint_activations",
    "padding_free": "batches are never padded",
    "pad_to_multiple_of": "batches are never padded",
    "pad_token": "batches are never padded",
    "packing_strategy": "batches are never padded",
    "eval_packing": "batches are never padded",
    "vllm_group_port": "see rollout.vllm.transport",
    "vllm_model_impl": "see rollout.vllm.args",
    "cache_implementation": "the engine has a cache of its own",
    "use_transformers_*": "see rollout.engine",
    "transformers_continuous_batching_config*": "see rollout.engine",
    "disable_dropout": "models are trained without dropout",
    "cast_lm_head_to_fp32": "log-probs are computed in float32",
    "shuffle_dataset": "rows are always shuffled, by train.seed",
    "activation_offloading": "see model.checkpoint_activations",
    "precompute_ref_batch_size": "see train.micro_batch_tokens",
    "overwrite_output_dir": "a run that is started again goes on",
    "do_train": "`shardproof train` trains",
    "do_eval": "see output.eval_every",
    "local_rank": "the launcher knows it",
    "hub_*": "see output.push_to_hub",
    "*16_full_eval": "see model.compute_dtype",
    "env.*": "set variables of the environment where you start the run",
    "attn_implementation": "attention is chosen for the device",
    "bnb_4bit_quant_storage": "see docs/qlora.md",
    "dataset_streaming": "rows are read into memory",
    **OF_LAUNCHER,
}

_OPTIMIZER = (
    Same("weight_decay", "optimizer.weight_decay", 0.0, float),
    Same("adam_epsilon", "optimizer.eps", 1e-8, float),
    Same("max_grad_norm", "optimizer.max_grad_norm", 1.0, lambda norm: float(norm) or None),
    Same("seed", "train.seed", 42),
    Same("output_dir", "output.folder"),
    Same("run_name", "output.run_name", None, str),
    Same("trust_remote_code", "model.trust_remote_code"),
    Same("gradient_checkpointing", "model.checkpoint_activations", True),
    Same("chat_template_kwargs", "data.chat_template_kwargs"),
)


def has_own(foreign: Foreign) -> bool:
    """Whether a config has settings that TRL's have, outside of any section."""
    return any(foreign.has(key) for keys in (*TRAINERS.values(), _SAMPLED, _SHARED) for key in keys)


def opened(foreign: Foreign) -> Foreign:
    """The settings as TRL's parser has them: numbers and switches that are written as text, and JSON in its parts, as a
    command line has it: '{"min_lr_rate": 0.1}'."""
    values: dict[str, Any] = {}
    for key, value in foreign.values.items():
        if value == f"<{key.upper()}>":  # how transformers writes that it does not tell a token
            continue
        found = None
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                found = json.loads(value)
            except (ValueError, RecursionError):
                found = None
        values |= flatten({key: found}) if isinstance(found, dict) else {key: _typed(key, value)}
    return Foreign(values)


def _typed(key: str, value: Any) -> Any:
    """A number or a switch that is written as text; `no`, which YAML takes for a switch, is a strategy's name."""
    if key.endswith("_strategy") and value is False:
        return "no"
    if not isinstance(value, str) or any(fnmatch.fnmatch(key, pattern) for pattern in _TEXTS):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return load_argument(value) if _NUMBER.fullmatch(value) else value


def find_trainer(foreign: Foreign) -> str:
    """The trainer that a config is for, by the settings, and the losses, that it alone has."""
    refuse_others(foreign)
    losses = foreign.values.get("loss_type")
    first = losses[0] if isinstance(losses, list) and losses else losses
    found = [
        name
        for name, keys in TRAINERS.items()
        if any(foreign.has(key) for key in keys) or first in _LOSSES.get(name, ())
    ]
    if not {"grpo", "rloo"} & set(found) and any(foreign.has(key) for key in _SAMPLED):
        found.append("grpo")
    if len(found) != 1:
        what = f"may be for {', '.join(found)}" if found else "names no setting that one trainer alone has"
        fix = f"say which with --trainer: {', '.join(TRAINERS)}"
        raise fail("C001", "config", f"the config {what}.", fix=fix)
    return found[0]


def translate(foreign: Foreign, trainer: str, given_ranks: int | None) -> Draft:
    """The recipe of one of TRL's configs; `given_ranks` is the number of processes that it was started with, where the user
    says it."""
    draft = Draft()
    ranks = processes(draft, foreign, given_ranks)
    _model(draft, foreign)
    _data(draft, foreign)
    draft.put("algorithm.name", _NAMES.get(trainer, trainer), "trainer")
    copy(draft, foreign, _OPTIMIZER)
    draft.put(
        "optimizer.lr",
        float(foreign.take("learning_rate", _LEARNING_RATES.get(trainer, 1e-6))),
        "learning_rate",
    )
    draft.put(
        "optimizer.betas",
        [float(foreign.take("adam_beta1", 0.9)), float(foreign.take("adam_beta2", 0.999))],
        "adam_beta1, adam_beta2",
    )
    _precision(draft, foreign)
    samples = 0
    if trainer in ("grpo", "rloo"):
        updates = sampled(draft, foreign, trainer, ranks)
        samples = int(draft.values["rollout.group_size"])
        rewards(draft, foreign)
    else:
        updates = 1
        rows_of_a_step(draft, foreign, ranks)
        GIVEN[trainer](draft, foreign)
    steps(
        draft,
        foreign.take("max_steps", -1),
        float(foreign.take("num_train_epochs", 3)),
        updates,
        "max_steps",
        "num_train_epochs",
    )
    schedule(draft, foreign)
    optimizer(draft, foreign)
    output(draft, foreign, updates, samples)
    of_scripts(draft, foreign, samples=trainer in ("grpo", "rloo"))
    fill_in_missing(draft, rewarded=trainer in ("grpo", "rloo"))
    for key, values in OWN_VALUES.items():
        if key in foreign.left and foreign.left[key] in values:
            draft.skip(foreign, key, "says what happens anyway")
    draft.sort_left(foreign, _UNNEEDED)
    return draft


def _model(draft: Draft, foreign: Foreign) -> None:
    copy(draft, foreign, [Same("model_name_or_path", "model.path")])
    draft.lack(foreign, "model_revision", "name a folder with that revision in model.path", unless=("main",))
    wanted = foreign.take("use_peft")
    if wanted or (wanted is None and foreign.has("lora_r")):
        _adapters(draft, foreign)
    else:
        draft.lack(foreign, "load_in_4bit", "only a base with adapters is held in 4 bits", unless=(False,))
        for pattern in ("lora_*", "use_rslora", "use_dora", "*bnb_*"):
            draft.skip(foreign, pattern, "the config does not use adapters")
    draft.lack(foreign, "load_in_8bit", "use model.lora.base='nf4'", unless=(False,))
    init = foreign.section("model_init_kwargs")
    init = {key: value for key, value in init.items() if key not in ("dtype", "torch_dtype")}
    init.pop("attn_implementation", None)  # attention is chosen for the device
    if init:
        draft.gaps[f"model_init_kwargs={init!r}"] = "see the keys of [model]"


def _adapters(draft: Draft, foreign: Foreign) -> None:
    copy(draft, foreign, [Same("lora_r", "model.lora.r", 16), Same("lora_alpha", "model.lora.alpha", 32)])
    modules = foreign.take("lora_target_modules")
    if modules is None:
        what = (
            "peft chooses by the family where a config names none: these for Llama, Qwen, Mistral and Gemma"
        )
        draft.ask("model.lora.target_modules", ["q_proj", "v_proj"], what)
    else:
        named = "all-linear" if modules in ("all-linear", ["all-linear"]) else modules
        draft.put("model.lora.target_modules", named, "lora_target_modules")
    if foreign.take("load_in_4bit", False):
        draft.put("model.lora.base", "nf4", "load_in_4bit")
        draft.lack(foreign, "bnb_4bit_quant_type", "the base is held in NF4", unless=("nf4",))
        draft.lack(foreign, "use_bnb_nested_quant", "scales stay in float32", unless=(False,))
    if dropout := float(foreign.take("lora_dropout", 0.05)):
        draft.gaps[f"lora_dropout={dropout!r}"] = "adapters have no dropout"
    draft.lack(
        foreign, "lora_task_type", "causal language models are trained", unless=("CAUSAL_LM", "SEQ_CLS")
    )
    for key in ("use_rslora", "use_dora", "lora_modules_to_save", "lora_target_parameters"):
        draft.lack(foreign, key, "adapters are plain LoRA", unless=(False,))


def _data(draft: Draft, foreign: Foreign) -> None:
    name, config = foreign.take("dataset_name"), foreign.take("dataset_config")
    train, test = foreign.take("dataset_train_split", "train"), foreign.take("dataset_test_split", "test")
    evaluates = foreign.take("eval_strategy", "no") != "no"
    if name is not None:
        draft.put(
            "data.train", hub_source(name, config, train), "dataset_name, dataset_config, dataset_train_split"
        )
    if evaluates and name is not None and hub_source(name, config, test) != draft.values["data.train"]:
        draft.put("data.evaluation", hub_source(name, config, test), "dataset_name, dataset_test_split")
    elif evaluates:
        draft.ask(
            "data.evaluation",
            "held_out.jsonl",
            "the held-out rows for eval_strategy; dataset_test_split names none",
        )
    what = "prompts are never cut; data.max_prompt_tokens and data.too_long leave long ones out"
    draft.lack(foreign, "max_prompt_length", what)
    draft.lack(foreign, "datasets", "name each of them in data.train, as docs/own-data.md has it")
    draft.put("data.chat", False, "prompts that are lists of messages go through the template")


def _precision(draft: Draft, foreign: Foreign) -> None:
    wants_bf16, wants_fp16 = foreign.take("bf16"), foreign.take("fp16", False)
    stored = "float32"
    for section in ("model_init_kwargs.", ""):
        for key in ("torch_dtype", "dtype"):
            stored = str(foreign.take(f"{section}{key}", stored))
    draft.put("model.param_dtype", _DTYPES[stored.removeprefix("torch.")], "dtype")
    compute = "float16" if wants_fp16 else "float32" if wants_bf16 is False else "bfloat16"
    draft.put("model.compute_dtype", compute, "bf16, fp16")
