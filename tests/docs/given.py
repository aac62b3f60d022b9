"""What pages may use without making it: `<!-- given: policy, optimizer -->`. Tiny, and made when a page asks for it."""

from __future__ import annotations

from typing import Any


def config(_: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )


def source(made: dict[str, Any]) -> Any:
    import shardproof as sp

    return sp.RandomInit(give(made, "config"), seed=0)


def folder(_: dict[str, Any]) -> str:
    return "recipes/tiny/model"


def policy(made: dict[str, Any]) -> Any:
    import shardproof as sp

    return sp.load(give(made, "source"), progress=False)


def lora_policy(made: dict[str, Any]) -> Any:
    import peft

    import shardproof as sp

    settings = peft.LoraConfig(r=4, target_modules="all-linear")
    return sp.load(give(made, "source"), lora=settings, progress=False)


def critic(made: dict[str, Any]) -> Any:
    import shardproof as sp

    return sp.load(give(made, "source"), role="critic", progress=False)


def sequences(_: dict[str, Any]) -> Any:
    return [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6]]


def masks(made: dict[str, Any]) -> Any:
    return [[0.0] + [1.0] * (len(tokens) - 2) for tokens in give(made, "sequences")]


def old(made: dict[str, Any]) -> Any:
    import shardproof as sp

    return sp.logprobs(give(made, "policy"), give(made, "sequences"))


def batch(made: dict[str, Any]) -> Any:
    import shardproof as sp

    columns = {"advantages": [1.0, -0.5], "old_logps": give(made, "old")}
    return sp.weigh(sp.Batch(give(made, "sequences"), **columns), "sequence_mean")


def optimizer(made: dict[str, Any]) -> Any:
    import shardproof as sp

    return sp.make_optimizer(give(made, "policy"), lr=1e-4)


def scheduler(made: dict[str, Any]) -> Any:
    import shardproof as sp

    return sp.make_schedule(give(made, "optimizer"))


def model(_: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("recipes/tiny/model")


def sp(_: dict[str, Any]) -> Any:
    import shardproof

    return shardproof


def torch(_: dict[str, Any]) -> Any:
    import torch as module

    return module


def give(made: dict[str, Any], name: str) -> Any:
    """The thing of this name, made at the first time that it is asked for."""
    if name not in made:
        made[name] = globals()[name](made)
    return made[name]
