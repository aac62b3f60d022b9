"""Settings of shardproof, and what TRL's config has for the same."""

from __future__ import annotations

from typing import Any

_TRL = {"preset": "trl"}
_SEQUENCE = {"importance_sampling_level": "sequence"}

# {case: (keys of [algorithm], options of TRL)}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"name": "grpo", **_TRL}, {"loss_type": "grpo"}),
    "grpo, clip higher": (
        {"name": "grpo", **_TRL, "clip_high": 0.28},
        {"loss_type": "grpo", "epsilon_high": 0.28},
    ),
    "grpo, KL": ({"name": "grpo", **_TRL, "kl_coef": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    "grpo, KL as it is": (
        {"name": "grpo", **_TRL, "kl_coef": 0.3, "kl_ratio_correction": False},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "delta": ({"name": "grpo", **_TRL, "dual_clip": 1.4}, {"loss_type": "grpo", "delta": 1.4}),
    "scale_rewards batch": (
        {"name": "grpo", **_TRL, "scale_over": "batch"},
        {"loss_type": "grpo", "scale_rewards": "batch"},
    ),
    "scale_rewards none": (
        {"name": "grpo", **_TRL, "scale": "off"},
        {"loss_type": "grpo", "scale_rewards": "none"},
    ),
    "bnpo": ({"name": "grpo", **_TRL, "aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    "dr_grpo": ({"name": "dr_grpo", **_TRL}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": ({"name": "dapo", **_TRL}, {"loss_type": "dapo"}),
    "dapo, masked": (
        {"name": "dapo", **_TRL, "overlong": "mask"},
        {"loss_type": "dapo", "mask_truncated_completions": True},
    ),
    "cispo, masked": (
        {"name": "cispo", **_TRL, "overlong": "mask", "kl_coef": 0.3},
        {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.3, "mask_truncated_completions": True},
    ),
    "dapo, entropy": (
        {"name": "dapo", **_TRL, "entropy_coef": 0.2},
        {"loss_type": "dapo", "entropy_coef": 0.2},
    ),
    "gspo": (
        {"name": "gspo", **_TRL},
        {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, **_SEQUENCE},
    ),
    "gspo, KL, delta": (
        {"name": "gspo", **_TRL, "clip_low": 0.1, "clip_high": 0.1, "kl_coef": 0.3, "dual_clip": 1.2},
        {"loss_type": "grpo", "epsilon": 0.1, "beta": 0.3, "delta": 1.2, **_SEQUENCE},
    ),
    "cispo": ({"name": "cispo", **_TRL}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo, lower bound": (
        {"name": "cispo", **_TRL, "clip_high": 0.28},
        {"loss_type": "cispo", "epsilon_high": 1.28},
    ),
    "cispo, one ratio per sequence": (
        {"name": "cispo", **_TRL, "clip_high": 0.1, "ratio": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 1.1, **_SEQUENCE},
    ),
    "sapo": ({"name": "sapo", **_TRL}, {"loss_type": "sapo"}),
    "sapo, other temperatures": (
        {"name": "sapo", **_TRL, "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    ),
    "vespo": ({"name": "vespo", **_TRL, "kl_coef": 0.3}, {"loss_type": "vespo", "beta": 0.3}),
    "vespo, other weights": (
        {"name": "vespo", **_TRL, "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_lambda_neg": 1.5},
        {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_lambda_neg": 1.5},
    ),
    "top_entropy_quantile": (
        {"name": "grpo", **_TRL, "entropy_share": 0.3, "kl_coef": 0.3},
        {"loss_type": "grpo", "top_entropy_quantile": 0.3, "beta": 0.3},
    ),
    "top_entropy_quantile, masked": (
        {"name": "dapo", **_TRL, "entropy_share": 0.5, "overlong": "mask"},
        {"loss_type": "dapo", "top_entropy_quantile": 0.5, "mask_truncated_completions": True},
    ),
    "off_policy_mask": (
        {"name": "grpo", **_TRL, "off_policy_limit": 0.05, "kl_coef": 0.3},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05, "beta": 0.3},
    ),
    "vLLM, vespo": (
        {"name": "vespo", **_TRL, "trust_region": "behaviour", "rollout": True},
        {
            "loss_type": "vespo",
            "use_vllm": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1e6,
        },
    ),
    "vLLM, off_policy_mask": (
        {
            "name": "dapo",
            **_TRL,
            "off_policy_limit": 0.1,
            "correction": "tis",
            "tis_cap": 3.0,
            "rollout": True,
        },
        {
            "loss_type": "dapo",
            "off_policy_mask_threshold": 0.1,
            "use_vllm": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 3.0,
        },
    ),
    "luspo": ({"name": "luspo", **_TRL}, {"loss_type": "luspo", **_SEQUENCE}),
    "luspo, one ratio per token": (
        {"name": "luspo", **_TRL, "ratio": "token", "kl_coef": 0.1},
        {"loss_type": "luspo", "beta": 0.1},
    ),
    "vLLM, token_truncate": (
        {"name": "grpo", **_TRL, "correction": "tis", "tis_cap": 1.1, "rollout": True},
        {
            "loss_type": "grpo",
            "use_vllm": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.1,
        },
    ),
    "vLLM, sequence_mask": (
        {"name": "dapo", **_TRL, "correction": "mis", "mis_cap": 1.2, "rollout": True},
        {
            "loss_type": "dapo",
            "use_vllm": True,
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_max": 1.2,
        },
    ),
    "rloo": ({"name": "rloo", **_TRL}, {"rloo": True, "beta": 0.05}),
    "rloo without KL": ({"name": "rloo", **_TRL, "kl_coef": 0.0}, {"rloo": True}),
    "rloo normalised": (
        {"name": "rloo", **_TRL, "scale": "sample", "scale_over": "advantages", "kl_coef": 0.0},
        {"rloo": True, "normalize_advantages": True},
    ),
}
