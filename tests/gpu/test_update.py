"""What an update runs on a GPU beside matmuls, against plain operations: attention, the head, experts, gradients of one rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardproof as sp
from shardproof.model import attention, cudnn_attention, experts, head
from shardproof.model.packing import Packing
from shardproof.train import passes
from tests.models import tiny_config
from tests.ranks import run_ranks
from tests.shard.test_serve import full_state

pytestmark = [pytest.mark.distributed, pytest.mark.gpu]

LENGTHS = [1, 77, 130, 300, 5]
CUDA = torch.device("cuda")


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(16, 8, 128), (4, 4, 64)])
def test_packed_attention(heads: int, key_heads: int, width: int) -> None:
    """Through cuDNN where its frontend is installed, else through flash attention; forward and backward."""
    torch.manual_seed(0)
    tokens, packing = sum(LENGTHS), Packing(LENGTHS, CUDA)
    states = [
        torch.randn(1, tokens, n, width, device=CUDA, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n in (heads, key_heads, key_heads)
    ]
    upstream = torch.randn(1, heads, tokens, width, device=CUDA, dtype=torch.bfloat16)
    results = []
    for function, extra in ((attention._flash, ()), (attention._by_sequence, (None, None))):
        args = (attention._plain,) if function is attention._by_sequence else ()
        out = function(*args, *states, packing, width**-0.5, None, *extra)
        results.append([out, *torch.autograd.grad(out, states, upstream)])
    assert all(relative(found, wanted) < 0.02 for found, wanted in zip(*results, strict=True))
    if packing.uses_cudnn:
        assert all(cudnn_attention._plans.values())  # none was given up


@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("facts", [head.HeadFacts(), head.HeadFacts(scale=0.5, softcap=5.0)])
def test_head(facts: head.HeadFacts, want_entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's kernels, with chunks kept and computed again."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 5003, bias=False, device=CUDA, dtype=torch.bfloat16)
    hidden = torch.randn(700, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(5003, (700,), device=CUDA)
    monkeypatch.setattr(head, "_FUSED_CHUNK_ELEMENTS", 256 * 5003)
    results = []
    for kernels, num_kept in ((True, 0), (True, 9), (False, 0)):
        monkeypatch.setattr(head, "_num_kept", lambda hidden, weight, num=num_kept: num)
        plain = (head._read_chunk, head._differentiate_chunk)
        with mock.patch.object(
            head, "_functions", **({"wraps": head._functions} if kernels else {"return_value": plain})
        ):
            options: dict[str, Any] = {"temperature": 0.7, "facts": facts, "want_entropy": want_entropy}
            logps, entropy = head.token_logprobs(hidden, layer, targets, **options)
            total = logps.sum() + 0.3 * entropy.sum()
            results.append([logps, *torch.autograd.grad(total, (hidden, layer.weight))])
    assert all(head._verdicts.values())
    for found in results[:2]:
        assert all(relative(one, other) < 0.01 for one, other in zip(found, results[2], strict=True))


def test_experts() -> None:
    """Their kernels are found right, and so are used."""
    hidden = torch.zeros(1, 96, device=CUDA, dtype=torch.bfloat16)
    for inner in (48, 768):
        assert experts._functions(hidden, inner)[0].__module__.endswith("expert_kernels")


def train(in_place: bool) -> Any:
    config = tiny_config("qwen3_moe", head_dim=16)
    policy = sp.load(sp.RandomInit(config), device="cuda", compile=False, progress=False)
    optimizer = sp.make_optimizer(policy, lr=1e-3)
    batch = sp.Batch([[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]])
    with mock.patch.object(passes, "_is_alone", return_value=in_place):
        norms = [sp.train_step(policy, batch, optimizer, micro_batch_tokens=6).grad_norm for _ in range(3)]
    return norms, {name: value.cpu() for name, value in full_state(policy).items()}


def test_gradients_of_one_rank() -> None:
    """Added up in place: what FSDP's reduction gives."""
    found, wanted = (
        run_ranks(1, train, each, backend="cpu:gloo,cuda:nccl", timeout=300)[0] for each in (True, False)
    )
    assert found[0] == pytest.approx(wanted[0], rel=1e-3)
    assert all(torch.allclose(found[1][name], wanted[1][name], atol=1e-4) for name in wanted[1])
