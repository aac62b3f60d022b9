"""The section about completions: which engine makes them, and how they are sampled."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from shardproof.config.numbers import MAX_TOKENS, Bound, Count, Limit, Tokens
from shardproof.config.section import Section, known_or_users, read_none
from shardproof.config.vllm import VllmSettings

ENGINES = ("embedded", "sharded", "vllm")
# What makes engines draw from something else than what the model says at the temperature.
SHAPING = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens",
)  # fmt: skip
RowOverride = Literal[
    "max_new_tokens", "min_new_tokens", "stop", "stop_ids", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty",
]  # fmt: skip


class Rollout(Section):
    """How completions are sampled from the policy."""

    engine: str = "embedded"
    """What samples completions: `"embedded"` (a copy of the model in each rank's process), `"sharded"` (the
    FSDP model itself, for models whose copy does not fit), `"vllm"`, or your own class as `module:name`."""
    group_size: Count = 8
    """Completions per prompt. GRPO and other algorithms that compare completions of one prompt need at least
    2."""
    max_new_tokens: Tokens = 256
    """Longest completion, in tokens; in a conversation, the longest turn."""
    temperature: Annotated[float, Bound(gt=0.0, le=100.0)] = 1.0
    """Sampling temperature. All log-probs of the training step use it too. vLLM takes 0.01 to 2."""
    top_p: Annotated[float, Bound(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: draw only from the most likely tokens whose probabilities add up to this. 1 disables
    it. See docs/sampling.md for the order of all settings, and for what is trained."""
    top_k: Annotated[int, Bound(ge=0, le=2**30)] = 0
    """Draw only from this many of the most likely tokens. 0 disables it."""
    min_p: Annotated[float, Bound(ge=0.0, le=1.0)] = 0.0
    """Draw only tokens that are at least this share as likely as the most likely one. 0 disables it."""
    repetition_penalty: Annotated[float, Bound(ge=0.01, le=100.0)] = 1.0
    """Makes tokens of the prompt and of the completion so far less likely: their logits are divided by it, or
    multiplied where they are below 0. 1 disables it."""
    presence_penalty: Annotated[float, Bound(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from the logits of tokens that the completion has already. 0 disables it."""
    frequency_penalty: Annotated[float, Bound(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from the logits of tokens once for each time that the completion has them. 0 disables it."""
    min_new_tokens: Annotated[int, Bound(ge=0, le=MAX_TOKENS)] = 0
    """Tokens before which a completion does not end: stop ids cannot be drawn, and stop strings do not count.
    """
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion, as the token that completes one of them is drawn. That token is trained
    on, as all others."""
    stop_ids: list[Annotated[int, Bound(ge=0, lt=2**31)]] = Field(default_factory=list)
    """Token ids that end a completion, beside those that tokenizer and generation config name."""
    include_stop: bool = True
    """Whether the text that rewards read has the stop string at its end."""
    row_overrides: list[RowOverride] = Field(default_factory=list)
    """Settings that rows of the data may have of their own, in a column `sampling` such as
    `{"stop": ["\\n\\n"], "max_new_tokens": 64}`. By default none: the column is then like any other."""
    batch_size: Count = 256
    """Completions that each rank decodes at a time. Lower it if sampling runs out of memory; results do not
    change. With vLLM, each server has up to twice as many requests of a rank."""
    cache_gib: Annotated[float, Bound(ge=0.0, le=2.0**20)] = 4.0
    """Most GiB per rank in which the embedded engine keeps the keys and values of conversations between their
    turns, so that a turn reads only what is new. Conversations that find no room are read again from their
    start. 0 keeps none. Used only with an environment, and freed before each update. vLLM has a cache of its
    own."""
    kv_cache_gib: Annotated[float, Bound(gt=0.0, le=2.0**20)] | None = None
    """Most GiB per rank for the keys and values of completions that the embedded engine is decoding on CUDA.
    Completions for which there is no room wait, so less memory is slower and nothing else. By default as much
    as `batch_size` completions of `max_new_tokens` need, but no more than half of the free memory."""
    exact: bool = False
    """Sample with the embedded engine so that its log-probs equal the trainer's bit for bit, and check that at
    every step. Slower: see docs/exact.md."""
    fp8: Literal["off", "weights", "weights_and_cache"] = "off"
    """Hold the embedded engine's weights, or its weights and its KV cache, in 8-bit floating point with a scale
    per block. The trainer's weights stay as they are; see docs/fp8.md for the mismatch and its correction."""
    offload_policy: bool = False
    """Move the policy to host memory while completions are sampled, to leave the GPU to the engine."""
    sleep: bool | None = None
    """Free the engine's weights and KV cache while the policy is updated. By default the embedded engine does
    so on CUDA where that costs a few milliseconds (not with `fp8`), and a vLLM server does not. vLLM can on
    CUDA, in a server that the run starts."""
    canary_tolerance: Limit | None = None
    """How far the log-probs of engine and trainer may differ on the canary, a fixed prompt scored by both
    after each weight sync. By default 0.001 if `model.compute_dtype` is float32, else 0.5; 0
    with `exact`."""
    ahead: Annotated[int, Bound(ge=0, le=64)] = 0
    """How many steps sampling may run ahead of training. 0: each step samples with the newest weights and
    waits for it. With k, a step trains on tokens that were drawn with weights up to k steps old. See
    docs/running-ahead.md."""
    order: Literal["drawn", "finished"] = "drawn"
    """Which prompts a step trains on when sampling runs ahead: those that were drawn first (the order depends
    on the seed alone), or those whose completions are finished first (no step waits for a long completion)."""
    too_old: Literal["finish", "drop"] = "finish"
    """With `order = "finished"`: what happens to prompts whose completions are not finished when they may not
    get older. `"finish"`: the step waits for them. `"drop"`: they are given up, counted and replaced."""
    replay_experts: bool = False
    """Mixture of experts: record which experts the engine chose for each token, and use the same experts in
    the update (routing replay). See docs/routing-replay.md."""
    vllm: Annotated[VllmSettings, BeforeValidator(partial(read_none, VllmSettings))] = VllmSettings()
    """Settings of the vLLM server, for `engine = "vllm"`."""

    @property
    def is_whole(self) -> bool:
        """Whether all completions are drawn from all that the model says, at the temperature."""
        own = {key: type(self).model_fields[key].default for key in SHAPING}
        return all(getattr(self, key) == value for key, value in own.items()) and not (
            set(self.row_overrides) & set(SHAPING)
        )

    @property
    def shaped_by(self) -> str:
        """The first setting because of which they are not, as a recipe writes it."""
        for key in SHAPING:
            if getattr(self, key) != type(self).model_fields[key].default:
                return f"rollout.{key}={getattr(self, key)}"
        return f"rollout.row_overrides={[key for key in self.row_overrides if key in SHAPING]}"

    @field_validator("engine")
    @classmethod
    def _is_known(cls, engine: str) -> str:
        return known_or_users(engine, ENGINES)

    @field_validator("stop")
    @classmethod
    def _is_text(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("an empty string would end every completion at once; remove it")
        return stop
