"""What single settings of TRL's configs become, and that none is dropped without a word."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from shardproof.cli.import_config import told
from shardproof.config.imported.convert import import_config
from shardproof.config.schema import Algorithm
from shardproof.errors import ConfigError
from tests.config.test_import_config import imported

SAMPLED = {"num_generations": 8, "max_steps": 40, "dataset_name": "org/data"}
GIVEN = {"max_steps": 40, "dataset_name": "org/data"}
VLLM = {**SAMPLED, "use_vllm": True}
EVALUATED = {**SAMPLED, "eval_strategy": "steps"}


def made_of(tmp_path, trainer, settings, ranks=None):
    return imported(tmp_path, json.dumps(settings), name="config.json", trainer=trainer, ranks=ranks)


VALUES = [
    # Each loss has its own mean also where rewards are normalised one by one.
    ("grpo", {**SAMPLED, "multi_objective_aggregation": "normalize_then_sum"}, {"algorithm.aggregation": "token_mean"}),
    ("grpo", {**SAMPLED, "multi_objective_aggregation": "normalize_then_sum", "loss_type": "sapo"},
     {"algorithm.surrogate": "sapo", "algorithm.aggregation": "sequence_mean"}),
    # TRL's level is 'token' unless the config says otherwise, also for luspo.
    ("grpo", {**SAMPLED, "loss_type": "luspo"}, {"algorithm.ratio": "token"}),
    ("grpo", {**SAMPLED, "loss_type": "sapo", "epsilon": 0.3}, {"algorithm.clip_low": None}),
    ("grpo", {**VLLM, "vllm_importance_sampling_clip_max": None}, {"algorithm.mis_cap": 1e6}),
    ("grpo", {**VLLM, "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_cap": 2.0}, {"algorithm.mis_cap": 2.0}),
    ("grpo", {**VLLM, "vllm_mode": "server", "vllm_server_port": 9000}, {"rollout.vllm.url": "http://localhost:9000"}),
    # Evaluations: as often as lines are logged, with as many completions as training has, on all rows.
    ("grpo", EVALUATED, {"output.eval_every": 10, "output.eval_samples": 8, "output.eval_prompts": 2**20}),
    ("grpo", {**EVALUATED, "eval_steps": 0.25}, {"output.eval_every": 10}),
    # One completion per row is drawn like all others, and not greedily.
    ("grpo", {**EVALUATED, "num_generations_eval": 1, "temperature": 0.9},
     {"output.eval_samples": 1, "evaluation.temperature": 0.9}),
    ("grpo", {**SAMPLED, "save_steps": 0.1}, {"output.save_every": 4, "output.keep": 1_000_000}),  # TRL keeps all
    ("sft", {**GIVEN, "save_total_limit": 3}, {"output.keep": 3}),
    ("grpo", {**SAMPLED, "project": "mine", "report_to": ["wandb"]}, {"output.project": "mine", "output.trackers": ["wandb"]}),
    ("grpo", {**SAMPLED, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}'},
     {"optimizer.final_ratio": 0.1}),
    # transformers' schedule 'constant' has no warm-up, whatever else is said.
    ("grpo", {**SAMPLED, "lr_scheduler_type": "constant", "warmup_steps": 10},
     {"optimizer.schedule": "constant", "optimizer.warmup_steps": None, "optimizer.warmup_from_zero": None}),
    ("sft", {**GIVEN, "lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1},
     {"optimizer.schedule": "constant", "optimizer.warmup_ratio": 0.1}),
    ("grpo", {**SAMPLED, "model_init_kwargs": {"dtype": "bfloat16"}}, {"model.param_dtype": "bfloat16"}),
    ("grpo", {**SAMPLED, "optim": "adamw_torch_8bit"}, {"optimizer.name": "adamw_8bit"}),
    ("grpo", {**SAMPLED, "use_peft": False, "lora_r": 16}, {"model.lora.r": None}),
    ("grpo", {**SAMPLED, "use_peft": True, "lora_target_modules": ["all-linear"]}, {"model.lora.target_modules": "all-linear"}),
    ("grpo", {**SAMPLED, "reward_model_name_or_path": "judge", "reward_funcs": ["lib.style"], "reward_weights": [0.3, 0.7]},
     {"reward.models": [{"path": "judge", "weight": 0.3}],
      "reward.functions": [{"name": "lib:style", "signature": "trl", "weight": 0.7}]}),
    # Numbers and switches as text, which TRL's parser reads; `no`, which YAML takes for a switch.
    ("grpo", {**SAMPLED, "max_steps": "80", "use_vllm": "false", "bf16": "False", "warmup_steps": "5", "save_steps": "1e2",
              "run_name": "007"},
     {"train.steps": 80, "rollout.engine": None, "model.compute_dtype": "float32", "optimizer.warmup_steps": 5,
      "output.save_every": 100, "output.run_name": "007"}),
    ("grpo", {**SAMPLED, "eval_strategy": False, "save_strategy": False}, {"output.save_every": 0, "data.evaluation": None}),
    # What the engine is told further is stronger than the settings of its name; a command line has it as JSON.
    ("grpo", {**SAMPLED, "top_p": 0.5, "generation_kwargs": {"top_p": 0.9, "min_tokens": 4, "stop": "END", "top_k": -1,
                                                             "frequency_penalty": 0.1, "stop_token_ids": 7}},
     {"rollout.top_p": 0.9, "rollout.min_new_tokens": 4, "rollout.stop": ["END"], "rollout.top_k": 0,
      "rollout.frequency_penalty": 0.1, "rollout.stop_ids": [7]}),
    ("rloo", {**SAMPLED, "generation_kwargs": '{"stop_strings": ["a", "b"], "presence_penalty": 1, "min_p": 0.1}'},
     {"rollout.stop": ["a", "b"], "rollout.presence_penalty": 1.0, "rollout.min_p": 0.1}),
    # Scripts around TRL make conversations from a column and a system message; the length of SFT has had another name.
    ("grpo", {**SAMPLED, "dataset_prompt_column": "problem", "system_prompt": "Think."},
     {"data.prompt_column": "problem", "data.system_prompt": "Think.", "data.chat": True}),
    ("grpo", {**SAMPLED, "report_to": ["wandb"], "wandb_project": "open", "wandb_entity": "team"},
     {"output.project": "open", "output.tracker_options": {"wandb": {"entity": "team"}}}),
    ("sft", {**GIVEN, "max_seq_length": 4096}, {"data.max_length": 4096}),
    ("sft", {**GIVEN, "max_length": None}, {"data.max_length": None, "data.on_max_length": None}),
    ("dpo", GIVEN, {"data.max_length": 1024, "data.on_max_length": "truncate"}),
    ("dpo", {**GIVEN, "sync_ref_model": True, "ref_model_sync_steps": 64},
     {"algorithm.reference_sync_every": 64, "algorithm.reference_mix": 0.6}),
    ("reward", GIVEN, {"data.max_length": 1024, "data.on_max_length": "drop"}),
    # Batch sizes are per process; TRL's command line starts as many as the config says.
    ("grpo", {**SAMPLED, "num_processes": 4}, {"train.prompts_per_step": 4}),
    # Beside each process, or group of them, there is an engine.
    ("grpo", {**VLLM, "num_processes": 8, "vllm_tensor_parallel_size": 2}, {"rollout.vllm.replicas": 4}),
    ("grpo", {**VLLM, "num_processes": 8, "vllm_mode": "server"}, {"rollout.vllm.replicas": None}),
    ("grpo", VLLM, {"rollout.vllm.replicas": None}),
    ("sft", {**GIVEN, "num_processes": "4"}, {"train.prompts_per_step": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "settings", "expected"), VALUES)
def test_settings_become_what_trl_does_with_them(tmp_path, trainer, settings, expected):
    made = made_of(tmp_path, trainer, settings)
    assert made.problem is None
    assert {key: made.draft.values.get(key) for key in expected} == expected


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_without_an_upper_clip_a_config_has_the_lower_one(tmp_path, loss_type):
    settings = {**SAMPLED, "loss_type": loss_type, "epsilon": 0.1}
    values = made_of(tmp_path, "grpo", settings).draft.values
    prefix = "algorithm."
    given = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    algorithm = Algorithm(**given)
    assert (algorithm.clip_low, algorithm.clip_high) == (0.1, 0.1)


GAPS = [
    ("grpo", {**SAMPLED, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}, "num_cycles=2"),
    ("grpo", {**SAMPLED, "optim": "adamw_torch_4bit"}, "optim='adamw_torch_4bit'"),
    ("grpo", {**SAMPLED, "report_to": ["wandb", "comet_ml"]}, "report_to='comet_ml'"),
    ("grpo", {**SAMPLED, "save_strategy": "best"}, "save_strategy='best'"),
    ("grpo", {**SAMPLED, "use_adaptive_entropy": True, "entropy_coef_max": 0.1}, "entropy_coef_max=0.1"),
    ("grpo", {**VLLM, "vllm_importance_sampling_clip_min": 0.5}, "clip_min=0.5"),
    ("grpo", {**SAMPLED, "use_peft": True}, "lora_dropout=0.05"),
    ("grpo", {**SAMPLED, "use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "quant_type='fp4'"),
    ("sft", {**GIVEN, "packing": True}, "packing=True"),
    ("sft", {**GIVEN, "assistant_only_loss": True}, "assistant_only_loss=True with rows of prompt and completion"),
    ("grpo", {**SAMPLED, "generation_kwargs": {"temperature": 0.7}}, "generation_kwargs.temperature=0.7"),
    ("grpo", {**SAMPLED, "generation_kwargs": {"num_beams": 4}}, "generation_kwargs.num_beams=4"),
    ("grpo", {**SAMPLED, "generation_kwargs": {"logit_bias": {"5": -1}}}, "generation_kwargs.logit_bias.5=-1"),
    ("grpo", {**SAMPLED, "generation_kwargs": {"max_tokens": 99}}, "longest completion other than 512"),
    ("grpo", {**SAMPLED, "generation_kwargs": [1]}, "generation_kwargs=[1]"),
    ("grpo", {**SAMPLED, "reward_weights": [0.5, 1]}, "reward_weights=[0.5, 1]"),
    ("grpo", {**SAMPLED, "generation_kwargs": "{no json"}, "generation_kwargs='{no json'"),
    ("grpo", {**SAMPLED, "max_prompt_length": 512}, "max_prompt_length=512"),
    ("sft", {**GIVEN, "load_in_4bit": True}, "load_in_4bit=True"),
    ("dpo", {**GIVEN, "dataset_mixer": {"org/pairs": 0.5}}, "dataset_mixer.org/pairs=0.5"),
    ("sft", {**GIVEN, "chat_template": "{{ messages }}"}, "chat_template="),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "settings", "gap"), GAPS)
def test_what_has_no_counterpart_is_named(tmp_path, trainer, settings, gap):
    assert any(gap in each for each in made_of(tmp_path, trainer, settings).draft.gaps)


ASKED = [
    ("grpo", {**SAMPLED, "eval_strategy": "epoch"}, "output.eval_every"),
    ("grpo", {**SAMPLED, "save_strategy": "epoch"}, "output.save_every"),
    ("grpo", {**SAMPLED, "push_to_hub": True, "hub_model_id": "name"}, "output.push_to_hub"),
    ("grpo", {**SAMPLED, "use_peft": True}, "model.lora.target_modules"),
    ("sft", GIVEN, "data.messages_column"),
]


@pytest.mark.parametrize(("trainer", "settings", "key"), ASKED)
def test_what_a_config_cannot_say_is_asked_for(tmp_path, trainer, settings, key):
    made = made_of(tmp_path, trainer, settings)
    assert key in made.draft.to_fill and made.problem is None


def other_value(field, default):
    """A value of a setting that is not its default."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1 if default >= 0 else 3
    if isinstance(default, list):
        return ["x"]
    kind = str(field.type)
    for name, value in (("bool", True), ("int", 3), ("float", 0.5), ("dict", {"a": 1}), ("list", ["x"])):
        if default is None and name in kind:
            return value
    return "other"


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "dpo", "kto", "reward", "sft"])
def test_no_setting_of_trl_is_dropped_without_a_word(tmp_path, trainer):
    """Every setting, with another value than its default, is behind a value of the recipe, or is told about."""
    import trl
    from trl import ModelConfig, ScriptArguments

    kind = getattr(trl, f"{ {'reward': 'Reward'}.get(trainer, trainer.upper()) }Config")
    read = {  # settings that only some values may have
        "max_steps": 40, "warmup_steps": 5, "adam_beta1": 0.8, "adam_beta2": 0.9, "label_smoothing": 0.1,
        "max_grad_norm": 0.5, "top_p": 0.9, "dtype": "bfloat16", "report_to": "wandb", "reward_clip_range": [-1, 1],
        "delta": 4.0, "vllm_gpu_memory_utilization": 0.5, "loss_type": "dapo" if trainer == "grpo" else None,
        "num_train_epochs": 2.0, "multi_objective_aggregation": None, "vllm_importance_sampling_cap": None,
        "learning_rate": 1e-4, "optim": "muon", "hub_model_id": "me/x", "scale_rewards": "batch",
    }  # fmt: skip
    written = {}
    for each in (kind, ModelConfig, ScriptArguments):
        for field in dataclasses.fields(each):
            made = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if made else field.default
            written[field.name] = read.get(field.name, other_value(field, default))
    written = {key: value for key, value in written.items() if value is not None}
    made = made_of(tmp_path, trainer, written)
    lines = [*told(made, None), *made.draft.origins.values(), *made.draft.to_fill.values()]
    unnamed = [key for key in written if not re.search(rf"\b{key}\b", "\n".join(lines))]
    assert set(unnamed) <= {"vllm_server_base_url", "vllm_server_host", "vllm_server_port"}, unnamed


