"""What benchmarks/gpu.py measures of TRL and transformers. Each function runs in a process of its own."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_cases import tail_lengths
from benchmarks.gpu_timing import Row, Save, decode_row, peak_bytes, synchronize, update_row
from benchmarks.gpu_vllm import set_environment
from benchmarks.gpu_workload import (
    DECODE,
    DENSE,
    LR,
    RL,
    RL_TAILS,
    characters,
    decode_prompts,
    dense_config,
    make_tokenizer,
    sequences,
    served_folder,
    text_prompts,
    with_tails,
)

BATCHING = "transformers, continuous batching"
SFT, SFT_TUNED = "TRL SFTTrainer", "TRL SFTTrainer, tuned"
GRPO = "TRL GRPOTrainer, transformers engine"
GRPO_VLLM = "TRL GRPOTrainer, vLLM colocated"
GRPO_VLLM_PLAIN = "TRL GRPOTrainer, vLLM colocated, not corrected"
VLLM_SETTINGS = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
_RANK_KEYS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WARM_TOKENS = 8


def plain_model(dtype: torch.dtype, options: argparse.Namespace) -> Any:
    """The dense model as transformers makes it, with random weights."""
    from transformers import AutoModelForCausalLM

    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(dense_config(options.tiny), dtype=dtype)


def decode_transformers(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
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
    save(DECODE, BATCHING, row)


def sft_trl(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """SFTTrainer with TRL's defaults: activations are computed again in the backward pass."""
    save(DENSE, SFT, _sft_row(options, {}))


def sft_trl_tuned(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """SFTTrainer as fast as it gets without flash-attn: activations are kept, batches are of similar lengths."""
    faster = {"gradient_checkpointing": False, "train_sampling_strategy": "group_by_length"}
    save(DENSE, SFT_TUNED, _sft_row(options, faster))


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


def grpo_trl(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """GRPOTrainer, sampling with transformers' generate."""
    steps = _train_grpo(options, {"use_vllm": False}, 1 + options.grpo_steps)
    save(RL, GRPO, _grpo_row(steps, 1, options, [options.steps] * options.prompts * options.group))


def grpo_trl_vllm(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """GRPOTrainer with vLLM colocated, which is started once for both parts.

    With vLLM, TRL by default scores the completions a second time, to correct for vLLM's log-probs. The rows that are not
    corrected leave that out. With long tails only they are measured, in one step: it takes a minute, because TRL pads all
    completions of a step to the longest.
    """
    if RL in parts:
        timed = options.grpo_steps
        steps = _train_grpo(options, VLLM_SETTINGS, 1 + 2 * timed, corrected=1 + timed)
        lengths = [options.steps] * options.prompts * options.group
        save(RL, GRPO_VLLM, _grpo_row(steps.until(1 + timed), 1, options, lengths))
        save(RL, GRPO_VLLM_PLAIN, _grpo_row(steps, 1 + timed, options, lengths))
    if RL_TAILS in parts:
        options = with_tails(options)
        lengths = tail_lengths(options.prompts * options.group, options.tail_mean, options.tail_longest)
        short = [min(8, length) for length in lengths]
        steps = _train_grpo(options, VLLM_SETTINGS, 2, limits=[short, lengths], corrected=0)
        save(RL_TAILS, GRPO_VLLM_PLAIN, _grpo_row(steps, 1, options, lengths))


class _Steps(NamedTuple):
    """What a trainer logged, when its steps ended, and how long each took to sample and to score."""

    history: list[dict[str, float]]
    ended: list[float]
    rollouts: list[float]
    peak_bytes: int

    def until(self, num: int) -> _Steps:
        """The first of them."""
        return _Steps(self.history[:num], self.ended[:num], self.rollouts[:num], self.peak_bytes)


def _train_grpo(
    options: argparse.Namespace,
    settings: dict[str, Any],
    num_steps: int,
    limits: Sequence[Sequence[int]] | None = None,
    corrected: int | None = None,
) -> _Steps:
    """Train; `limits` are the lengths of each step's completions, and from step `corrected` on nothing is corrected."""
    if settings["use_vllm"]:
        set_environment()  # before TRL imports vLLM
        for (
            key
        ) in _RANK_KEYS:  # TRL sets them for vLLM; a second trainer would take them for a distributed run
            os.environ.pop(key, None)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rollouts: list[float] = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if len(rollouts) == corrected:
                self.vllm_importance_sampling_correction = False
            synchronize(options.device)
            started = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            synchronize(options.device)
            rollouts.append(time.perf_counter() - started)
            return found

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [characters("", completion, {}) for completion in completions]

    num = options.prompts * options.group
    if options.device == "cuda":
        gc.collect()  # an earlier trainer
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **_trainer_settings(folder, num_steps, options),
            per_device_train_batch_size=options.trl_completions,
            gradient_accumulation_steps=num // options.trl_completions,
            num_generations=options.group,
            max_completion_length=options.steps,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            gradient_checkpointing=False,
            logging_steps=1,
            **settings,
        )
        model = plain_model(torch.float32, options)
        tokenizer = make_tokenizer(model.config.vocab_size)
        if settings["use_vllm"]:
            _serve_from(served_folder(options), model, options)
        clock = _trainer_clock(options.device)
        trainer = Timed(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in text_prompts(options)]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        if limits is not None:
            _limit(trainer.vllm_generation.llm, limits, rollouts)
        trainer.train()
    history = [row for row in trainer.state.log_history if "reward" in row]
    return _Steps(history, clock.ended, rollouts, peak_bytes(options.device))


_started: list[Any] = []  # the one `vllm.LLM` of this process


def _serve_from(folder: str, model: Any, options: argparse.Namespace) -> None:
    """Let TRL start vLLM from a folder without weights: they are random, and the first step brings the trainer's."""
    from trl.generation import vllm_generation
    from vllm import LLM

    def start(**settings: Any) -> Any:
        if not _started:
            rows = max(options.prompts, options.tail_prompts) * options.group
            _started.append(LLM(**{**settings, "load_format": "dummy", "max_num_seqs": rows}))
        return _started[0]

    model.name_or_path = folder
    vllm_generation.LLM = start


def _limit(llm: Any, limits: Sequence[Sequence[int]], rollouts: list[float]) -> None:
    """Give each completion of a step its own length."""
    generate = llm.generate

    def limited(prompts: Any, sampling_params: Any, **others: Any) -> Any:
        each = []
        for length in limits[len(rollouts)]:
            params = sampling_params.clone()
            params.max_tokens = length
            each.append(params)
        return generate(prompts, sampling_params=each, **others)

    llm.generate = limited


def _grpo_row(steps: _Steps, first: int, options: argparse.Namespace, lengths: Sequence[int]) -> Row:
    """Mean seconds by phase of the steps from `first` on, once it is known that each sampled what it had to."""
    num, timed = options.prompts * options.group, len(steps.ended) - first
    assert len(steps.rollouts) == len(steps.history) == len(steps.ended), steps
    for logged in steps.history[first:]:
        assert logged["completions/min_length"] == min(lengths), logged
        assert logged["completions/max_length"] == max(lengths), logged
        assert abs(logged["completions/mean_length"] - sum(lengths) / num) < 0.01, logged
    step = (steps.ended[-1] - steps.ended[first - 1]) / timed
    rollout = sum(steps.rollouts[first:]) / timed
    row = {"step_s": step, "rollout_s": rollout, "update_s": step - rollout, "sync_s": 0.0}
    row |= {"peak_bytes": steps.peak_bytes, "micro_batch": options.trl_completions}
    return {**row, "tokens": sum(lengths)}


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
