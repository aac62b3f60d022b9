"""Facts about model families, as data."""

from __future__ import annotations

from transformers import PretrainedConfig

from shardproof.errors import fail


def num_attention_heads(config: PretrainedConfig) -> int | None:
    """How many query heads the text model has; None for a family without attention heads."""
    text = config.get_text_config()
    return getattr(text, "num_attention_heads", None)


def check_sequence_parallel(config: PretrainedConfig, size: int, shard_size: int) -> None:
    """Raise unless sequences of this model can be split over groups of `size` ranks."""
    if size == 1:
        return
    heads = num_attention_heads(config)
    if size < 1 or shard_size % size:
        raise fail(
            "C001",
            "settings",
            f"sequence_parallel={size} does not divide the shard axis of {shard_size} ranks.",
        )
    if not heads or heads % size:
        raise fail(
            "C001", "settings", f"sequence_parallel={size} does not divide the {heads} attention heads."
        )
    raise fail("C001", "settings", f"sequence_parallel={size}: sequence parallelism is not available yet.")