@pytest.mark.parametrize(
    ("settings", "trainer"),
    [
        ({"loss_type": "sigmoid", "beta": 0.1}, "dpo"),
        ({"loss_type": ["sigmoid", "sft"], "precompute_ref_log_probs": True}, "dpo"),
        ({"loss_type": "dft", "packing": True}, "sft"),
        ({"loss_type": "kto", "precompute_ref_log_probs": True}, "kto"),
        ({"loss_type": "dr_grpo"}, "grpo"),
        ({"num_generations": 4, "reward_clip_range": [-1, 1]}, "rloo"),
        ({"num_generations": 4, "deepspeed": {"zero": 3}, "env": {"A": "b"}}, "grpo"),
    ],
)
def test_a_trainer_is_told_by_its_settings_and_losses(tmp_path, settings, trainer):
    assert imported(tmp_path, json.dumps(settings), name="config.json").trainer == trainer


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"loss_type": "simpo", "cpo_alpha": 0.5}, "CPO"),
        ({"lmbda": 0.5, "temperature": 0.9, "teacher_model_name_or_path": "org/x"}, "GKD"),
        ({"teacher_model_name_or_path": "org/x", "temperature": 0.9}, "distillation"),
        ({"num_ppo_epochs": 4, "temperature": 0.7}, "PPO"),
        ({"missing_eos_penalty": 1.0, "beta": 0.1, "loss_type": "sigmoid"}, "online DPO"),
        ({"step_separator": "x", "max_steps": 4}, "PRM"),
    ],
)
def test_a_trainer_that_is_not_read_is_refused_by_name(tmp_path, settings, name):
    with pytest.raises(ConfigError, match=f"is for TRL's {name} trainer, which is not read"):
        imported(tmp_path, json.dumps(settings), name="config.json")
    assert imported(tmp_path, json.dumps(settings), name="config.json", trainer="sft").trainer == "sft"


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "dpo", "kto", "reward", "sft"])
def test_a_config_with_every_setting_at_its_default_lacks_nothing(tmp_path, trainer):
    """As `TrainingArguments.to_json_string` writes it."""
    import trl

    kind = getattr(trl, f"{ {'reward': 'Reward'}.get(trainer, trainer.upper()) }Config")
    written = json.loads(kind(output_dir="x", bf16=False, use_cpu=True).to_json_string())
    given = {
        key: value for key, value in written.items() if key not in ("use_cpu", "train_sampling_strategy")
    }
    made = made_of(tmp_path, trainer, given)
    assert made.draft.gaps == {}
    assert made.problem is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"reward_funcs": ["a.b"], "reward_weights": [1, 2]},
        {"scale_rewards": "maybe"},
        {"num_generations": "many"},
    ],
)
def test_a_value_that_trl_does_not_take_is_named(tmp_path, wrong):
    with pytest.raises(ConfigError, match=f"{list(wrong)[-1]}=.* is no value that TRL takes there"):
        made_of(tmp_path, "grpo", SAMPLED | wrong)


