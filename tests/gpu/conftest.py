"""These tests need a CUDA device; elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
