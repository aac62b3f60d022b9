"""Facts about model families, as data: what their configs call things, and what follows for scoring and sharding."""

from __future__ import annotations

from transformers import PretrainedConfig

from shardproof.errors import fail

# What configs call the number of routed experts, and the number that one token uses.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
# What configs call the largest position.
_MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")
# Layer types that mix tokens by other means than attention: packed sequences would flow into each other.
_STATE_SPACE = {"mamba", "linear_attention", "conv", "recurrent", "hybrid", "mlstm", "rwkv", "linear"}
_STATE_SPACE_FIELDS = (
    "mamba_d_state",
    "ssm_state_size",
    "mamba_expand",
    "state_size",
    "conv_L_cache",
    "lru_width",
)
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
# Rotary embeddings that forward recomputes from the largest position it meets.
MOVING_ROPE = {"dynamic", "longrope"}


def _first(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    text = config.get_text_config()
    for name in names:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def num_experts(config: PretrainedConfig) -> int | None:
    """How many routed experts a layer has; None for a model without a router."""
    count = _first(config, _NUM_EXPERTS)
    return count if count is not None and count > 1 else None


def experts_per_token(config: PretrainedConfig) -> int | None:
    return _first(config, _EXPERTS_PER_TOKEN)


def num_attention_heads(config: PretrainedConfig) -> int | None:
    """How many query heads the text model has; None for a family without attention heads."""
    return _first(config, ("num_attention_heads", "n_head", "n_heads"))


def max_positions(config: PretrainedConfig) -> int | None:
    return _first(config, _MAX_POSITIONS)


def why_not_packed(config: PretrainedConfig) -> str | None:
    """Why sequences of this family must not be laid end to end; None if they may."""
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or [])
    if layer_types & _STATE_SPACE or any(getattr(text, name, None) for name in _STATE_SPACE_FIELDS):
        return "its layers carry state from token to token"
    if getattr(text, "attention_chunk_size", None) or "chunked_attention" in layer_types:
        return "its attention is restricted to chunks"
    if any((getattr(text, name, None) or 0.0) > 0.0 for name in _ATTENTION_DROPOUT):
        return "its attention uses dropout, which packed attention does not support"
    if rope_types(config) & MOVING_ROPE:
        return "its rotary embedding depends on the longest position in the batch"
    return None


def rope_types(config: PretrainedConfig) -> set[str]:
    """The kinds of rotary embedding a config names, over all of its layer types."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {v.get("rope_type") for v in rope.values() if isinstance(v, dict)}
    return {str(kind) for kind in kinds if kind}


def check_sequence_parallel(config: PretrainedConfig, size: int, shard_size: int) -> None:
    """Raise unless sequences of this model can be split over groups of `size` ranks."""
    if size == 1:
        return
    stage = "settings"
    if size < 1 or shard_size % size:
        message = f"sequence_parallel={size} does not divide the shard axis of {shard_size} ranks."
        raise fail(
            "C001",
            stage,
            message,
            fix=f"use a number that divides {shard_size}, or change the number of ranks",
        )
    heads = num_attention_heads(config)
    if not heads or heads % size:
        message = f"sequence_parallel={size} does not divide the {heads} attention heads."
        raise fail("C001", stage, message, fix=f"use a number that divides {heads}, or 1")
    reason = why_not_packed(config)
    if reason is not None:
        raise fail("C001", stage, f"sequence_parallel={size} cannot split {config.model_type!r}: {reason}.")
