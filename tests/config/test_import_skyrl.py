"""SkyRL's settings of today and of before become what SkyRL does with them."""

from __future__ import annotations

import json

import pytest

from tests.config.test_import_config import imported, recipe_of

SMALL = {
    "data.train_data": ["a.parquet"],
    "data.val_data": ["b.parquet", "c.parquet"],
    "trainer.max_training_steps": 20,
}


def made_of(tmp_path, **settings):
    given = SMALL | {key.replace("__", "."): value for key, value in settings.items()}
    made = imported(
        tmp_path, "{}", *(f"{key}={json.dumps(value)}" for key, value in given.items()), library="skyrl"
    )
    assert made.problem is None, made.problem
    return made


ALGORITHM, OFF_POLICY = "trainer__algorithm__", "trainer__algorithm__off_policy_correction__"
ENGINE, EVALUATED = "generator__inference_engine__", "generator__eval_sampling_params__"
VALUES = [
    # Today 'fsdp' is what was 'fsdp2'; engines have a section of their own.
    ({"trainer__strategy": "fsdp", f"{ENGINE}num_engines": 4, f"{ENGINE}gpu_memory_utilization": 0.6},
     {"model.strategy": "fsdp2", "rollout.vllm.replicas": 4, "rollout.vllm.gpu_memory_utilization": 0.6,
      "rollout.vllm.tensor_parallel_size": 1, "train.ranks": 1}),
    ({"trainer__strategy": "fsdp", "generator__num_inference_engines": 2},
     {"model.strategy": "fsdp1", "rollout.vllm.replicas": 2, "rollout.vllm.tensor_parallel_size": 4, "train.ranks": 4}),
    ({f"{ENGINE}run_engines_locally": False, f"{ENGINE}external_server_urls": ["h:1"]}, {"rollout.vllm.url": ["http://h:1"]}),
    ({f"{ENGINE}engine_init_kwargs__max_model_len": 99}, {"rollout.vllm.max_model_len": 99}),
    ({"generator__sampling_params__additional_kwargs": {"repetition_penalty": 1.05, "stop_token_ids": [7], "min_tokens": 2}},
     {"rollout.repetition_penalty": 1.05, "rollout.stop_ids": [7], "rollout.min_new_tokens": 2}),
    ({"generator__engine_init_kwargs__max_model_len": 99}, {"rollout.vllm.max_model_len": 99}),
    # Each loss has settings of its own.
    ({f"{ALGORITHM}policy_loss_type": "cispo"}, {"algorithm.clip_low": 1.0, "algorithm.clip_high": 4.0}),
    ({f"{ALGORITHM}policy_loss_type": "sapo", f"{ALGORITHM}sapo__tau_neg": 1.2}, {"algorithm.sapo_temperature_neg": 1.2}),
    ({f"{ALGORITHM}policy_loss_type": "cispo", f"{ALGORITHM}cispo__cispo_anchor": "rollout"},
     {"algorithm.trust_region": "behaviour", "algorithm.correction": "none"}),
    ({f"{ALGORITHM}policy_loss_type": "dppo", f"{ALGORITHM}eps_clip_low": 0.1, f"{ALGORITHM}dppo__delta_high": 0.3},
     {"algorithm.surrogate": "dppo_tv", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.3,
      "algorithm.trust_region": "behaviour"}),
    ({f"{ALGORITHM}policy_loss_type": "dppo", f"{ALGORITHM}dppo__dppo_type": "binary_kl"},
     {"algorithm.surrogate": "dppo_kl"}),
    ({f"{ALGORITHM}policy_loss_type": "kl_cov"}, {"algorithm.cov_ratio": 0.2, "algorithm.cov_kl_coef": 1.0}),
    ({f"{ALGORITHM}policy_loss_type": "clip_cov"}, {"algorithm.cov_ratio": 2e-4, "algorithm.cov_bounds": [1.0, 5.0]}),
    ({f"{OFF_POLICY}tis_ratio_type": "token", f"{OFF_POLICY}token_tis_ratio_clip_high": 3.0},
     {"algorithm.correction": "tis", "algorithm.tis_cap": 3.0}),
    ({f"{OFF_POLICY}tis_ratio_type": "token", f"{OFF_POLICY}token_mask_is_threshold_low": 0.5,
      f"{OFF_POLICY}token_mask_is_threshold_high": 2.0},
     {"algorithm.correction": "icepop", "algorithm.icepop_bounds": [0.5, 2.0]}),
    ({"generator__apply_overlong_filtering": True}, {"algorithm.overlong": "mask"}),
    ({f"{ALGORITHM}overlong_buffer_len": 24}, {"algorithm.overlong_from": 1000, "algorithm.overlong": "penalty"}),
    # The same under its name of before.
    ({f"{ALGORITHM}overlong_buffer__len": 24, f"{ALGORITHM}overlong_buffer__penalty_factor": 1.0},
     {"algorithm.overlong_from": 1000, "algorithm.overlong": "penalty"}),
    ({"trainer__policy__fsdp_config__fsdp_size": 4, "trainer__placement__policy_num_gpus_per_node": 8,
      "trainer__policy__fsdp_config__reshard_after_forward": False},
     {"model.replicate": 2, "model.reshard_after_forward": False}),
    ({f"{ALGORITHM}use_kl_in_reward": True, f"{ALGORITHM}kl_ctrl__type": "adaptive"},
     {"algorithm.kl_in": "reward", "algorithm.kl_target": 0.1, "algorithm.kl_horizon": 10000}),
    ({f"{ALGORITHM}advantage_estimator": "gae", "trainer__critic__model__lora__rank": 8}, {"critic.lora.r": 8}),
    ({f"{ALGORITHM}gamma": 0.9}, {"algorithm.gamma": None}),
    ({}, {"algorithm.scale": "sample", "algorithm.scale_eps": 1e-6, "data.too_long": "drop", "train.steps": 20,
          "output.keep": 1_000_000}),
    # What is normalised over the batch is divided by its deviation, whether the estimator divides by one or not.
    ({f"{ALGORITHM}advantage_estimator": "rloo", f"{ALGORITHM}advantage_batch_normalize": True},
     {"algorithm.scale": "population", "algorithm.scale_over": "tokens"}),
    ({f"{ALGORITHM}grpo_norm_by_std": False, f"{ALGORITHM}advantage_batch_normalize": True},
     {"algorithm.scale": "population", "algorithm.scale_over": "tokens"}),
    ({f"{ALGORITHM}grpo_norm_by_std": False}, {"algorithm.scale": "off", "algorithm.scale_eps": None}),
    # transformers' warm-up begins at 0; 'constant' has none.
    ({"trainer__policy__optimizer_config__num_warmup_steps": 7}, {"optimizer.warmup_steps": 7, "optimizer.warmup_from_zero": True}),
    ({"trainer__policy__optimizer_config__scheduler": "cosine"}, {"optimizer.schedule": "cosine"}),
    # Before engines had a section of their own, what is not said about evaluations was greedy, and as long as in training.
    ({"generator__num_inference_engines": 2, f"{EVALUATED}top_p": 0.7, "generator__eval_n_samples_per_prompt": 4,
      "generator__sampling_params__max_generate_length": 64},
     {"evaluation.temperature": 0.0, "evaluation.max_new_tokens": 64, "output.eval_samples": 1}),
    # Evaluations are greedy, and where anything is said about them the rest is as in training by default.
    ({"generator__eval_n_samples_per_prompt": 4}, {"evaluation.temperature": 0.0, "output.eval_samples": 1}),
    ({"generator__eval_n_samples_per_prompt": 4, f"{EVALUATED}top_p": 0.7},
     {"evaluation.temperature": 1.0, "evaluation.top_p": 0.7, "evaluation.max_new_tokens": 1024, "output.eval_samples": 4}),
    ({"generator__sampling_params__top_k": 20, "generator__sampling_params__min_p": 0.1, f"{EVALUATED}top_p": 0.7},
     {"rollout.top_k": 20, "rollout.min_p": 0.1, "evaluation.top_k": 0, "evaluation.min_p": 0}),
    ({"generator__sampling_params__top_k": 20, f"{EVALUATED}top_k": 20, f"{EVALUATED}min_p": 0.2},
     {"evaluation.top_k": None, "evaluation.min_p": 0.2}),
    ({"generator__sampling_params__top_k": 20}, {"evaluation.temperature": 0.0, "evaluation.top_k": None}),
    ({f"{ALGORITHM}gamma": 0.9}, {"algorithm.gamma": None}),
    ({f"{ALGORITHM}advantage_estimator": "gae", f"{ALGORITHM}gamma": 0.9}, {"algorithm.gamma": 0.9}),
    ({"trainer__eval_interval": -1}, {"output.eval_every": 0, "evaluation.sets": None}),
    ({"trainer__fully_async__enabled": True}, {"rollout.ahead": 4, "rollout.order": "finished"}),
    ({"trainer__max_tokens_per_microbatch": 4096}, {"train.micro_batch_tokens": 4096}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), VALUES)
