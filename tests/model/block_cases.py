"""Kernels of training blocks and their gradients, against float64, in Triton's interpreter. Prints errors as JSON."""

from __future__ import annotations

import json

import torch
from torch.nn.functional import silu

CASES = ("norm", "rotate", "rotate_without_norms", "gate")
EPS = 1e-6


def _error(found, truth):
    """The largest difference, of pairs in which both may be None."""
    pairs = [(a, b) for a, b in zip(found, truth, strict=True) if a is not None or b is not None]
    return max(float((a.double() - b).abs().max()) for a, b in pairs)


def _norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _wide(*tensors):
    return [each.double().requires_grad_() for each in tensors]


def norm():
    from shardproof.model import block_kernels as kernels

    x, weight, grad, residual = torch.randn(7, 96), torch.rand(96), torch.randn(7, 96), torch.randn(7, 96)
    wide = _wide(x, weight)
    truth = _norm(*wide)
    of_x, of_weight = torch.autograd.grad(truth, wide, grad.double())
    expected = (of_x + residual, of_weight, truth)
    found = kernels.norm_backward(x, weight, EPS, grad, residual)
    less = kernels.norm_backward(x, weight, EPS, grad, residual, recompute=False)
    errors = [_error([kernels.norm(x, weight, EPS)], [truth]), _error(found, expected)]
    return max(*errors, _error(less[:2], expected[:2]))


def rotate(has_norms=True):
    from shardproof.model import block_kernels as kernels

    tokens, width = 7, 32
    states = torch.randn(tokens, 3 * width), torch.randn(tokens, width)
    angles = torch.randn(tokens, width), torch.randn(tokens, width)
    weights = (torch.rand(width), torch.rand(width)) if has_norms else None
    wide = _wide(*states, *(weights or ()))
    truth = []
    for number, x in enumerate(wide[:2]):
        x = x.view(tokens, -1, width)
        x = _norm(x, wide[2 + number]) if has_norms else x
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        truth.append((x * angles[0].double()[:, None] + half * angles[1].double()[:, None]).flatten(1))
    grads = torch.randn(tokens, 3 * width), torch.randn(tokens, width)
    expected = torch.autograd.grad(truth, wide, [each.double() for each in grads])
    found = kernels.rotate_backward(*states, angles, weights, EPS, grads)
    expected = (*expected, *([None, None] if weights is None else []))
    return max(_error(kernels.rotate(*states, angles, weights, EPS), truth), _error(found, expected))


def gate():
    from shardproof.model import block_kernels as kernels

    one, other, grad = torch.randn(7, 40), torch.randn(7, 40), torch.randn(7, 40)
    wide = _wide(one, other)
    truth = silu(wide[0]) * wide[1]
    expected = (*torch.autograd.grad(truth, wide, grad.double()), truth)
    return max(
        _error([kernels.gate(one, other)], [truth]), _error(kernels.gate_backward(one, other, grad), expected)
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    ways = (norm, rotate, lambda: rotate(False), gate)
    print(json.dumps({name: way() for name, way in zip(CASES, ways, strict=True)}))
