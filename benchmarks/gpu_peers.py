"""What benchmarks/gpu.py measures of TRL and transformers. Each function runs in a process of its own."""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from typing import Any

import torch

from benchmarks.gpu_timing import Row, decode_row, peak_bytes, synchronize, update_row
from benchmarks.gpu_workload import (
    LR,
    characters,
    decode_prompts,
    dense_config,
    make_tokenizer,
    sequences,
    text_prompts,
)

BATCHING = "transformers, continuous batching"
SFT, SFT_TUNED = "TRL SFTTrainer", "TRL SFTTrainer, tuned"
GRPO = "TRL GRPOTrainer"
_WARM_TOKENS = 8


def plain_model(dtype: torch.dtype, options: argparse.Namespace) -> Any:
    """The dense model as transformers makes it, with random weights."""
    from transformers import AutoModelForCausalLM

    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(dense_config(options.tiny), dtype=dtype)


def decode_transformers(options: argparse.Namespace) -> dict[str, Row]:
    """Continuous batching with a cache that holds every row; its manager is kept between calls."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = plain_model(torch.bfloat16, options).eval()
    if not any(map(importlib.util.find_spec, ("flash_attn", "flash_attn_interface"))):
        # Otherwise a kernel from the hub is asked for where the `kernels` library is installed.
        model.set_attn_implementation("paged|sdpa")
    prompts = decode_prompts(options)
    generation = GenerationConfig(
        max_new_tokens=options.steps, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    blocks = 2 * options.rows * (-(-(options.prompt + options.steps) // 256) + 1)
    batching = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=options.rows * options.prompt)

    def generate(num: int) -> None:
        found = model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            max_new_tokens=num,
            persistent_manager=True,
        )
        lengths = [len(each.generated_tokens) for each in found.values()]
        errors = {each.error for each in found.values()}
        assert lengths == [num] * options.rows, (lengths, errors)

    generate(min(_WARM_TOKENS, options.steps))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    row = decode_row(generate, options.steps, num_bytes, options.device, warm=True)
    model.destroy_cached_continuous_batching_manager()
    return {BATCHING: row}


def sft_trl(options: argparse.Namespace) -> dict[str, Row]:
    """SFTTrainer with TRL's defaults: activations are computed again in the backward pass."""
    return {SFT: _sft_row(options, {})}


def sft_trl_tuned(options: argparse.Namespace) -> dict[str, Row]:
    """SFTTrainer as fast as it gets without flash-attn: activations are kept, batches are of similar lengths."""
    faster = {"gradient_checkpointing": False, "train_sampling_strategy": "group_by_length"}
    return {SFT_TUNED: _sft_row(options, faster)}


def _sft_row(options: argparse.Namespace, settings: dict[str, Any]) -> Row:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = sequences(options)
    tokens = sum(map(len, rows))
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            **_trainer_settings(folder, 1 + options.repeats, options),
            per_device_train_batch_size=options.trl_batch,
            gradient_accumulation_steps=-(-len(rows) // options.trl_batch),
            max_length=None,
            logging_strategy="no",
            **settings,
        )
        model = plain_model(torch.float32, options)
        clock = _trainer_clock(options.device)
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=make_tokenizer(model.config.vocab_size),
            callbacks=[clock],
        )
        trainer.train()
    seen = trainer.state.log_history[-1].get("num_tokens")
    assert seen in (None, tokens * (1 + options.repeats)), (seen, tokens)
    seconds = (clock.ended[-1] - clock.ended[0]) / options.repeats
    return {**update_row(seconds, tokens, options.device), "micro_batch": options.trl_batch}


def grpo_trl(options: argparse.Namespace) -> dict[str, Row]:
    """GRPOTrainer, sampling with transformers' generate."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rollouts: list[float] = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            synchronize(options.device)
            rollouts.append(time.perf_counter() - started)
            return found

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [characters("", completion, {}) for completion in completions]

    num = options.prompts * options.group
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **_trainer_settings(folder, 1 + options.grpo_steps, options),
            per_device_train_batch_size=options.trl_completions,
            gradient_accumulation_steps=num // options.trl_completions,
            num_generations=options.group,
            max_completion_length=options.steps,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            gradient_checkpointing=False,
            use_vllm=False,
            logging_steps=1,
        )
        model = plain_model(torch.float32, options)
        clock = _trainer_clock(options.device)
        trainer = Timed(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in text_prompts(options)]),
            processing_class=make_tokenizer(model.config.vocab_size),
            callbacks=[clock],
        )
        trainer.train()
    return {GRPO: _grpo_row(trainer.state.log_history, clock.ended, rollouts, options)}


def _grpo_row(
    history: list[dict[str, float]], ended: list[float], rollouts: list[float], options: argparse.Namespace
) -> Row:
    """Seconds of a step by phase, once it is known that every step sampled as many tokens as it had to."""
    lengths = [(row["completions/min_length"], row["num_tokens"]) for row in history if "reward" in row]
    each = options.prompts * options.group * (options.prompt + options.steps)
    expected = [(options.steps, each * (step + 1)) for step in range(1 + options.grpo_steps)]
    assert lengths == expected, (lengths, expected)
    step = (ended[-1] - ended[0]) / options.grpo_steps
    assert len(rollouts) == 1 + options.grpo_steps, rollouts
    rollout = sum(rollouts[1:]) / options.grpo_steps
    row = {"step_s": step, "rollout_s": rollout, "update_s": step - rollout, "sync_s": 0.0}
    return {**row, "peak_bytes": peak_bytes(options.device), "micro_batch": options.trl_completions}


def _trainer_settings(folder: str, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """What both trainers are told: bfloat16 compute over the model's float32 weights, and nothing but training."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "use_cpu": options.device == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def _trainer_clock(device: str) -> Any:
    """A callback whose `ended` says when each step ended."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ended: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            self.ended.append(time.perf_counter())

    return Clock()
