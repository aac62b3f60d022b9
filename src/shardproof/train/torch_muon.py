"""What this project needs of torch's private implementation of Muon, in one place.

tests/test_private_interfaces.py fails when one of these moves.
"""

from __future__ import annotations

import torch
from torch.optim import _muon


def orthogonalise(matrix: torch.Tensor, ns_steps: int) -> torch.Tensor:
    """The orthogonal factor of a matrix, in bfloat16, by torch's Newton-Schulz iteration; may overwrite the matrix."""
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, ns_steps, _muon.EPS)


def adjusted_lr(lr: float, how: str, shape: tuple[int, int]) -> float:
    """The learning rate of a matrix of this shape: "original", or "match_rms_adamw"."""
    return _muon._adjust_lr(lr, how, torch.Size(shape))
