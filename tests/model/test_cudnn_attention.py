"""Attention through cuDNN: how sequences are handed to it, and what happens when its plans fail or are wrong.

cuDNN runs on GPUs only. In its place stands plain attention that is told no more than cuDNN is.
"""

import logging
import threading

import pytest
import torch

from shardproof.model import attention, cudnn_attention, flash_private
from shardproof.model.packing import Packing

LENGTHS = [(5, 1, 12, 8), (3, 3), (9,), (30, 31, 2), (1,) * 9]
CPU = torch.device("cpu")


def plain(query, key, value, borders, scale):
    """[tokens, heads, width] to the same, sequence by sequence."""
    parts = []
    for first, last in zip(borders.tolist(), borders.tolist()[1:]):
        states = (x[first:last].transpose(0, 1)[None] for x in (query, key, value))
        parts.append(attention._plain(*states, scale, None, None, None)[0].transpose(0, 1))
    return torch.cat(parts)


def plain_backward(grad, query, key, value, borders, scale):
    """In a thread of its own: inside an operator nothing can be differentiated."""
    found = []

    def differentiate():
        states = [x.detach().requires_grad_() for x in (query, key, value)]
        found.extend(torch.autograd.grad(plain(*states, borders, scale), states, grad))

    thread = threading.Thread(target=differentiate)
    thread.start()
    thread.join()
    return tuple(found)


class Plan:
    """What a plan of cuDNN computes, and whether what it was given fits the sizes that it was built for."""

    factor = 1.0

    def __init__(self, bucket):
        self.bucket, self.forward, self.backward = bucket, "forward", "backward"

    def run(self, graph, tensors, borders):
        query, key, value, out, stats = (tensors[uid] for uid in range(1, 6))
        bucket = self.bucket
        assert len(borders) == bucket.sequences + 1 and len(query) == borders[-1] <= bucket.tokens
        assert borders.diff().max() <= bucket.longest
        assert all(size & (size - 1) == 0 for size in (bucket.sequences, bucket.longest, bucket.tokens))
        if graph == "forward":
            out.copy_(plain(query, key, value, borders, bucket.scale) * self.factor)
            stats.zero_()
        else:
            grads = plain_backward(tensors[6], query, key, value, borders, bucket.scale)
            for uid, grad in zip((7, 8, 9), grads, strict=True):
                tensors[uid].copy_(grad)


class WrongPlan(Plan):
    factor = 1.1


class FailingPlan(Plan):
    def __init__(self, bucket):
        raise RuntimeError("no plan for this")


@pytest.fixture
def cudnn(monkeypatch):
    """A function that puts a plan in the place of cuDNN's, and lets packed attention use it."""
    flashes = []

    def flash(query, key, value, borders, longest, scale):
        flashes.append(len(query))
        return plain(query, key, value, borders, scale), query.new_zeros(query.shape[:2])

    def use(plan):
        monkeypatch.setattr(cudnn_attention, "_Plan", plan)
        return flashes

    monkeypatch.setattr(flash_private, "forward", flash)
    monkeypatch.setattr(
        flash_private,
        "backward",
        lambda grad, query, key, value, out, stats, borders, longest, scale: plain_backward(
            grad, query, key, value, borders, scale
        ),
    )
    monkeypatch.setattr(cudnn_attention, "can_use", lambda device: True)
    monkeypatch.setattr(cudnn_attention, "_plans", {})
    return use


def attend(query, key, value, packing):
    return attention._flash(query, key, value, packing, None, None)


def compare(attend, lengths):
    """Attention and its gradients against plain attention."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, sum(lengths), heads, 16).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)
    )
    weight, packing = torch.randn(1, 4, sum(lengths), 16), Packing(lengths, CPU)
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    expected = plain(*rows, packing.cu_seqlens, 0.25).transpose(0, 1)[None]
    found = attend(query, key, value, packing)
    torch.testing.assert_close(found, expected)
    for out, other in zip(
        *(torch.autograd.grad((out * weight).sum(), (query, key, value)) for out in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(out, other)


def test_plans_serve_many_lengths(cudnn):
    cudnn(Plan)
    for lengths in LENGTHS:
        compare(attend, lengths)
    assert all(cudnn_attention._plans.values())
    assert {bucket.sequences for bucket in cudnn_attention._plans} == {1, 2, 4, 16}


def test_compiled_once_for_all_lengths(cudnn):
    cudnn(Plan)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(attend, backend="aot_eager", dynamic=True)
    for lengths in LENGTHS:
        compare(compiled, lengths)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("plan", "problem"), [(WrongPlan, "its output differs by 0.1"), (FailingPlan, "no plan for this")]
)
def test_flash_attention_takes_over(cudnn, caplog, plan, problem):
    flashes = cudnn(plan)
    with caplog.at_level(logging.WARNING, logger=cudnn_attention.__name__):
        compare(attend, LENGTHS[0])
        compare(attend, LENGTHS[0])
    assert [problem in record.getMessage() for record in caplog.records] == [True]  # said once
    assert flashes[-1] == sum(LENGTHS[0])


def test_what_cudnn_is_not_asked_for():
    states = torch.empty(3, 2, 128)
    assert cudnn_attention.fits(states, states, None)
    assert not cudnn_attention.fits(states, states, 5)
    assert not cudnn_attention.fits(states, states[..., :64], None)
    assert not cudnn_attention.fits(torch.empty(3, 2, 256), torch.empty(3, 2, 256), None)
    assert not cudnn_attention.can_use(CPU)
