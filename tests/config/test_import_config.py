"""Configs of TRL, verl and SkyRL become recipes that say the same, and what has no counterpart is named."""

from __future__ import annotations

import dataclasses
import json
import tomllib

import pytest

from shardproof.config.imported.convert import import_config
from shardproof.config.imported.files import read_config
from shardproof.config.imported.text import toml
from shardproof.config.load import load_recipe
from shardproof.errors import ConfigError

TRL_CONFIG = """
model_name_or_path: org/model
dataset_name: org/data
reward_funcs: [accuracy_reward, lib.rewards.style]
reward_weights: [1.0, 0.2]
output_dir: runs/x
learning_rate: 2e-6
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 4
num_generations: 8
num_iterations: 2
max_steps: 400
beta: 0.04
loss_type: dr_grpo
epsilon_high: 0.28
delta: 4.0
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.03
sync_ref_model: true
ref_model_sync_steps: 64
top_entropy_quantile: 0.2
neftune_noise_alpha: 5
logging_steps: 1
"""
VERL_CONFIG = """
actor_rollout_ref:
  model: {path: org/model, lora_rank: 8}
  actor:
    strategy: fsdp2
    ppo_mini_batch_size: 64
    clip_ratio_high: 0.28
    loss_agg_mode: seq-mean-token-sum-norm
    use_kl_loss: true
    kl_loss_type: low_var_kl
    policy_loss: {loss_mode: vanilla}
    optim: {lr: 1e-6, lr_warmup_steps: 10}
  rollout: {name: vllm, n: 5, top_k: 20, response_length: '${data.max_response_length}', val_kwargs: {n: 4, do_sample: true, temperature: 0.6}}
data: {train_files: a.parquet, val_files: [b.parquet, c.parquet], train_batch_size: 256, max_response_length: 2048}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, filter_groups: {enable: true, max_num_gen_batches: 10}}
reward_model: {overlong_buffer: {enable: true, len: 512, penalty_factor: 1.0}}
trainer: {total_training_steps: 100, test_freq: 5, save_freq: 20, nnodes: 2, default_local_dir: 'ckpt/${trainer.experiment_name}', experiment_name: e1}
custom_reward_function: {path: score.py}
"""
SKYRL_CONFIG = """
data: {train_data: ["${oc.env:HOME}/train.parquet"], val_data: [v.parquet]}
trainer:
  policy: {model: {path: org/model}, optimizer_config: {lr: 1.0e-6}}
  algorithm: {advantage_estimator: gae, use_kl_loss: false, policy_loss_type: dual_clip, lambd: 0.95}
  train_batch_size: 512
  policy_mini_batch_size: 128
  epochs: 3
generator: {n_samples_per_prompt: 4, sampling_params: {max_generate_length: 300, top_k: 5}, max_turns: 3}
environment: {env_class: search}
"""


def imported(tmp_path, text, *overrides, name="config.yaml", **options):
    path = tmp_path / name
    path.write_text(text)
    return import_config(path, overrides, **options)


def recipe_of(tmp_path, made):
    path = tmp_path / "recipe.toml"
    path.write_text(made.text)
    return load_recipe(path)


def test_trl(tmp_path):
    made = imported(tmp_path, TRL_CONFIG, ranks=2)
    assert (made.library, made.trainer, made.problem) == ("trl", "grpo", None)
    recipe = recipe_of(tmp_path, made)
    algorithm = recipe.algorithm
    assert (algorithm.name, algorithm.preset, algorithm.aggregation) == ("dr_grpo", "trl", "constant")
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip, algorithm.kl_coef) == (
        0.2,
        0.28,
        4.0,
        0.04,
    )
    assert (algorithm.epochs_per_batch, algorithm.updates_per_epoch) == (2, 2)
    # 2 ranks with 4 completions in 4 steps are 32 completions, 4 prompts; 400 updates are 100 times 2 epochs of 2.
    assert (recipe.train.prompts_per_step, recipe.train.steps) == (4, 100)
    assert (algorithm.reference_sync_every, algorithm.reference_mix) == (16, 0.6)
    assert (recipe.optimizer.schedule, recipe.optimizer.final_ratio) == ("cosine", 0.1)
    assert recipe.reward is not None
    assert [(each.name, each.weight) for each in recipe.reward.functions] == [
        ("math_verify", 1.0),
        ("lib.rewards:style", 0.2),
    ]
    assert list(made.draft.gaps) == ["neftune_noise_alpha=5"]
    assert "entropy_share = 0.2  # top_entropy_quantile" in made.text
    assert list(made.draft.unneeded) == ["logging_steps"]


