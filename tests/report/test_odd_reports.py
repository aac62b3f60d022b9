"""The page of a run whose files hold numbers that only a damaged or foreign file has."""

import json

import pytest

from shardproof.report.page import data_of, write_report
from shardproof.report.read import RunReader
from shardproof.report.summary import facts_of

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


ODD = [None, True, 7, -1.5, 1e308, "text", [], [[1]], {}, {"a": {"b": [None]}}, "\ud800"]
KEYS = {
    "metrics": ("step", "time", "metrics"),
    "samples": (
        "step",
        "group",
        "prompt",
        "completion",
        "reward",
        "rewards",
        "answer",
        "advantage",
        "group_rewards",
    ),
    "events": (
        "step",
        "kind",
        "proof",
        "passed",
        "text",
        "compared",
        "role",
        "rank",
        "seconds",
        "findings",
        "details",
    ),
}
WHOLE = {
    "metrics": {"step": 1, "time": 1.0, "metrics": {"reward/mean": 0.5}},
    "samples": {"step": 1, "prompt": "a", "completion": "b", "reward": 1.0},
    "events": {
        "step": 1,
        "kind": "proof",
        "proof": "sync",
        "passed": False,
        "text": "t",
        "details": {"gap": 1.0},
    },
}


@pytest.mark.parametrize("name", KEYS)
def test_a_value_of_any_shape_costs_no_page(tab, tmp_path, name):
    lines = [{**WHOLE[name], key: value} for key in KEYS[name] for value in ODD]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tab.open(write_report(tmp_path).as_uri())
    tab.js("document.querySelectorAll('details').forEach(node => { node.open = true })")
    tab.wait("document.querySelector('#config pre') !== null")
    assert tab.messages() == []


@pytest.mark.parametrize("name", ["config.json", "run.json"])
def test_settings_and_facts_of_any_shape_cost_no_page(tmp_path, name):
    keys = (
        "algorithm",
        "model",
        "train",
        "status",
        "step",
        "ranks",
        "nodes",
        "hosts",
        "packages",
        "hardware",
        "changed",
        "shardproof",
    )
    for value in ODD:
        (tmp_path / name).write_text(json.dumps(dict.fromkeys(keys, value)))
        write_report(tmp_path)
        data_of([RunReader(tmp_path).read(), RunReader(tmp_path).read()])
    for changed in ODD:
        facts = {
            "changed": {"a": changed},
            "packages": {"a": changed},
            "hardware": {"gpus": [changed], "cpu": changed},
            "hosts": [changed, {"name": changed, "ranks": changed, "devices": changed}],
        }
        (tmp_path / name).write_text(json.dumps(facts))
        write_report(tmp_path)


@pytest.mark.parametrize("depth", [200, 900, 100_000])
def test_what_is_nested_deeply_costs_no_page(tmp_path, depth):
    nested = "[" * depth + "]" * depth
    for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl", "config.json", "run.json"):
        text = f'{{"step": 1, "kind": {nested}, "prompt": {nested}, "model": {nested}, "changed": {{"a": {nested}}}, "hosts": [{nested}, {{"name": {nested}}}]}}'
        (tmp_path / name).write_text(text + "\n")
    write_report(tmp_path)


def test_numbers_that_no_axis_holds_are_not_drawn(tab, tmp_path):
    values = [1e308, -1e308, 1.0, 2.0]
    lines = [
        {"step": step, "time": 1.0 * step, "metrics": {"loss/policy": value}}
        for step, value in enumerate(values)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tab.open(write_report(tmp_path).as_uri())
    path = tab.js("document.querySelector('.curve').getAttribute('d')")
    assert path.count("h0") == 2 and "NaN" not in path and "Infinity" not in path


def test_a_run_on_several_hosts_shows_them(tmp_path):
    hosts = [
        {"name": "a", "ranks": [0, 1], "devices": "2 x H200"},
        {"name": "b", "ranks": [2], "devices": "1 x H200"},
    ]
    assert ["Hosts", "a (2 ranks, 2 x H200), b (1 rank, 1 x H200)"] in _rows(
        tmp_path, {"host": "a", "hosts": hosts}
    )
    assert ["Hosts", "? (0 ranks, ?)"] in _rows(tmp_path, {"host": "a", "hosts": [3]})
    assert ["Host", "a"] in _rows(tmp_path, {"host": "a", "hosts": 5})


def _rows(folder, facts):
    (folder / "run.json").write_text(json.dumps(facts))
    return facts_of(RunReader(folder).read())["rows"]
