"""What TRL's configs have beside the settings of a trainer that is read: other trainers, the launcher, scripts around TRL."""

from __future__ import annotations

import fnmatch
from typing import Any

from shardproof.config.imported.draft import Draft, Foreign, Same, copy
from shardproof.errors import fail

_OTHERS: dict[str, tuple[str, ...]] = {
    "PPO": (
        "num_ppo_epochs",
        "cliprange",
        "cliprange_value",
        "vf_coef",
        "whiten_rewards",
        "num_mini_batches",
    ),
    "CPO": ("cpo_alpha", "simpo_gamma"),
    "BCO": ("min_density_ratio", "max_density_ratio", "prompt_sample_size"),
    "Nash-MD": ("mixture_coef",),
    "TPO": ("tpo_alpha", "tpo_l_gamma"),
    "PRM": ("step_separator", "train_on_last_step_only"),
    "GOLD": ("use_uld_loss", "uld_crossentropy_weight", "uld_distillation_weight"),
    "SDPO": ("success_reward_threshold", "use_successful_as_teacher", "distillation_weight"),
    "SDFT": ("generate_from_teacher", "num_loss_tokens_to_skip"),
    "MiniLLM": ("rkl_advantage", "single_step_decomposition", "kd_temperature"),
    "GKD": ("lmbda", "seq_kd"),
    "distillation": ("teacher_model_name_or_path", "teacher_model_server_url"),
    "online DPO": ("missing_eos_penalty",),
}
# Of transformers' `TrainingArguments`, with the values that they have where a config is silent.
OWN_VALUES: dict[str, tuple[Any, ...]] = {
    "auto_find_batch_size": (False,),
    "average_tokens_across_devices": (True,),
    "batch_eval_metrics": (False,),
    "debug": ("", []),
    "do_predict": (False,),
    "enable_jit_checkpoint": (False,),
    "eval_delay": (0,),
    "eval_do_concat_batches": (True,),
    "eval_use_gather_object": (False,),
    "full_determinism": (False,),
    "group_by_length": (False,),
    "ignore_bias_buffers": (False,),
    "ignore_data_skip": (False,),
    "include_for_metrics": ([],),
    "include_num_input_tokens_seen": ("no", False),
    "include_tokens_per_second": (False,),
    "label_smoothing_factor": (0,),
    "length_column_name": ("length",),
    "past_index": (-1,),
    "prediction_loss_only": (False,),
    "restore_callback_states_from_checkpoint": (False,),
    "save_on_each_node": (False,),
    "save_only_model": (False,),
    "save_safetensors": (True,),
    "skip_memory_metrics": (True,),
    "train_sampling_strategy": ("random",),
    "use_cache": (False,),
    "use_cpu": (False,),
}

# Of `accelerate launch`, which TRL's command line starts with them.
_BY_LAUNCHER = "see docs/multi-node.md"
OF_LAUNCHER: dict[str, str] = {
    **dict.fromkeys(("machine_rank", "main_process_*", "main_training_function"), _BY_LAUNCHER),
    **dict.fromkeys(("rdzv_*", "same_network", "gpu_ids", "multi_gpu"), _BY_LAUNCHER),
    **dict.fromkeys(("compute_environment", "distributed_type"), "models are sharded by FSDP"),
    **dict.fromkeys(("mixed_precision", "downcast_bf16"), "see model.compute_dtype"),
    **dict.fromkeys(("dynamo_*",), "see model.compile"),
    **dict.fromkeys(("enable_cpu_affinity", "num_cpu_threads_per_process", "tpu_*"), "the launcher knows it"),
}

# Of scripts around TRL, such as open-r1's and the alignment handbook's, which have settings of their own.
_IN_TRAIN = "name each of them in data.train, as docs/own-data.md has it"
_OF_SCRIPTS = {
    "chat_template": "put the template into the model's folder",
    "dataset_configs": _IN_TRAIN,
    "dataset_splits": _IN_TRAIN,
    "dataset_mix*": _IN_TRAIN,
    "vllm_device": "see rollout.vllm.devices",
    "system_prompt": "see data.system_prompt",
    "dataset_prompt_column": "see data.prompt_column",
}


def of_scripts(draft: Draft, foreign: Foreign, *, samples: bool) -> None:
    """What scripts around TRL say: prompts that they make from a column and a system message, and the tracker's project."""
    prompts = (
        Same("dataset_prompt_column", "data.prompt_column"),
        Same("system_prompt", "data.system_prompt"),
    )
    if samples and any(foreign.has(row.theirs) for row in prompts):
        copy(draft, foreign, prompts)
        draft.put("data.chat", True, "system_prompt, dataset_prompt_column: the script makes conversations")
    if foreign.has("wandb_project") and "wandb" in draft.values["output.trackers"]:
        copy(draft, foreign, [Same("wandb_project", "output.project", None, str)])
        if foreign.has("wandb_entity"):
            entity = str(foreign.take("wandb_entity"))
            draft.put("output.tracker_options", {"wandb": {"entity": entity}}, "wandb_entity")
    for pattern, why in _OF_SCRIPTS.items():
        for key in fnmatch.filter(foreign.left, pattern):
            draft.lack(foreign, key, why, unless=("auto",))


def processes(draft: Draft, foreign: Foreign, ranks: int | None) -> int:
    """How many processes a config is for: those that the user says, or that TRL's command line starts by it."""
    named = int(foreign.take("num_processes", 1))
    if foreign.has("accelerate_config") and not foreign.has("num_processes") and ranks is None:
        what = "it says on how many processes TRL runs, 8 in TRL's own: pass that number as --ranks"
        draft.lack(foreign, "accelerate_config", what, unless=("single_gpu",))
    draft.skip(foreign, "accelerate_config", "models are sharded by FSDP")
    machines = int(foreign.take("num_machines", 1))
    if machines > 1:
        draft.gaps[f"num_machines={machines}"] = (
            f"start with `shardproof train --nnodes {machines}`: see docs/multi-node.md"
        )
    return named if ranks is None else ranks


def refuse_others(foreign: Foreign) -> None:
    """Raise a ConfigError where a config is of a trainer that is not read: as another's it would mean something else."""
    for name, keys in _OTHERS.items():
        if (key := next(filter(foreign.has, keys), None)) is not None:
            message = f"the config is for TRL's {name} trainer, which is not read: it has {key}."
            fix = "docs/algorithms.md has what there is; --trainer reads the config as another trainer's"
            raise fail("C001", "config", message, fix=fix)
