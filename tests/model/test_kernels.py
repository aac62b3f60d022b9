"""The head's and the experts' Triton kernels against plain operations: all transformations, whole blocks and parts of one."""

from tests.interpreted import run_interpreted


def test_kernels_say_what_plain_operations_say():
    found = run_interpreted("tests.model.kernel_cases")
    assert (len(found["head"]), len(found["experts"])) == (8, 3)
    assert all(error < 1e-3 for rows in found.values() for row in rows for error in row), found