def test_settings_become_what_skyrl_does_with_them(tmp_path, settings, expected):
    values = made_of(tmp_path, **settings).draft.values
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    "settings",
    [
        {f"{OFF_POLICY}sequence_mask_metric": "geometric"},
        {f"{OFF_POLICY}tis_ratio_type": "sequence"},
        {f"{ALGORITHM}loss_reduction": "prompt_mean"},
        {f"{ALGORITHM}zero_variance_filter": True},
        {f"{ALGORITHM}advantage_batch_normalize": True},  # after the division by the group's deviation
        {f"{ALGORITHM}loss_reduction": "seq_mean_token_sum_norm", f"{ALGORITHM}max_seq_len": 4096},
        {"generator__step_wise_trajectories": True},
        {"generator__sampling_params__additional_kwargs__seed": 3},
        {"trainer__policy__model__lora__rank": 8, "trainer__policy__model__lora__exclude_modules": "lm_head"},
        {"trainer__policy__optimizer_config__scheduler": "polynomial"},
        {"trainer__strategy": "megatron"},
        {f"{ALGORITHM}overlong_buffer__len": 24, f"{ALGORITHM}overlong_buffer__penalty_factor": 0.5},
        {f"{ALGORITHM}advantage_estimator": "gae", "trainer__critic__optimizer_config__num_warmup_steps": 5},
        {f"{ALGORITHM}advantage_estimator": "gae", "trainer__critic_mini_batch_size": 64},
        {"trainer__fully_async__sample_full_batch": True},
    ],
)
def test_what_has_no_counterpart_is_named(tmp_path, settings):
    last = list(settings)[-1].replace("__", ".")
    assert any(gap.startswith(f"{last}=") for gap in made_of(tmp_path, **settings).draft.gaps)


def test_what_says_nothing_is_not_missed(tmp_path):
    settings = {
        "trainer__policy__model_config_kwargs": {},
        "generator__chat_template": {"source": "name", "name_or_path": None},
        f"{ALGORITHM}use_kl_loss": False,
        f"{ALGORITHM}kl_loss_coef": 0.01,
        "trainer__critic__optimizer_config__scheduler": "linear",  # GRPO has no critic
    }
    assert made_of(tmp_path, **settings).draft.gaps == {}


def test_every_advantage_and_loss_of_skyrl_makes_a_recipe(tmp_path):
    losses = ["regular", "dual_clip", "gspo", "clip_cov", "kl_cov", "cispo", "sapo", "dppo"]
    for name in ("grpo", "gae", "rloo", "reinforce++"):
        for loss in losses:
            settings = {f"{ALGORITHM}advantage_estimator": name, f"{ALGORITHM}policy_loss_type": loss}
            recipe_of(tmp_path, made_of(tmp_path, **settings))