def test_verl(tmp_path):
    made = imported(tmp_path, VERL_CONFIG)
    assert (made.library, made.problem) == ("verl", None)
    recipe = recipe_of(tmp_path, made)
    algorithm = recipe.algorithm
    assert (algorithm.name, algorithm.preset, algorithm.aggregation, algorithm.scale) == (
        "grpo",
        "verl",
        "constant",
        "off",
    )
    assert (algorithm.updates_per_epoch, algorithm.dual_clip, algorithm.clip_high) == (4, 3.0, 0.28)
    assert (algorithm.kl_coef, algorithm.kl_estimator, algorithm.kl_in) == (0.001, "k3", "loss")
    assert (algorithm.dynamic_sampling, algorithm.dynamic_sampling_rounds, algorithm.overlong_from) == (
        True,
        10,
        1536,
    )
    assert (recipe.rollout.max_new_tokens, recipe.rollout.group_size, recipe.rollout.top_k) == (2048, 5, 20)
    assert (recipe.evaluation.temperature, recipe.output.eval_samples, recipe.output.eval_every) == (
        0.6,
        4,
        5,
    )
    assert recipe.evaluation.top_k == 0  # its evaluations draw from all tokens, unless they say otherwise
    assert [each.source for each in recipe.evaluation.sets] == ["c.parquet"]
    assert (recipe.output.folder, recipe.model.lora and recipe.model.lora.r) == ("ckpt/e1", 8)
    assert "trainer.nnodes=2" in made.draft.gaps
    assert recipe.reward is not None
    found = [(each.name, each.signature) for each in recipe.reward.functions]
    assert found == [("score:compute_score", "verl")]


