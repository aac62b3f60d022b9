"""The matmul kernels of a decoding step compute what plain torch computes, in Triton's interpreter."""

import pytest

from tests.interpreted import run_interpreted
from tests.rollout.matmul_cases import CASES, EXPERTS


@pytest.fixture(scope="module")
def problems():
    return run_interpreted("tests.rollout.matmul_cases")


@pytest.mark.parametrize("name", [*CASES, *EXPERTS])
def test_kernels_equal_plain_torch(problems, name):
    assert problems[name] is None
