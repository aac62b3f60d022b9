"""What dequantises weights in 4 bits on a GPU gives the values of plain torch, bit for bit."""

from tests.interpreted import run_interpreted


def test_the_kernel_is_right_where_it_can_be_interpreted():
    assert run_interpreted("tests.model.nf4_cases") == {"difference": None}
