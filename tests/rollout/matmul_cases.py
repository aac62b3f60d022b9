"""Comparisons of the decoding step's matmul kernels with plain torch: interpreted on the CPU, and on a GPU there.

As a module it runs all of them and prints what is wrong with each, as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import silu


@dataclass
class Case:
    rows: int
    sizes: tuple[int, ...]  # of the weights
    inner: int
    fp8: bool = False
    bias: bool = False
    joined: bool = False  # the weights lie side by side
    gated: bool = False


CASES = {
    "one row, three weights": Case(1, (256, 128, 128), 512),
    "rows that fill no block, biases": Case(37, (128, 128), 256, bias=True),
    "many rows, apart": Case(70, (128,), 256),
    "many rows, side by side, biases": Case(70, (128, 256), 256, bias=True, joined=True),
    "gate and up": Case(19, (256, 256), 384, gated=True),
    "gate and up, many rows, side by side": Case(70, (256, 256), 256, joined=True, gated=True),
    "float8, three weights": Case(3, (256, 128, 128), 512, fp8=True),
    "float8, rows that fill no block, biases": Case(29, (128, 128), 768, fp8=True, bias=True),
    "float8, in shares": Case(17, (128,), 1024, fp8=True),
    "float8, gate and up": Case(19, (256, 256), 384, fp8=True, gated=True),
}


def problem_of(case: Case, dtype: torch.dtype, device: torch.device, tolerance: float) -> str | None:
    """What is wrong with the kernels in a case; None if nothing is."""
    from shardproof.rollout import kernels
    from shardproof.rollout.fp8 import Float8, round_weight
    from shardproof.rollout.joined import join_weights

    torch.manual_seed(0)
    owner = nn.Module()
    for name, size in zip(("q_proj", "k_proj", "v_proj"), case.sizes, strict=False):
        owner.add_module(name, nn.Linear(case.inner, size, bias=case.bias, dtype=dtype, device=device))
    if case.joined:  # as gate and up are, or with a third of the first one's size
        names = ("gate_proj", "up_proj") if len(case.sizes) == 2 else ("q_proj", "k_proj", "v_proj")
        for old, new in zip(("q_proj", "k_proj"), names, strict=False):
            owner.add_module(new, owner.get_submodule(old))
            delattr(owner, old)
        join_weights(owner)
    weights = [each.weight.requires_grad_(False) for each in owner.children()]
    biases = [each.bias.requires_grad_(False) for each in owner.children()] if case.bias else None
    if case.fp8:
        for weight in weights:
            weight.mul_(torch.logspace(-2, 1, case.inner, device=device).to(dtype))  # scales that differ
            weight.float8 = Float8.like(weight)
            round_weight(weight, weight.float8)
    x = torch.randn(case.rows, case.inner, dtype=dtype, device=device)
    truth = x.double() @ torch.cat(weights).double().T
    if biases is not None:
        truth += torch.cat(biases).double()
    torch.full((1 << 20,), float("nan"), device=device)  # what outputs may be made of
    for weight in weights if case.fp8 else []:
        weight.fill_(float("nan"))  # so that only the copy can be right
    if case.gated:
        gate, up = truth.chunk(2, -1)
        truth, found = silu(gate) * up, kernels.gate_up(x, *weights)
    else:
        found = kernels.project(x, weights, biases).double().sum(0)
    error = float((found.double() - truth).abs().max() / truth.abs().max())
    return None if error <= tolerance else f"off by {error:.3g} of the largest number"


def experts_problem(
    rows: int, fp8: bool, dtype: torch.dtype, device: torch.device, tolerance: float
) -> str | None:
    """What is wrong with the kernels for experts; None if nothing is."""
    from shardproof.rollout.expert_kernels import few_rows_experts
    from shardproof.rollout.fp8 import Float8, round_weight

    torch.manual_seed(1)
    num, top, hidden, inner = 5, 2, 256, 128
    module = nn.Module()
    for name, shape in (("gate_up_proj", (num, 2 * inner, hidden)), ("down_proj", (num, hidden, inner))):
        weight = nn.Parameter(torch.randn(shape, dtype=dtype, device=device) * 0.1, requires_grad=False)
        if fp8:
            weight.float8 = Float8.like(weight)
            round_weight(weight, weight.float8)
        module.register_parameter(name, weight)
    x = torch.randn(rows, hidden, dtype=dtype, device=device)
    chosen = torch.stack([torch.randperm(num - 1)[:top] for _ in range(rows)]).to(
        device
    )  # nobody visits the last
    scores = torch.rand(rows, top, dtype=dtype, device=device)
    truth = torch.zeros(rows, hidden, dtype=torch.float64, device=device)
    for row in range(rows):
        for expert, score in zip(chosen[row].tolist(), scores[row].double(), strict=True):
            gate, up = (module.gate_up_proj[expert].double() @ x[row].double()).chunk(2)
            truth[row] += module.down_proj[expert].double() @ (silu(gate) * up * score)
    for weight in module.parameters() if fp8 else []:
        weight.fill_(float("nan"))  # so that only the copy can be right
    found = few_rows_experts(module, x, chosen, scores)
    error = float((found.double() - truth).abs().max() / truth.abs().max())
    return None if error <= tolerance else f"off by {error:.3g} of the largest number"


EXPERTS = {"experts": (19, False), "experts in float8": (13, True)}


def problems(dtype: torch.dtype, device: torch.device, tolerance: float) -> dict[str, str | None]:
    """What is wrong in each case."""
    found = {name: problem_of(case, dtype, device, tolerance) for name, case in CASES.items()}
    for name, (rows, fp8) in EXPERTS.items():
        found[name] = experts_problem(rows, fp8, dtype, device, tolerance)
    return found


if __name__ == "__main__":
    print(json.dumps(problems(torch.float16, torch.device("cpu"), 2e-3)))
