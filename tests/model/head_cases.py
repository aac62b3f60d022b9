"""Prints how far the head's Triton kernels are from plain operations, in Triton's interpreter."""

import json

import torch

from shardproof.model import head, head_kernels

CASES = [(1.0, 1.0, None, False), (0.7, 0.5, None, True), (1.0, 2.0, 3.0, True), (0.9, 1.0, 5.0, False)]


def errors(vocabulary: int, dtype: torch.dtype, settings: head.Settings) -> dict[str, float]:
    """The largest errors of what is read, and of gradients, whose kernel writes over the outputs."""
    torch.manual_seed(0)
    z, targets = (torch.randn(7, vocabulary) * 4).to(dtype), torch.randint(vocabulary, (7,))
    read, wanted = head_kernels.read(z, targets, *settings), head._read_chunk(z, targets, *settings)
    columns = (targets, wanted[1], torch.randn(7), wanted[2], torch.randn(7 if settings[3] else 0))
    plain = head._differentiate_chunk(z, *columns, *settings)
    found = head_kernels.differentiate(z, *columns, *settings)
    assert found is z
    return {
        "read": max(
            float((one - other).abs().max()) for one, other in zip(read, wanted, strict=True) if len(one)
        ),
        "gradient": float((found - plain).abs().max()),
    }


if __name__ == "__main__":
    sizes = [(151, torch.float16), (9000, torch.float32)]
    print(json.dumps([errors(*size, settings) for size in sizes for settings in CASES]))
