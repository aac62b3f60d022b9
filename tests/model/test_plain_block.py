"""Plain blocks trained through our own functions, against the same blocks as their families wrote them.

The kernels need a GPU (tests/gpu); here plain torch stands in for them, in the order in which they round.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

import shardproof.model
from shardproof.model import hf_private, plain_block
from shardproof.model.attention import PACKED
from shardproof.model.packing import Packing
from shardproof.model.plain_block import PlainForward, is_plain
from tests.models import tiny_config

CPU = torch.device("cpu")
LENGTHS = (5, 17, 1, 9)
FAMILIES = ("qwen3", "llama_tied", "qwen2", "qwen3_moe")


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def differentiate(function, inputs, grads):
    with torch.enable_grad():
        inputs = [each.detach().requires_grad_() for each in inputs]
        out = function(*inputs)
        return torch.autograd.grad(out, inputs, grads), out


def norm_backward(x, weight, eps, grad, residual, recompute=True):
    (of_x, of_weight), out = differentiate(lambda x, weight: norm(x, weight, eps), [x, weight], grad)
    return of_x + residual, of_weight, out.detach() if recompute else None


def rotate(query, key, angles, weights, eps):
    cos, sin = (each[:, None] for each in angles)
    width = cos.shape[-1]
    found = []
    for x, weight in zip((query, key), weights or (None, None), strict=True):
        x = x.view(len(x), -1, width)
        x = norm(x, weight, eps) if weight is not None else x
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        found.append((x * cos + half * sin).flatten(1))
    return tuple(found)


def rotate_backward(query, key, angles, weights, eps, grads):
    given = [query, key, *(weights or ())]
    found, _ = differentiate(lambda q, k, *w: rotate(q, k, angles, w or None, eps), given, grads)
    return (*found, *([None, None] if weights is None else []))


def gate(gate, up):
    return silu(gate) * up


def gate_backward(one, other, grad):
    found, out = differentiate(gate, [one, other], grad)
    return (*found, out.detach())


@pytest.fixture
def kernels(monkeypatch):
    names = (norm, norm_backward, rotate, rotate_backward, gate, gate_backward)
    found = SimpleNamespace(**{each.__name__: each for each in names})
    monkeypatch.setitem(sys.modules, "shardproof.model.block_kernels", found)
    monkeypatch.setattr(shardproof.model, "block_kernels", found, raising=False)
    monkeypatch.setattr(plain_block, "runs_on", lambda hidden: True)
    monkeypatch.setattr(plain_block._Switch, "verdicts", {})
    return found


def make_model(family):
    torch.manual_seed(0)
    config = tiny_config(family, hidden_size=64)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def use_plain(model):
    for block in model.model.layers:
        assert is_plain(block)
        block.forward = PlainForward(block, block.forward, lambda *args, **kwargs: pytest.fail("fell back"))


def run(model):
    ids = (torch.arange(sum(LENGTHS))[None] * 7 + 3) % 101
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with hf_private.attention_implementation(model, PACKED):
        return model(
            input_ids=ids, position_ids=positions, packing=Packing(LENGTHS, CPU), use_cache=False
        ).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_all_gradients_are_those_of_the_blocks_as_written(kernels, family):
    model = make_model(family)
    truth = run(model)
    expected = torch.autograd.grad(truth.square().sum(), list(model.parameters()), allow_unused=True)
    use_plain(model)
    with torch.no_grad():
        torch.testing.assert_close(run(model), truth, atol=1e-4, rtol=1e-4)
    found = run(model)
    grads = torch.autograd.grad(found.square().sum(), list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)
    for (name, _), mine, theirs in zip(model.named_parameters(), grads, expected, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3, msg=name)
    with plain_block.as_written():
        assert torch.equal(run(model), truth)


def test_frozen_weights_get_no_gradient(kernels):
    model = make_model("qwen3")
    use_plain(model)
    with torch.no_grad():
        run(model)
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    run(model).sum().backward()
    for name, param in model.named_parameters():
        assert (param.grad is not None) == ("norm" in name), name


@pytest.mark.parametrize("fault", ["norm_backward", "rotate_backward", "gate_backward", "gate", "fails"])
def test_kernels_that_are_wrong_are_not_used(kernels, monkeypatch, caplog, fault):
    def broken(*args, **kwargs):
        if fault == "fails":
            raise RuntimeError("no kernel image")
        found = globals()[fault](*args, **kwargs)
        return 1.1 * found if fault == "gate" else (found[0], 1.2 * found[1], *found[2:])

    monkeypatch.setattr(kernels, "norm" if fault == "fails" else fault, broken)
    model = make_model("qwen3")
    truth = run(model)
    for block in model.model.layers:
        block.forward = PlainForward(block, block.forward, block.forward)
    with torch.no_grad():
        assert torch.equal(run(model), truth)
    assert "training without our own kernels" in caplog.text
    assert torch.equal(run(model), truth)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "olmo2"])
def test_blocks_of_other_kinds_are_left_alone(family):
    assert not any(map(is_plain, make_model(family).model.layers))
