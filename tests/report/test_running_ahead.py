"""Runs whose engines run ahead, as a real browser shows them: lag, idle time, replicas, and where each sample came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof.report.page import write_report
from shardproof.report.read import RunReader
from tests.report.folders import HOSTILE, make_run, write_lines
from tests.report.talks import line, opening, turn
from tests.report.test_page import captions, groups

NUM_STEPS = 8


def ahead_metrics(step: int) -> dict[str, float]:
    share = 0.4 + 0.02 * (step % 5)
    return {
        "version": float(step),
        "updates": 1.0,
        "lag/mean": min(step - 1, 2) * 0.75,
        "lag/max": float(min(step - 1, 2)),
        "ahead/dropped": float(step == 6),
        "ahead/interrupted": 0.05 * step,
        "ahead/buffered": 12.0 + step,
        "ahead/in_flight": 64.0 - step,
        "time/trainer_idle": 5.0 / step,
        "time/engine_idle": 0.5 * step,
        "replica/0": share,
        "replica/1": 1.0 - share,
        "mismatch/kl": 1e-4 * step,
        "correction/ess": 1.0 - 0.01 * step,
        "correction/masked": 0.002 * step,
    }


def completion(step: int, sample: int, **more: object) -> dict[str, object]:
    origin = {"replica": str(sample % 2), "drawn_for": step, "versions": [[9, max(step - 3, 0)]]}
    return line(step, sample, f"What is {step} + 1?", 1.0) | origin | more


def make_ahead(folder: Path) -> Path:
    """A run with ahead = 2 and two replicas. Of each step, one completion and one conversation were interrupted."""
    make_run(folder)
    records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["metrics"] |= ahead_metrics(record["step"])
    write_lines(folder / "metrics.jsonl", records)
    lines = []
    for step in range(1, NUM_STEPS + 1):
        old, new = max(step - 3, 0), max(step - 2, 0)
        pieces = [
            {"version": old, "tokens": 6, "text": "Let me count: "},
            {"version": new, "tokens": 3, "text": f"it is {step + 1}."},
        ]
        lines.append(completion(step, 0))
        text = "".join(piece["text"] for piece in pieces)
        lines.append(
            completion(
                step, 1, completion=text, versions=[[6, old], [3, new]], pieces=pieces, drawn_for=step + 1
            )
        )
        talk = [opening("And then?"), turn(1, text, 9, version=old, pieces=pieces)]
        talk += [turn(2, "9.<|im_end|>", 4, version=new)]
        more = {"group": 1, "ended": "done", "segments": talk, "versions": [[6, old], [7, new]]}
        lines.append(completion(step, 2, **more))
    write_lines(folder / "samples.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(make_ahead(tmp_path_factory.mktemp("ahead") / "tiny-ahead")).as_uri()


def test_lag_idle_time_and_replicas_have_charts_of_their_own(tab, page):
    tab.open(page)
    shown = groups(tab)
    wanted = ["lag/mean", "replica", "time/trainer_idle"]
    wanted += [f"ahead/{name}" for name in ("buffered", "dropped", "in_flight", "interrupted")]
    assert sorted(shown["Running ahead"]) == sorted(wanted)
    assert {"correction/ess", "correction/masked", "mismatch/kl"} <= set(shown["Engine match"])
    said = captions(tab)
    assert said["lag/mean"] == "lag/meanlast: step 8mean 1.5max 2"
    assert said["replica"] == "replicalast: step 80 0.461 0.54"
    assert said["time/trainer_idle"] == "time/trainer_idlelast: step 8trainer_idle 0.625engine_idle 4"


def test_key_numbers_say_how_old_the_tokens_were_and_who_waited(tab, page):
    tab.open(page)
    tiles = dict(zip(tab.texts(".tile dt"), tab.texts(".tile dd:first-of-type"), strict=True))
    remarks = dict(zip(tab.texts(".tile dt"), tab.texts(".tile"), strict=True))
    assert tiles["Lag of the tokens"] == "1.2" and "largest 2" in remarks["Lag of the tokens"]
    assert tiles["Idle"] == "trainer 8%, engines 11%"
    assert tiles["Effective sample size"] == "96%"
    assert remarks["Effective sample size"].endswith("median over steps, 0.90% masked")
    assert "Waiting for trajectories" in remarks["Where the time went"]


def test_a_run_that_does_not_run_ahead_has_none_of_it(tab, tmp_path):
    tab.open(write_report(make_run(tmp_path / "run")).as_uri())
    assert "Running ahead" not in groups(tab)
    assert not {"Lag of the tokens", "Idle", "Effective sample size"} & set(tab.texts(".tile dt"))
    assert tab.count(".origin") == tab.count(".piece") == 0


def test_each_sample_says_which_weights_and_which_engine_drew_it(tab, page):
    tab.open(page)
    assert tab.texts(".completion .origin") == [
        "weights version 5 · 2 updates old · replica 0",
        "weights versions 5, 6 · 1 to 2 updates old · replica 1 · drawn for step 9",
    ]
    assert tab.texts(".conversation .origin") == ["weights versions 5, 6 · 1 to 2 updates old · replica 0"]
    tab.js(
        "(() => { const slider = document.querySelector('#sample-step'); slider.value = 0; slider.oninput; })()"
    )
    tab.set("#sample-step", "0")
    assert tab.texts(".completion .origin")[0] == "weights version 0 · up to date · replica 0"


def test_tokens_of_different_weights_are_told_apart(tab, page):
    tab.open(page)
    assert tab.texts(".completion .piece") == ["v5Let me count:", "v6it is 9."]
    titles = tab.js("[...document.querySelectorAll('.completion .piece')].map(node => node.title)")
    assert titles == ["tokens 1 to 6: weights version 5", "tokens 7 to 9: weights version 6"]
    colours = tab.js(
        "[...document.querySelectorAll('.completion .piece')].map(n => getComputedStyle(n).borderBottomColor)"
    )
    assert len(set(colours)) == 2
    heads = tab.texts(".conversation .part.policy .by")
    assert heads[0].startswith("policy, turn 19 tokens · weights versions 5, 6")
    assert heads[1].startswith("policy, turn 24 tokens · weights version 6")
    assert tab.count(".conversation .piece") == 2
    tab.set("#filter-text", "count")
    assert tab.texts(".piece mark") == ["count", "count"]


def test_an_evaluation_beside_training_stands_at_the_step_after_which_it_began(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    given = [
        {"step": 0, "time": 1.0, "metrics": {"eval/reward": 0.1}},
        *({"step": step, "time": 2.0 * step, "metrics": {"reward/mean": 0.5}} for step in (1, 2, 3)),
        {"step": 4, "time": 8.0, "metrics": {"reward/mean": 0.5, "eval/step": 2.0, "eval/reward": 0.7}},
        {"step": 5, "time": 9.0, "metrics": {"eval/step": -1.0, "eval/reward": 0.9}},
        {"step": 6, "time": 9.5, "metrics": {"eval/step": 6.0, "eval/reward": 0.8}},
    ]
    write_lines(folder / "metrics.jsonl", given)
    run = RunReader(folder).read()
    assert run.steps == [0, 1, 2, 3, 4, 5, 6] and run.times == [1.0, 2.0, 4.0, 6.0, 8.0, 9.0, 9.5]
    assert [metrics.get("eval/reward") for metrics in run.metrics] == [0.1, None, 0.7, None, None, 0.9, 0.8]
    assert run.metrics[4] == {"reward/mean": 0.5}


@pytest.mark.fault
def test_odd_and_hostile_origins_are_text(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    odd = [
        {"versions": "all", "replica": HOSTILE, "drawn_for": "never", "pieces": 7},
        {"versions": [[1], 2, [None, "x"], [3, 4]], "replica": 5, "pieces": [1, {"text": HOSTILE}, {}]},
        {
            "versions": [[10**400, 1]],
            "drawn_for": [1],
            "pieces": [{"version": HOSTILE, "tokens": "x", "text": 5}],
        },
    ]
    samples = [line(8, k, "?", 1.0) | each for k, each in enumerate(odd)]
    write_lines(folder / "samples.jsonl", samples)
    tab.open(write_report(folder).as_uri())
    assert tab.text("title") == "run · shardproof"
    assert tab.count(".completion") == 3 and tab.count("#samples img") == 0


def test_the_page_fits_a_phone(phone, page):
    phone.open(page)
    assert phone.js("document.documentElement.scrollWidth <= innerWidth")
