"""Compiled blocks: the same numbers, compiled once, and left alone on every rank when they are wrong on one.

What is traced is what CUDA runs; a backend that runs the traced graph as it is stands in for the code generator.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.model.compiling import can_compile, is_compiled
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

# The first three show every form in which attention on a CPU hands back its result: of sequences, of one, of equal ones.
BATCHES = [[12, 5, 9, 7], [20, 21], [3] * 8, [6, 31, 2, 2], [2, 40]]


def traced(graph: Any, inputs: Any) -> Any:
    return graph.forward


def wrong(graph: Any, inputs: Any) -> Any:
    def run(*args: Any) -> Any:
        return tuple(x * 2 if torch.is_tensor(x) and x.is_floating_point() else x for x in graph(*args))

    return run


def failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no code for this graph")


def load(folder: str, backend: Any, options: dict[str, Any]) -> sp.ShardedModel:
    original = torch.compile
    torch.compile = lambda function, **kwargs: original(function, backend=backend, **kwargs)  # type: ignore[assignment]
    try:
        return sp.load(folder, device="cpu", compute_dtype=torch.float32, progress=False, **options)
    finally:
        torch.compile = original


def train(folder: str, options: dict[str, Any]) -> tuple[bool, list[Any], list[int]]:
    """(whether blocks are compiled, losses, norms and scores, graphs that exist after each batch)."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    policy = load(folder, traced, options)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    results, graphs = [], []
    for seed, lengths in enumerate(BATCHES):
        sequences = [[(7 * seed + 3 * n + i) % 90 for i in range(n)] for n in lengths]
        mine = (
            sequences if policy.sequence_parallel > 1 else sequences[dist.get_rank() :: dist.get_world_size()]
        )
        step = sp.train_step(policy, sp.Batch(mine), optimizer, micro_batch_tokens=24)
        results.append((step.loss, step.grad_norm, float(torch.cat(sp.logprobs(policy, sequences)).sum())))
        graphs.append(counters["stats"]["unique_graphs"])
    return is_compiled(policy.model), results, graphs


@pytest.mark.parametrize(
    ("num_ranks", "family", "options"),
    [
        (1, "qwen3_tied", {}),
        (2, "qwen3_moe", {"checkpoint_activations": 2, "sequence_parallel": 2}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_the_same_numbers_from_one_compilation(tmp_path, num_ranks, family, options):
    folder = str(make_checkpoint(tmp_path, family))
    plain = run_ranks(num_ranks, train, folder, {**options, "compile": False})
    compiled = run_ranks(num_ranks, train, folder, {**options, "compile": True})
    for (was, expected, _), (now, found, graphs) in zip(plain, compiled, strict=True):
        assert (was, now) == (False, True)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-4)
        assert graphs[0] > 0
        assert graphs[3:] == [graphs[2]] * (len(graphs) - 3)


def score(folder: str, backends: list[Any]) -> tuple[bool, bool, list[str]]:
    """(compiled after load, after scoring, what rank 0 was told)."""
    torch._dynamo.reset()
    policy = load(folder, backends[dist.get_rank()], {"compile": True})
    before = is_compiled(policy.model)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardproof.train.scoring")
    logger.addHandler(handler)
    try:
        sp.logprobs(policy, [[1, 2, 3, 4]])
    finally:
        logger.removeHandler(handler)
    return before, is_compiled(policy.model), records


@pytest.mark.parametrize(
    ("backends", "reason"),
    [([traced, wrong], "differ by"), ([failing, failing], "no code for this graph")],
    ids=["wrong on one rank", "cannot be compiled"],
)
def test_compiled_blocks_that_are_wrong_are_not_used(tmp_path, backends, reason):
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    first, second = run_ranks(2, score, folder, backends)
    assert first[:2] == second[:2] == (True, False)
    assert len(first[2]) == 1 and reason in first[2][0] and "not compiled" in first[2][0]
    assert second[2] == []


def test_compiling_is_for_sixteen_bits_on_cuda():
    assert not can_compile(torch.device("cpu"), torch.bfloat16)
    assert not can_compile(torch.device("cuda"), torch.float32)
