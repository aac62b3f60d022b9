"""Plain blocks trained on a CUDA device: our kernels are used, and take the steps that the blocks as written take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.model import plain_block
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

SHAPE = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
}
LENGTHS = (300, 100, 77, 500)


def steps(folder: str, compile: bool) -> tuple[list[bool], list[tuple[float, float]]]:
    """(whether our kernels were found right, loss and gradient norm of three steps)."""
    policy = sp.load(folder, device="cuda", compute_dtype=torch.bfloat16, compile=compile)
    optimizer = sp.make_optimizer(policy, 1e-4)
    batch = sp.Batch([[(7 * i * i + 3 * n) % 512 for i in range(n)] for n in LENGTHS])
    found = [sp.train_step(policy, batch, optimizer, micro_batch_tokens=1024) for _ in range(3)]
    return list(plain_block.verdicts().values()), [(float(r.loss), float(r.grad_norm)) for r in found]


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_plain_blocks_take_the_same_steps(tmp_path: Any, family: str) -> None:
    extra = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    folder = str(make_checkpoint(tmp_path, family, **SHAPE, **extra))
    (verdicts, mine), (_, theirs) = (
        run_ranks(1, steps, folder, compile, backend="cpu:gloo,cuda:nccl")[0] for compile in (True, False)
    )
    assert verdicts and all(verdicts)
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=0.01)
