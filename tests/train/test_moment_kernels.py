"""What runs on a GPU for digests and for moments in 16 and 8 bits computes what plain torch computes."""

from tests.interpreted import run_interpreted


def test_kernels_are_right_where_they_can_be_interpreted():
    found = run_interpreted("tests.train.moment_cases")
    assert found["digests"] == found["plain"]
    assert found["moments"] == [None, None]
    assert found["moments in 8 bits"] == [None, None]
