"""The kernels of paged attention and of drawing compute what plain torch computes, in 16 bits and in replayed graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.rollout.paged.kernel_cases import CASES, DRAWS, Case, attention_problem

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MORE = {
    "one long context": Case([30_011], heads=16, key_heads=8, width=128, shares=4, steps=3),
    "many rows of all lengths": Case([11 * n for n in range(200)], heads=16, key_heads=8, width=128),
    "wide heads": Case([10, 300, 2000], heads=8, key_heads=4, width=256),
}


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_attention_equals_plain_torch(name):
    case = {**CASES, **MORE}[name]
    assert attention_problem(replace(case, steps=5), torch.bfloat16, CUDA, 1e-2) is None


@pytest.mark.parametrize("name", list(DRAWS))
def test_draws_equal_plain_torch(name):
    assert DRAWS[name](torch.bfloat16, CUDA) is None


def test_pieces_are_combined_in_every_replay():
    """Arrivals are counted anew each time, and sums do not depend on who arrives last."""
    from shardproof.rollout.paged.attention_kernels import attend_rotated

    torch.manual_seed(0)
    keys, values = torch.randn(2, 40, 2, 64, 64, dtype=torch.bfloat16, device=CUDA)
    tables = (torch.randperm(39, device=CUDA) + 1)[None].int()
    positions = torch.tensor([[2000]], device=CUDA)
    query, key, value = (torch.randn(1, n, 64, dtype=torch.bfloat16, device=CUDA) for n in (8, 2, 2))

    def run() -> torch.Tensor:
        return attend_rotated(query, key, value, (keys, values), tables, positions, 0.125)

    expected = [run() for _ in range(2)][-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)
