"""A vLLM server that outlives the tests that share it, and the tiny checkpoints that servers serve."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# vLLM's own oneDNN dies of AVX512-FP16 instructions on machines where torch's does not; bf16 needs none of them.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as models_of_tokens
from transformers import PreTrainedTokenizerFast

from shardproof.rollout.vllm_server import Served, VllmServer, VllmSettings
from tests.models import make_checkpoint

# vLLM's CPU attention wants heads of 32 or more; MoE kernels want multiples of 32.
SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
MODELS = {
    "tied": ("qwen3_tied", {}),
    "long": ("qwen3_tied", {"max_position_embeddings": 8192}),  # for answers that something interrupts
    "wide": ("qwen3", {"hidden_size": 96}),
    "moe": ("qwen3_moe", {"moe_intermediate_size": 32}),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of tiny checkpoints by name."""
    root = tmp_path_factory.mktemp("models")
    folders = {
        name: str(make_checkpoint(root / name, family, **{**SHAPE, **extra}))
        for name, (family, extra) in MODELS.items()
    }
    # Defaults that would change every completion, were they used.
    defaults = {"eos_token_id": list(range(128)), "temperature": 0.01, "top_k": 1, "repetition_penalty": 3.0}
    Path(folders["moe"], "generation_config.json").write_text(json.dumps({**defaults, "do_sample": True}))
    tokenizer().save_pretrained(folders["tied"])
    return folders


def tokenizer() -> Any:
    """Of the first 128 bytes: stop strings go across its tokens, and characters of several bytes are never complete."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:127]
    made = Tokenizer(models_of_tokens.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="session")
def shared_server(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server of the tied model on loopback that was there before any run, with the checkpoint's weights in it."""
    log = tmp_path_factory.mktemp("server") / "log"
    # Blocks as short as the tests' prompts, so that some are cached.
    args = ["--load-format", "auto", "--block-size", "32"]
    settings = VllmSettings(mode="server", max_model_len=128, args=args, log=str(log))
    server = VllmServer(settings, Served(Path(models["tied"]), "float32", "cpu", finds_strings=True))
    try:
        server.ensure_up()
        yield server
    finally:
        server.stop()
