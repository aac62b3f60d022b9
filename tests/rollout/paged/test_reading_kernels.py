"""The kernels that read prompts compute what float64 computes, in Triton's interpreter."""

import pytest

from tests.interpreted import run_interpreted
from tests.rollout.paged.reading_cases import CASES, OTHERS


@pytest.fixture(scope="module")
def errors():
    return run_interpreted("tests.rollout.paged.reading_cases")


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_kernels_equal_plain_torch(errors, name):
    assert errors[name] < 1e-5
