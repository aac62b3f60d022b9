"""What benchmarks/gpu.py measures of vLLM: the engine alone, as `vllm.LLM` runs it.

Its own defaults, except: weights are not read from a checkpoint but random (`load_format="dummy"`), no tokenizer, no prefix
cache (no two prompts are alike), the numbers of rows and of tokens that the cases need, CUDA graphs up to the most rows.
The log-probs of the drawn tokens are asked for, as RL needs them, in vLLM's compact form. Requests have no seeds of their
own: vLLM draws faster without.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_cases import Generate, longest_sequence, measure_engine, most_rows
from benchmarks.gpu_timing import Save
from benchmarks.gpu_workload import served_folder

VLLM = "vLLM"
VLLM_APART = "vLLM, engine in a process of its own"
_MARGIN = 64  # tokens of the longest sequence that nobody asks for
_BATCHED_TOKENS = 16384  # vLLM's own default on this GPU


def set_environment(apart: bool = False) -> None:
    """Before vLLM is imported: where its engine runs, and no FlashInfer, which compiles for minutes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(apart))
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"


def engine_vllm(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """vLLM in this process."""
    _measure(VLLM, options, parts, save)


def engine_vllm_apart(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """vLLM as `LLM` has it by default: what it returns is put together here while the engine goes on elsewhere."""
    _measure(VLLM_APART, options, parts, save)


def _measure(name: str, options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    set_environment(apart=name == VLLM_APART)
    measure_engine(make_generate(start(options)), name, parts, options, save)


def start(options: argparse.Namespace) -> Any:
    """A `vllm.LLM` with random weights."""
    from vllm import LLM

    settings: dict[str, Any] = {}
    if options.vllm_cache_gib:
        settings["kv_cache_memory_bytes"] = int(options.vllm_cache_gib * 2**30)
    return LLM(
        model=served_folder(options),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest_sequence(options) + _MARGIN,
        max_num_seqs=most_rows(options),
        max_num_batched_tokens=_BATCHED_TOKENS,
        gpu_memory_utilization=options.vllm_memory,
        enable_prefix_caching=False,
        **settings,
    )


def make_generate(llm: Any) -> Generate:
    """How the cases ask vLLM."""
    from vllm import SamplingParams

    def generate(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
        params = [
            SamplingParams(
                max_tokens=limit,
                temperature=1.0,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                flat_logprobs=True,
            )
            for limit in limits
        ]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        said = [each.outputs[0] for each in llm.generate(asked, params, use_tqdm=False)]
        assert all(each.logprobs is not None and len(each.logprobs) == len(each.token_ids) for each in said)
        return [len(each.token_ids) for each in said]

    return generate
