"""The kernels of paged attention and of drawing compute what plain torch computes, in Triton's interpreter."""

import pytest

from tests.interpreted import run_interpreted
from tests.rollout.paged.kernel_cases import CASES, DRAWS


@pytest.fixture(scope="module")
def problems():
    return run_interpreted("tests.rollout.paged.kernel_cases")


@pytest.mark.parametrize("name", [*CASES, *DRAWS, "float16"])
def test_kernels_equal_plain_torch(problems, name):
    assert problems[name] is None