def test_settings_that_change_nothing_are_listed(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SAMPLED, "vespo_k_pos": 3.0, "num_iterations": 1, "beta": 0.1}))
    assert import_config(path).draft.idle == ["num_generations", "vespo_k_pos", "num_iterations"]


def test_the_processes_that_the_user_says_count_and_not_those_of_the_config(tmp_path):
    made = made_of(tmp_path, "dpo", {**GIVEN, "num_processes": 4}, ranks=2)
    assert made.draft.values["train.prompts_per_step"] == 16
    assert "num_processes" not in "".join(made.draft.gaps)


def test_the_settings_of_a_launcher_are_told_from_those_without_a_counterpart(tmp_path):
    launched = {"accelerate_config": "zero3", "machine_rank": 0, "mixed_precision": "bf16", "num_machines": 2}
    made = made_of(tmp_path, "dpo", {**GIVEN, **launched})
    assert set(made.draft.gaps) == {"accelerate_config='zero3'", "num_machines=2"}
    assert "--ranks" in made.draft.gaps["accelerate_config='zero3'"]
    known = made_of(tmp_path, "dpo", {**GIVEN, **launched}, ranks=8)
    assert set(known.draft.gaps) == {"num_machines=2"}


def test_every_reward_function_without_a_module_is_asked_for(tmp_path):
    names = ["length", "accuracy_reward", "get_soft_overlong_punishment", "style"]
    made = made_of(tmp_path, "grpo", {**SAMPLED, "reward_funcs": names})
    asked = made.draft.to_fill["reward.functions"]
    assert "the module of length" in asked and "the module of style" in asked
    # TRL's scripts call this one with numbers of their own.
    assert "max_completion_len=1280, soft_punish_cache=256" in asked
    assert [each["name"] for each in made.draft.values["reward.functions"]] == [
        "my_rewards:length",
        "math_verify",
        "my_rewards:get_soft_overlong_punishment",
        "my_rewards:style",
    ]


