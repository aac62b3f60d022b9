"""verl's settings, of its configs today and before, become what verl does with them."""

from __future__ import annotations

import json

import pytest

from shardproof.errors import ConfigError
from tests.config.test_import_config import imported

SMALL = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "a.parquet",
    "data.val_files": ["b.parquet", "c.parquet"],
    "data.train_batch_size": 32,
    "data.max_response_length": 1000,
    "trainer.total_training_steps": 20,
    "trainer.test_freq": 5,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.rollout.n": 4,
}
ACTOR, ROLLOUT, CORRECTION = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "algorithm.rollout_correction",
)


def made_of(tmp_path, settings):
    given = (f"{key}={json.dumps(value)}" for key, value in (SMALL | settings).items())
    made = imported(tmp_path, "{}", *given)
    assert made.problem is None, made.problem
    return made


VALUES = [
    # A ratio is never below 0, so a bound below that is none.
    ({f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 10.0}, {"algorithm.clip_low": 1.0}),
    ({f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_neg": 1.2},
     {"algorithm.sapo_temperature_neg": 1.2, "algorithm.aggregation": "sequence_mean"}),
    ({f"{ACTOR}.policy_loss.loss_mode": "geo_mean", f"{ACTOR}.clip_ratio_low": 0.4},
     {"algorithm.surrogate": "geo_mean", "algorithm.aggregation": "sequence_mean", "algorithm.clip_low": 0.4}),
    ({f"{ACTOR}.policy_loss.loss_mode": "dppo_kl", f"{ACTOR}.clip_ratio_high": 0.05, f"{ACTOR}.clip_ratio_c": 20.0},
     {"algorithm.surrogate": "dppo_kl", "algorithm.clip_high": 0.05, "algorithm.dual_clip": 20.0}),
    # clip_ratio stands for an end that is null, and verl's own config has 0.2 for both.
    ({f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.clip_ratio_low": None, f"{ACTOR}.clip_ratio_high": None},
     {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
    ({f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.clip_ratio_high": 0.3}, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.3}),
    # Corrections under the names of verl 0.6; those that count no weights say nothing.
    ({"algorithm.rollout_is": True, "algorithm.rollout_is_threshold": 3.0, "algorithm.rollout_is_level": "token"},
     {"algorithm.correction": "tis", "algorithm.tis_cap": 3.0}),
    ({"algorithm.rollout_is": True, "algorithm.rollout_is_threshold": 4.0, "algorithm.rollout_is_mode": "mask"},
     {"algorithm.correction": "icepop", "algorithm.icepop_bounds": [0.25, 4.0]}),
    ({"algorithm.rollout_is": False, "algorithm.rollout_is_threshold": 4.0}, {"algorithm.correction": "none"}),
    ({"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["right", "form"]},
     {"algorithm.name": "gdpo", "algorithm.preset": None, "reward.normalise": "each", "algorithm.scale_over": "tokens"}),
    ({f"{ACTOR}.optim.override_optimizer_config": {"eps": 1e-5}}, {"optimizer.eps": 1e-5}),
    ({"actor_rollout_ref.model.lora_adapter_path": "a/lora"}, {"model.lora.r": 16, "model.lora.target_modules": "all-linear"}),
    ({f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_4.0"},
     {"algorithm.correction": "icepop", "algorithm.icepop_bounds": [0.5, 4.0]}),
    ({f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 3.0},
     {"algorithm.correction": "tis", "algorithm.tis_cap": 3.0}),
    ({f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.bypass_mode": True},
     {"algorithm.correction": "none", "algorithm.trust_region": "behaviour", "algorithm.tis_cap": None}),
    # The value of k3 with the gradient of k2 trains as k2.
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "k3+"}, {"algorithm.kl_estimator": "k2"}),
    ({"reward.reward_kwargs.overlong_buffer_cfg": {"enable": True, "len": 200}}, {"algorithm.overlong_from": 800}),
    ({"reward.custom_reward_function": {"path": "lib/score.py", "name": "f"}},
     {"reward.functions": [{"name": "score:f", "signature": "verl"}]}),
    # Further arguments of the function; the penalty of long completions counts from the longest that it knows.
    ({"custom_reward_function": {"path": "lib/score.py", "reward_kwargs": {"scale": 2, "of": {"a": 1}}}},
     {"reward.functions": [{"name": "score:compute_score", "signature": "verl", "options": {"scale": 2, "of": {"a": 1}}}]}),
    ({"reward_model.reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 200}, "max_resp_len": 900}},
     {"algorithm.overlong_from": 700}),
    ({"reward_model": {"reward_manager": "naive", "overlong_buffer": {"enable": True, "len": 200}}},
     {"algorithm.overlong_from": None}),
    # verl's servers draw evaluations at the temperature whatever do_sample says.
    ({f"{ROLLOUT}.val_kwargs": {"temperature": 0.6, "n": 8}}, {"evaluation.temperature": 0.6, "output.eval_samples": 8}),
    ({f"{ROLLOUT}.val_kwargs": {"temperature": 0.6, "n": 8}, f"{ROLLOUT}.name": "hf"},
     {"evaluation.temperature": 0.0, "output.eval_samples": 1}),
    ({f"{ROLLOUT}.repetition_penalty": 1.05, f"{ROLLOUT}.stop": ["END"], f"{ROLLOUT}.min_tokens": 3},
     {"rollout.repetition_penalty": 1.05, "rollout.stop": ["END"], "rollout.min_new_tokens": 3}),
    ({f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp32"}},
     {"model.compute_dtype": "float16"}),
    ({"trainer.experiment_name": 7}, {"output.run_name": "7"}),
    ({"reward.reward_model": {"enable": True, "model_path": "org/judge"}}, {"reward.models": [{"path": "org/judge"}]}),
    ({f"{ACTOR}.fsdp_config": {"model_dtype": "bf16", "ulysses_sequence_parallel_size": 2}},
     {"model.param_dtype": "bfloat16", "model.sequence_parallel": 2}),
    ({f"{ACTOR}.fsdp_config.fsdp_size": 8, "trainer.nnodes": 2}, {"model.replicate": 2}),
    # The name of today, and that of before.
    ({f"{ACTOR}.fsdp_config.strategy": "fsdp2"}, {"model.strategy": "fsdp2"}),
    ({f"{ACTOR}.strategy": "fsdp2"}, {"model.strategy": "fsdp2"}),
    ({"model_engine": "dp"}, {"model.strategy": "fsdp1"}),
    ({f"{ACTOR}.optim": {"clip_grad": 0.5, "optimizer": "AdamW8bit"}, f"{ACTOR}.grad_clip": 1.0},
     {"optimizer.max_grad_norm": 0.5, "optimizer.name": "adamw_8bit"}),
    # The learning rate moves once per step of verl's, here with each of its 2 x 3 updates.
    ({f"{ACTOR}.optim.lr_warmup_steps": 10, f"{ACTOR}.ppo_epochs": 3},
     {"optimizer.warmup_steps": 60, "optimizer.warmup_from_zero": True}),
    ({f"{ACTOR}.optim": {"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.1}},
     {"optimizer.warmup_steps": None, "optimizer.warmup_ratio": None}),
    # Megatron's own names: 0 steps of warm-up leave it to the ratio, the lowest learning rate is no ratio, and adapters
    # are a section, with other names for linear layers.
    ({f"{ACTOR}.strategy": "megatron", f"{ACTOR}.optim": {"lr": 2e-6, "lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.1,
      "lr_decay_style": "linear", "min_lr": 1e-6}},
     {"optimizer.warmup_ratio": 0.1, "optimizer.schedule": "linear", "optimizer.final_ratio": 0.5}),
    ({"actor_rollout_ref.model.lora": {"rank": 16, "alpha": 64, "target_modules": ["linear_qkv", "linear_fc2"]}},
     {"model.lora.r": 16, "model.lora.alpha": 64,
      "model.lora.target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]}),
    ({"actor_rollout_ref.model.lora.rank": 16}, {"model.lora.alpha": 32, "model.lora.target_modules": "all-linear"}),
    # A step is what is trained on between two syncs of weights: 2 x 3 updates of 16 prompts. The rate moves with every 2.
    ({"data.train_batch_size": 0, "data.gen_batch_size": 1, "async_training": {"require_batches": 2,
      "trigger_parameter_sync_step": 3}, "rollout": {"total_rollout_steps": 1000, "test_freq": 4, "nnodes": 2,
      "n_gpus_per_node": 4}, f"{ACTOR}.optim.lr_warmup_steps": 2},
     {"train.prompts_per_step": 96, "algorithm.updates_per_epoch": 6, "train.steps": 11, "output.eval_every": 4,
      "rollout.ahead": 1, "rollout.vllm.replicas": 4, "rollout.sleep": False, "optimizer.warmup_steps": 4,
      "algorithm.trust_region": "behaviour", "rollout.order": "finished"}),
    ({"async_training.staleness_threshold": 1.5}, {"rollout.ahead": 2}),
    ({"async_training": {"staleness_threshold": 0, "compute_prox_log_prob": True}},
     {"rollout.ahead": 0, "algorithm.trust_region": None, "rollout.order": None}),
    ({f"{ROLLOUT}.tensor_model_parallel_size": 1, "rollout.n_gpus_per_node": 2},
     {"rollout.ahead": 1, "rollout.vllm.replicas": 2, "train.prompts_per_step": 32}),
    # The GPUs of training sample, too: an engine on every two of 8.
    ({}, {"rollout.vllm.tensor_parallel_size": 2, "rollout.vllm.replicas": 4}),
    ({"trainer.n_gpus_per_node": 1}, {"rollout.vllm.replicas": 1}),
    ({f"{ROLLOUT}.name": "hf"}, {"rollout.vllm.replicas": None}),
    ({f"{ROLLOUT}.enable_rollout_routing_replay": True}, {"rollout.replay_experts": True}),
    ({"algorithm.adv_estimator": "gae", "critic.model.lora_rank": 8}, {"critic.lora.r": 8}),
    ({"algorithm.gamma": 0.9}, {"algorithm.gamma": None}),  # which verl's GRPO does not read
    ({"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 0.9}, {"algorithm.gamma": 0.9}),
    ({"trainer.test_freq": -1}, {"output.eval_every": 0, "evaluation.sets": None}),
    ({}, {"output.eval_prompts": 2**20, "output.keep": 1_000_000}),
    ({"trainer.max_actor_ckpt_to_keep": 3}, {"output.keep": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), VALUES)
def test_settings_become_what_verl_does_with_them(tmp_path, settings, expected):
    values = made_of(tmp_path, settings).draft.values
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    "settings",
    [
        {f"{CORRECTION}.rollout_is": "sequence"},
        {f"{CORRECTION}.rollout_rs": "token_k1"},
        {f"{ACTOR}.loss_agg_mode": "token-sum"},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 4096},
        {f"{ACTOR}.optim.lr_scheduler_type": "linear"},
        {f"{ACTOR}.optim.lr_decay_style": "cosine", f"{ACTOR}.optim.lr_decay_steps": 500},
        {f"{ACTOR}.optim.lr_decay_style": "WSD"},
        {f"{ACTOR}.optim.optimizer": "Lion"},
        # What is not needed is one thing, what is otherwise here another.
        {f"{ACTOR}.policy_loss.only_reverse_kl_topk": 4},
        {"actor_rollout_ref.model.override_config.max_position_embeddings": 32768},
        {"algorithm.use_pf_ppo": True},
        {"data.shuffle": False},
        {"data.gen_batch_size": 96},
        {"reward_manager.source": "importlib"},
        {"trainer.ref_update_freq": 1},
        {"algorithm.adv_estimator": "gae", "critic.ppo_epochs": 4},
        {"algorithm.adv_estimator": "gae", "critic.optim.lr_warmup_steps_ratio": 0.05},
        {f"{ROLLOUT}.do_sample": False},
        {f"{ROLLOUT}.heat_of_turns": 0.5},
        {f"{ROLLOUT}.quantization": "fp8"},
        {"trainer.spo.enable": True},
        {"reward_model.reward_kwargs.beta": 0.1},
        {f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": "bf16"},
        {f"{ROLLOUT}.multi_turn.enable": True},
        {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.exclude_modules": ".*visual.*"},
        {"data.train_max_samples": 100},
        {"reward.reward_manager.name": "gdpo"},
        {"distillation.enabled": True},
        {"trainer.v1.trainer_mode": "separate_async"},
        {f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff": 0.01},
        {f"{ACTOR}.optim.override_optimizer_config.decoupled_weight_decay": False},
        {f"{ACTOR}.optim.override_optimizer_config.amsgrad": True},
        {f"{ACTOR}.clip_ratio": 0.1},
        {"actor_rollout_ref.model.lora_adapter_path": "a/lora"},
        {
            "algorithm.rollout_is": True,
            "algorithm.rollout_is_threshold": 3.0,
            "algorithm.rollout_is_level": "sequence",
        },
    ],
)
def test_what_has_no_counterpart_is_named(tmp_path, settings):
    last = list(settings)[-1]
    assert any(gap.startswith(f"{last}=") for gap in made_of(tmp_path, settings).draft.gaps)


def test_what_is_switched_off_is_not_missed(tmp_path):
    off = {"actor_rollout_ref.model.mtp": {"enable": False, "method": "x"}, "transfer_queue.enable": False}
    made = made_of(tmp_path, off)
    assert (
        made.draft.gaps == {} and made.draft.unneeded["actor_rollout_ref.model.mtp.method"] == "switched off"
    )


def test_what_says_nothing_is_not_missed(tmp_path):
    said = {
        "actor_rollout_ref.model.override_config": {"attention_dropout": 0.0},
        f"{ACTOR}.optim.override_optimizer_config": {},
        f"{ACTOR}.policy_loss.clip_cov_ratio": 0.1,
        "actor_rollout_ref.rollout.name": "???",
        "algorithm.filter_groups": {"enable": True, "max_num_gen_batches": -1},
        "algorithm.use_pf_ppo": False,
        "critic": {"some": {}, "ppo_epochs": 4},  # GRPO has none
        "data.gen_batch_size": 32,
        "reward_manager": {"source": "register", "name": "naive", "module": {"name": "x"}},
        "algorithm.kl_ctrl.kl_coef": 0.1,
    }
    made = made_of(tmp_path, said)
    assert made.draft.gaps == {}
    assert made.draft.values["rollout.engine"] == "vllm"
    assert made.draft.values["algorithm.dynamic_sampling_rounds"] == 1024
    assert made.draft.unneeded["algorithm.kl_ctrl.kl_coef"] == "the KL is not in the reward"


def test_a_config_that_samples_ahead_has_no_gaps(tmp_path):
    own = {"partial_rollout": True, "staleness_threshold": 0.5, "use_rollout_log_probs": True}
    settings = {
        "async_training": own,
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        "rollout.total_epochs": 3,
    }
    made = made_of(tmp_path, settings)
    assert made.draft.gaps == {} and "algorithm.updates_per_epoch" not in made.draft.to_fill


def test_a_critic_that_is_updated_as_the_policy_is_no_difference(tmp_path):
    same = {"ppo_epochs": 2, "optim": {"lr": 1e-5, "weight_decay": 0.1}}
    policy = {f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.optim.weight_decay": 0.1}
    made = made_of(tmp_path, {"algorithm.adv_estimator": "gae", "critic": same} | policy)
    assert made.draft.gaps == {}


@pytest.mark.parametrize("setting", ["model_engine=megatron", "actor@actor_rollout_ref.actor=lite_actor"])
def test_what_a_script_says_beside_its_sections_is_named(tmp_path, setting):
    text = f"python -m verl.trainer.main_ppo {setting} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    made = imported(tmp_path, text, name="run.sh")
    key, _, value = setting.partition("=")
    assert f"{key}={value!r}" in made.draft.gaps


def test_a_config_of_the_sft_trainer_is_not_taken_for_one_of_rl(tmp_path):
    with pytest.raises(ConfigError, match="of verl's or SkyRL's SFT trainer"):
        imported(
            tmp_path, "{data: {train_files: a}, model: {path: b}, optim: {lr: 1}, trainer: {total_epochs: 2}}"
        )
    with pytest.raises(ConfigError, match="of verl's or SkyRL's SFT trainer"):
        imported(tmp_path, "{model: {path: b}, placement: {num_nodes: 1}, max_length: 4096, seed: 1}")
