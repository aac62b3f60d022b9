"""Where numbers go: the lines of a resumed run, and what is shown while a run goes on."""

import json
import logging

import pytest

from shardproof.rl.loggers import JsonLines, Progress, read_lines, supersede
from shardproof.terminal import Bar

METRICS = {
    "reward/mean": 0.5,
    "kl/mean": 0.00125,
    "loss/policy": -0.01,
    "grad_norm": 1.25,
    "tokens_per_s": 12345.6,
    "lr": 1.0,
}
SHOWN = "reward 0.500  KL 0.0013  loss -0.0100  grad norm 1.250  12,346 tokens/s"


def test_a_resumed_run_drops_what_it_takes_again_and_goes_on_with_the_clock(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = [{"step": step, "time": 100.0 * step, "metrics": {}} for step in (1, 2, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in before) + '{"step": 4, "ti')
    logger = JsonLines(tmp_path, first_step=2)
    logger.log(3, {"reward/mean": 1.0, "grad_norm": float("inf")})
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in found] == [1, 2, 3]
    assert found[2]["time"] >= 200.0
    assert found[2]["metrics"] == {"reward/mean": 1.0, "grad_norm": None}, "infinity is not JSON"
    aside = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert aside == [json.dumps(before[2]), '{"step": 4, "ti'], "what was taken again is not lost"


def test_a_history_that_is_damaged_stops_no_resume_and_stays(tmp_path):
    path = tmp_path / "samples.jsonl"
    odd = [b"\xff\xfe", b"[1]", b'{"step": "3"}', b"[" * 20000]
    kept = '{"step": 1, "completion": "a\u2028b"}'.encode()
    path.write_bytes(b"\n".join([kept, *odd]))
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "time": null}\n\xff\n')
    JsonLines(tmp_path, first_step=1)
    assert path.read_bytes() == kept + b"\n"
    assert (tmp_path / "samples.superseded.jsonl").read_bytes() == b"".join(line + b"\n" for line in odd)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "time": None}]


def test_a_history_is_in_one_of_the_files_at_every_instant(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (1, 2, 3)]
    path.write_text("".join(f"{line}\n" for line in lines))

    def full(*_: object) -> None:
        found = path.read_text() + (tmp_path / "metrics.superseded.jsonl").read_text()
        assert all(line in found for line in lines)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardproof.rl.loggers.write_atomic", full)
    with pytest.raises(OSError):
        supersede(path, 1)
    assert path.read_text().splitlines() == lines


def reported(caplog, *steps):
    """The log records of a run of ten steps that goes on from step 4, and of these steps."""
    with caplog.at_level(logging.INFO, "shardproof.rl.loggers"):
        progress = Progress(num_steps=10, first_step=4)
        for step, metrics in steps:
            progress.log(step, metrics)
        progress.close()
    return caplog.records


def test_each_step_is_reported_with_how_far_the_run_is(caplog):
    first, step, last = reported(caplog, (5, METRICS))
    assert first.getMessage() == "training: steps 5 to 10"
    assert step.getMessage().startswith(f"step 5/10  {SHOWN}  left ")
    assert step.bar == Bar("step", 5, 10, SHOWN)
    assert last.bar.ended and last.getMessage().startswith("trained steps 5 to 5 in ")


def test_an_evaluation_is_reported_with_its_standard_error(caplog):
    found = {"eval/reward": 0.70833, "eval/reward_se": 0.0948}
    _, _, line, _ = reported(caplog, (5, METRICS | found))
    assert line.getMessage() == "evaluation after step 5: held-out reward 0.708 ± 0.095"
    caplog.clear()
    _, line = reported(caplog, (0, {"eval/loss": 1.25}))  # an evaluation before the first step is no step
    assert line.getMessage() == "evaluation before the first step: held-out loss 1.2500"