@pytest.mark.parametrize("source", [{}, {"dataset_name": None}, {"dataset_name": "rows/train.jsonl"}])
def test_a_config_that_evaluates_and_names_no_held_out_rows_is_asked_for_them(tmp_path, source):
    made = made_of(tmp_path, "dpo", {"max_steps": 40, "eval_strategy": "steps", "eval_steps": 20, **source})
    assert "held-out rows" in made.draft.to_fill["data.evaluation"]
    assert made.draft.values["output.eval_every"] == 20
    assert made.problem is None


def test_the_pace_of_evaluations_that_are_not_made_is_told_as_not_used(tmp_path):
    made = made_of(tmp_path, "kto", {**GIVEN, "eval_steps": 500})
    assert "eval_steps" in made.draft.idle and not made.draft.gaps


def test_settings_of_adapters_that_are_switched_off_are_no_gaps(tmp_path):
    off = {
        "use_peft": False,
        "load_in_4bit": False,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": False,
    }
    assert made_of(tmp_path, "dpo", {**GIVEN, **off, "ignore_bias_buffers": False}).draft.gaps == {}


def test_a_gap_names_the_keys_that_stand_for_it(tmp_path):
    gaps = made_of(tmp_path, "grpo", {**SAMPLED, "max_prompt_length": 512}).draft.gaps
    assert "data.max_prompt_tokens" in gaps["max_prompt_length=512"]
