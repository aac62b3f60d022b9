"""The kernels of training blocks and their gradients are those of float64, in Triton's interpreter."""

import pytest

from tests.interpreted import run_interpreted
from tests.model.block_cases import CASES


@pytest.fixture(scope="module")
def errors():
    return run_interpreted("tests.model.block_cases")


@pytest.mark.parametrize("name", CASES)
def test_kernels_and_their_gradients_equal_float64(errors, name):
    assert errors[name] < 1e-5
