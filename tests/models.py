"""Tiny real Hugging Face models: the smallest config of each family that keeps what makes the family special."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma3_text",
    "phi3",
    "gpt_oss",
    "deepseek_v3",
    "olmo2",
    "glm4_moe",
    "granitemoe",
)
EXTRA_FAMILIES = (
    "llama_tied",
    "qwen3_tied",
    "gemma2",
    "cohere",
    "mistral",
    "qwen2_moe",
    "olmoe",
    "gpt2",
    "gpt_neox",
)

# The vocabulary is prime, so that no number of ranks divides its rows.
_TOKENS = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BASE = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}

# What a family needs beyond _BASE. A value that is 1 or None by default in a multiplier, a cap or a window is set, so
# that code which forgets it computes something else.
_SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
    "mistral": {"head_dim": 16, "sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_tied": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
    },
    "phi3": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 3.0, 4.0],
        },
    },
    "gpt_oss": {
        "head_dim": 16,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {**_YARN_ROPE, "truncate": False},
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        # Latent attention expands to one key-value head per attention head.
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "rope_parameters": {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm4_moe": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
    },
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "gpt_neox": {},
    "gpt2": {},
}
_GPT2 = {
    **_TOKENS,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The family's config at a size that builds in milliseconds; `overrides` are config fields."""
    if family not in _SPECIAL:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(sorted(_SPECIAL))}")
    base = _GPT2 if family == "gpt2" else _BASE
    return AutoConfig.for_model(family.removesuffix("_tied"), **{**base, **_SPECIAL[family], **overrides})


def make_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A tiny model in eval mode in which no parameter and no persistent buffer is trivially ones or zeros."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in _stored_tensors(model).items():
        noise = 0.1 * torch.randn(tensor.shape, generator=generator)
        # Norm weights, biases and the like stay near the value their module is built around.
        center = tensor.float() if tensor.ndim < 2 or "norm" in name else 0.0
        tensor.copy_(center + noise)
    return model.eval()


def make_checkpoint(
    folder: str | Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "40KB",
    **overrides: Any,
) -> Path:
    """The folder, now holding the tiny model as published checkpoints of its family do.

    The default shard size splits every float32 checkpoint over several files with an index.
    """
    model = make_model(family, dtype=dtype, seed=seed, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


def _stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    # keep_vars gives the parameters themselves, so that a tied tensor, which has two names, is found and written once.
    seen: set[int] = set()
    stored = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            stored[name] = tensor.detach()
    return stored
