"""Prints how far the head's and the experts' Triton kernels are from plain operations, in Triton's interpreter."""

import json

import torch

from shardproof.model import expert_kernels, experts, head, head_kernels

SETTINGS = [(1.0, 1.0, None, False), (0.7, 0.5, None, True), (1.0, 2.0, 3.0, True), (0.9, 1.0, 5.0, False)]


def largest_difference(found, wanted):
    return max(
        float((one.float() - other.float()).abs().max()) for one, other in zip(found, wanted) if len(one)
    )


def head_errors(vocabulary: int, dtype: torch.dtype, settings: head.Settings) -> list[float]:
    """Of what is read, and of gradients, whose kernel writes over the outputs."""
    torch.manual_seed(0)
    z, targets = (torch.randn(7, vocabulary) * 4).to(dtype), torch.randint(vocabulary, (7,))
    read, wanted = head_kernels.read(z, targets, *settings), head._read_chunk(z, targets, *settings)
    columns = (targets, wanted[1], torch.randn(7), wanted[2], torch.randn(7 if settings[3] else 0))
    plain = head._differentiate_chunk(z, *columns, *settings)
    found = head_kernels.differentiate(z, *columns, *settings)
    assert found is z
    return [largest_difference(read, wanted), largest_difference([found], [plain])]


def expert_errors(rows: int, n: int, dtype: torch.dtype) -> list[float]:
    """Of the gate, of its gradients, and of sums by token."""
    torch.manual_seed(0)
    inner, grad = torch.randn(rows, 2 * n).to(dtype), torch.randn(rows, n).to(dtype)
    score, place = torch.rand(rows).to(dtype), torch.randperm(rows).view(-1, 3)
    gate = largest_difference([expert_kernels.gate(inner, score)], [experts._gate(inner, score)])
    given = (grad, inner, score)
    backward = largest_difference(expert_kernels.gate_backward(*given), experts._differentiate_gate(*given))
    sums = [function(grad, place) for function in (expert_kernels.sum_by_token, experts._sum_by_token)]
    return [gate, backward, largest_difference(sums[:1], sums[1:])]


if __name__ == "__main__":
    vocabularies = [(151, torch.float16), (9000, torch.float32)]
    sizes = [(33, 24, torch.float32), (6, 192, torch.float16), (300, 64, torch.float32)]
    rows = {
        "head": [head_errors(*size, settings) for size in vocabularies for settings in SETTINGS],
        "experts": [expert_errors(*size) for size in sizes],
    }
    print(json.dumps(rows))
