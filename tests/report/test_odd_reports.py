"""The page of a run whose files hold numbers that only a damaged or foreign file has."""

import pytest

from shardproof.report.page import write_report

pytestmark = pytest.mark.fault

HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics", f'{{"step": 1, "time": {HUGE}, "metrics": {{"reward/mean": {HUGE}}}}}'),
        ("samples", f'{{"step": {HUGE}, "reward": {HUGE}, "prompt": "one"}}'),
        ("events", f'{{"step": {HUGE}, "kind": "skip", "text": "one"}}'),
    ],
)
def test_an_integer_that_no_float_holds_is_not_finite(tmp_path, name, line):
    (tmp_path / f"{name}.jsonl").write_text(line + "\n")
    assert "one" in write_report(tmp_path).read_text() or name == "metrics"