def test_skyrl(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    made = imported(tmp_path, SKYRL_CONFIG)
    assert (made.library, made.problem) == ("skyrl", None)
    recipe = recipe_of(tmp_path, made)
    assert recipe.data.train == "/home/me/train.parquet"
    assert (recipe.algorithm.name, recipe.algorithm.dual_clip, recipe.algorithm.gae_lambda) == (
        "ppo",
        3.0,
        0.95,
    )
    assert (recipe.algorithm.updates_per_epoch, recipe.algorithm.kl_coef) == (4, 0.0)
    assert (recipe.rollout.top_k, recipe.rollout.max_new_tokens) == (5, 300)
    assert set(made.draft.to_fill) >= {"train.steps", "data.answer_column", "reward.functions"}
    assert {"environment.env_class='search'", "generator.max_turns=3"} <= made.draft.gaps.keys()


@pytest.mark.parametrize(
    "adv", ["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"]
)
@pytest.mark.parametrize(
    "loss",
    [
        "vanilla",
        "gspo",
        "clip_cov",
        "kl_cov",
        "sapo",
        "cispo",
        "geo_mean",
        "dppo_tv",
        "dppo_kl",
        "unheard_of",
    ],
)
def test_every_advantage_and_loss_of_verl_makes_a_recipe(tmp_path, adv, loss):
    settings = [f"algorithm.adv_estimator={adv}", f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"]
    settings += ["actor_rollout_ref.rollout.n=4", "data.train_files=a.parquet"]
    made = imported(tmp_path, "{}", *settings)
    assert made.problem is None
    assert ("loss_mode" in str(made.draft.gaps)) == (loss == "unheard_of")


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
@pytest.mark.parametrize(
    "more", [[], ["multi_objective_aggregation=normalize_then_sum"], ["scale_rewards=batch"]]
)
def test_every_loss_of_trl_makes_a_recipe(tmp_path, loss, more):
    settings = [f"loss_type={loss}", "num_generations=8", "max_steps=5", *more]
    if loss == "cispo":
        settings.append("epsilon_high=5.0")
    made = imported(tmp_path, "{}", *settings)
    assert made.problem is None
    if loss == "cispo" and not more:
        algorithm = recipe_of(tmp_path, made).algorithm
        assert (algorithm.clip_low, algorithm.clip_high) == (1.0, 4.0), (
            "TRL bounds the ratio itself, from above"
        )


def test_every_setting_of_trls_trainers_is_known(tmp_path):
    """What a config writes out in full, defaults and all, names nothing that is not in our tables."""
    from transformers import TrainingArguments
    from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig

    kinds = {
        "grpo": GRPOConfig,
        "rloo": RLOOConfig,
        "dpo": DPOConfig,
        "kto": KTOConfig,
        "reward": RewardConfig,
        "sft": SFTConfig,
    }
    shared = {field.name for field in dataclasses.fields(TrainingArguments)}
    for trainer, kind in kinds.items():
        written = {}
        for field in dataclasses.fields(kind):
            default = field.default_factory() if field.default is dataclasses.MISSING else field.default
            if field.name not in shared and default is not None:
                written[field.name] = default
        made = imported(tmp_path, json.dumps(written), name="config.json", trainer=trainer)
        assert made.problem is None, (trainer, made.problem)
        assert made.draft.gaps == {}, trainer


def test_preferences_of_trl_keep_what_trl_reads_and_move_the_reference(tmp_path):
    """TRL has numbers of losses that it does not read with others, where they would change ours or be refused."""
    unread = ["label_smoothing=0.1", "discopop_tau=0.2", "f_alpha_divergence_coef=0.7"]
    made = imported(tmp_path, "loss_type: [sigmoid]", "sync_ref_model=true", *unread, trainer="dpo")
    assert made.problem is None and made.draft.gaps == {}
    algorithm = recipe_of(tmp_path, made).algorithm
    assert (algorithm.reference_sync_every, algorithm.reference_mix) == (512, 0.6)
    assert algorithm.preference.label_smoothing == 0.0
    assert {each.partition("=")[0] for each in unread} <= made.draft.unneeded.keys()
    settings = ["loss_type=[robust, discopop]", "f_divergence_type=alpha_divergence", *unread]
    read = recipe_of(tmp_path, imported(tmp_path, "{}", *settings, trainer="dpo")).algorithm.preference
    assert (read.label_smoothing, read.discopop_tau, read.divergence_alpha) == (0.1, 0.2, 0.7)
    mixed = imported(tmp_path, "loss_type: [sigmoid, aot]", "label_smoothing=0.1", trainer="dpo")
    assert "TRL smooths the others alone" in mixed.draft.gaps["label_smoothing with loss_type='sigmoid'"]


def test_trls_schedule_of_warm_up_stable_and_decay(tmp_path):
    settings = ["num_generations=4", "max_steps=50", "lr_scheduler_type=warmup_stable_decay"]
    more = ["lr_scheduler_kwargs={num_decay_steps: 10, decay_type: 1-sqrt, min_lr_ratio: 0.1}"]
    made = imported(tmp_path, "{}", *settings, *more, "optim=adamw_bnb_8bit")
    optimizer = recipe_of(tmp_path, made).optimizer
    assert (optimizer.schedule, optimizer.decay_steps, optimizer.decay_shape) == ("wsd", 10, "sqrt")
    assert (optimizer.final_ratio, optimizer.name) == (0.1, "adamw_8bit")


def test_a_launch_script_is_read_with_its_variables(tmp_path):
    script = """#!/bin/bash
set -x
MODEL=org/model
export BATCH=128
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$HOME/a.parquet" data.train_batch_size=${BATCH} \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.n=8 \\
    +trainer.extra='a b' $@
"""
    path = tmp_path / "run.sh"
    path.write_text(script)
    found = read_config(path, ["data.train_batch_size=64"])
    assert found["actor_rollout_ref.model.path"] == "org/model"
    assert (found["data.train_batch_size"], found["trainer.extra"]) == (64, "a b")
    assert import_config(path).draft.values["train.prompts_per_step"] == 128


def test_a_launch_script_is_read_with_its_arithmetic_and_defaults(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENS", "100")
    monkeypatch.delenv("MODEL_PATH", raising=False)
    script = """
max_prompt=$((1024 * 2))
max_response=$(((max_prompt + 1) * $TOKENS / 3))   # that's whole
: "${ROOT_OF_NOTHING:="/data"}"
ROOT="${ROOT_OF_NOTHING}/${max_prompt}"
MODEL_PATH=${MODEL_PATH:-"${ROOT}/model"}
echo 'two
lines'
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.max_response_length=${max_response} data.max_prompt_length=$((max_prompt - 8)) \\
    actor_rollout_ref.model.path="${MODEL_PATH}" actor_rollout_ref.rollout.n=${1:-8}
"""
    path = tmp_path / "run.sh"
    path.write_text(script)
    found = read_config(path)
    assert (found["data.max_response_length"], found["data.max_prompt_length"]) == (68300, 2040)
    assert found["actor_rollout_ref.model.path"] == "/data/2048/model"
    assert found["actor_rollout_ref.rollout.n"] == 8


def test_sections_that_are_one_setting_are_taken_over(tmp_path):
    config = """
loss_type: grpo
gradient_checkpointing_kwargs: {use_reentrant: false}
model_init_kwargs: {revision: main}
chat_template_kwargs: {enable_thinking: false}
"""
    made = imported(tmp_path, config)
    assert recipe_of(tmp_path, made).data.chat_template_kwargs == {"enable_thinking": False}
    assert [gap for gap in made.draft.gaps if "kwargs" in gap] == ["model_init_kwargs={'revision': 'main'}"]


def test_files_of_one_name_greedy_validation_and_gspo_of_verl_give_a_recipe(tmp_path):
    files = "data.train_files=[a/train.parquet, b/train.parquet]"
    settings = [
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
    ]
    settings += ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"]
    made = imported(tmp_path, VERL_CONFIG, files, *settings)
    recipe = recipe_of(tmp_path, made)
    assert [each.name for each in recipe.data.sources] == ["a-train", "b-train"]
    assert (recipe.output.eval_samples, recipe.evaluation.temperature) == (1, 0.0)
    assert (recipe.algorithm.dual_clip, recipe.algorithm.aggregation) == (0.0, "sequence_mean")


def test_values_that_no_recipe_takes_are_named_and_dates_are_text(tmp_path):
    text = 'num_generations: 2\nepsilon: .inf\nrun_name: 2026-01-01\nmodel_name_or_path: "${NO\\nWHERE\\x01"'
    made = imported(tmp_path, text)
    assert tomllib.loads(made.text)["output"]["run_name"] == "2026-01-01"
    assert made.problem is not None and "algorithm.clip_low: Input should be a finite number" in made.problem
    assert "run_name" not in made.problem


@pytest.mark.parametrize(
    ("text", "name", "options", "said"),
    [
        ("a: [", "c.yaml", {}, "cannot be read"),
        ("[1, 2]", "c.json", {}, "holds a list"),
        ("echo hello", "c.sh", {}, "key=value"),
        ("python a.b=1 'open", "c.sh", {}, "quotation is not closed"),
        ("python actor_rollout_ref.actor.clip_ratio=$((x ** 2))", "c.sh", {}, r"clip_ratio=.*x\*\*2"),
        ("loss_type: grpo\nbeta: [1]", "c.yaml", {}, r"beta=\[1\] is no value that TRL takes"),
        ("seed: 1", "c.yaml", {}, "names no setting that one trainer alone has"),
        ("model: {path: m}\ndata: {train_files: t}", "c.yaml", {}, "may be of verl's or SkyRL's SFT trainer"),
        (
            "model: {path: m}\ndata: {path: t}\nrollout: {n: 1}",
            "c.yaml",
            {},
            "has the sections data, model, rollout",
        ),
        ("strange: {section: {key: 1}}", "c.yaml", {}, "none of TRL's, verl's or SkyRL's"),
        ("desirable_weight: 1.0\nlabel_smoothing: 0.1", "c.yaml", {}, "may be for dpo, kto"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, text, name, options, said):
    with pytest.raises(ConfigError, match=said):
        imported(tmp_path, text, name=name, **options)


@pytest.mark.parametrize(
    "value", [None, True, 3, 1e-6, 2.0, 'a "b"\n', [1, "x"], {"a-b": [{"c": 1.5}], "ü": 1}]
)
def test_values_are_written_as_toml_reads_them(value):
    read = tomllib.loads(f"x = {toml(value)}")["x"]
    assert read == ("none" if value is None else value)
