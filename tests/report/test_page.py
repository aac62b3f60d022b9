"""The page of a run, as a real browser shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardproof.report.curves import charts_of
from shardproof.report.page import write_report
from shardproof.report.read import RunReader
from shardproof.report.summary import numbers_of
from tests.claims import leave_claim
from tests.report.folders import (
    HOSTILE,
    add_events,
    make_config,
    make_facts,
    make_run,
    proof,
    sync,
    write_lines,
)

GREEN, RED = "good", "bad"


def open_run(tab, folder: Path, fragment: str = ""):
    return tab.open(write_report(folder).as_uri() + fragment)


def captions(tab) -> dict[str, str]:
    """The caption of each chart that is shown, by title, in the order of the page."""
    titles = tab.js("[...document.querySelectorAll('figure:not([hidden])')].map(node => node.dataset.chart)")
    return dict(zip(titles, tab.texts("figure:not([hidden]) figcaption"), strict=True))


def groups(tab) -> dict[str, list[str]]:
    """The titles of the charts of each group that is shown."""
    return tab.js(
        "Object.fromEntries([...document.querySelectorAll('.group:not([hidden])')].map(group => [group.querySelector('h3')"
        ".textContent, [...group.querySelectorAll('figure:not([hidden])')].map(figure => figure.dataset.chart)]))"
    )


def proof_rows(tab) -> dict[str, str]:
    """The class of each row of the ledger: good or bad."""
    return tab.js(
        "Object.fromEntries([...document.querySelectorAll('.proof')].map(row => [row.dataset.group, row.classList[1]]))"
    )


def test_the_sections_follow_each_other(tab, tmp_path):
    page = write_report(make_run(tmp_path / "tiny-grpo"))
    assert page == tmp_path / "tiny-grpo" / "report.html"
    tab.open(page.as_uri())
    assert tab.text("title") == "tiny-grpo · shardproof"
    assert tab.text("header h1") == "tiny-grpo"
    assert tab.text("header .words") == "grpo · models/tiny · fsdp2 · 2 ranks"
    assert tab.texts("header .state span") == ["finished", "step 8 of 8", "2 min 40 s"]
    assert tab.text("#alerts").startswith("✓ No findings")
    order = tab.js("[...document.querySelectorAll('main section[id]')].map(node => node.id)")
    assert order == ["ledger", "numbers", "curves", "samples", "facts"]


def test_the_ledger_has_every_load_sync_checkpoint_and_export(tab, tmp_path):
    open_run(tab, make_run(tmp_path / "run"))
    rows = [
        "Load · policy",
        "Load · reference",
        "Weight sync · policy",
        "Checkpoint · policy",
        "Export · policy",
    ]
    assert proof_rows(tab) == dict.fromkeys(rows, GREEN)
    assert tab.text("#ledger h2") == "Proof ledger ✓ 16 proofs, all passed"
    load, _, syncs, checkpoints, _ = tab.texts(".proof > summary .what")
    assert load == "Load · policy2 ranks · step 0"
    assert syncs == "Weight sync · policy9 syncs · worst canary gap 8.00e-6, allowed 1.00e-4 · last at step 8"
    assert checkpoints == "Checkpoint · policy2 checkpoints · last at step 8"
    assert tab.texts(".proof .compared")[2] == "what a sync compares"
    assert tab.count("[data-group='Weight sync · policy'] .strip i") == 9
    tab.click("[data-group='Load · policy'] > summary")
    tab.wait("document.querySelectorAll('[data-proof=load] tbody tr').length === 2")
    assert tab.texts("[data-proof=load] tbody tr:nth-child(2) td")[:3] == ["0", "1", "✓ passed"]


@pytest.mark.fault
def test_a_failed_proof_is_red_at_the_top(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    finding = {
        "code": "R502",
        "stage": "sync",
        "message": "'lm_head.weight' is wrong.",
        "rank": 1,
        "tensor": "lm_head.weight",
    }
    add_events(folder, sync(9, passed=False, findings=[finding | {"fix": "send it again"}]))
    open_run(tab, folder)
    assert proof_rows(tab)["Weight sync · policy"] == RED
    assert tab.text("#ledger h2") == "Proof ledger ✗ 1 of 17 proofs failed"
    alert = tab.text("#alerts .alert.bad")
    assert alert.startswith("Failed proofs: 1") and "R502 sync: rank 1: 'lm_head.weight' is wrong." in alert
    assert "Fix: send it again" in alert
    # On a laptop nobody has to scroll to see it.
    bottom = tab.js("document.querySelector('#alerts .alert.bad').getBoundingClientRect().bottom")
    assert bottom < 400
    assert tab.count("[data-group='Weight sync · policy'] .strip i.bad") == 1
    # The row is open, at the proof that failed.
    assert "'lm_head.weight' is wrong." in tab.text("[data-proof=sync]")


@pytest.mark.fault
def test_a_proof_that_ended_the_run_is_named_once(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    text = "R503 sync: their log-probs differ.\nFix: compare their weights"
    finding = {
        "code": "R503",
        "stage": "sync",
        "message": "their log-probs differ.",
        "rank": None,
        "fix": None,
    }
    add_events(folder, sync(9, passed=False, text=text, findings=[finding]))
    add_events(folder, {"step": 9, "kind": "finding", "text": text})
    open_run(tab, folder)
    assert tab.texts("#alerts .alert > summary b") == ["Failed proofs: 1"]
    assert tab.text("#alerts .text") == " ".join(text.split())
    assert tab.texts("[data-proof=sync] .text.bad") == [" ".join(text.split())]


def test_thousands_of_syncs_are_one_row_that_opens_page_by_page(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    write_lines(folder / "events.jsonl", [sync(step, passed=step != 1500) for step in range(3000)])
    open_run(tab, folder)
    row = "[data-group='Weight sync · policy']"
    assert "3,000 syncs" in tab.text(f"{row} .what")
    assert tab.count(f"{row} .strip i") == 160 and tab.count(f"{row} .strip i.bad") == 1
    assert tab.count(f"{row} tbody tr") == 20 and tab.text(f"{row} .pager span") == "page 76 of 150"
    tab.click(f"{row} .pager [aria-label='next page']")
    assert tab.text(f"{row} tbody td") == "1520"
    tab.click(f"{row} .pager input")
    assert tab.texts(f"{row} tbody td:first-child") == ["1500"]


def test_receipts_of_earlier_versions_are_shown(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    receipts = [
        {"step": 0, "kind": "receipt", "text": "loaded 38 tensors", "num_tensors": 38},
        {"step": 8, "kind": "receipt", "text": "something else"},
    ]
    write_lines(folder / "events.jsonl", receipts)
    open_run(tab, folder)
    assert proof_rows(tab) == {"Load": GREEN, "Receipt": GREEN}
    tab.click("[data-group='Load'] > summary")
    tab.wait("document.querySelector('[data-proof=load] .receipt') !== null")
    tab.click("[data-proof=load] .receipt summary")
    tab.wait("document.querySelector('[data-proof=load] .fields') !== null")
    assert tab.text("[data-proof=load] .fields") == "num_tensors38"


def test_problems_are_a_banner(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    errors = [
        {"step": step, "kind": "reward", "text": "exact_match: KeyError: 'answer'"} for step in (2, 3, 7)
    ]
    others = [
        {"step": 5, "kind": "skip", "text": "T304: rank 1, lm_head.weight"},
        {"step": 6, "kind": "finding", "text": "R503 canary: engine and trainer disagree"},
        {"step": 6, "kind": "superseded", "text": "model is now superseded-model"},
    ]
    add_events(folder, *errors, *others)
    open_run(tab, folder)
    assert tab.texts("#alerts .alert > summary b") == ["Findings: 1", "Reward errors: 3", "Skipped steps: 1"]
    tab.click("#alerts .alert.warn summary")
    tab.wait("document.querySelector('#alerts .alert.warn ul') !== null")
    assert tab.texts("#alerts .alert.warn ul")[0] == "3 times, steps 2 to 7exact_match: KeyError: 'answer'"
    assert tab.count("figure[data-chart='kl/mean'] .skip") == 1
    assert tab.text("#events summary") == "Other events (1)"


def test_key_numbers(tab, tmp_path):
    open_run(tab, make_run(tmp_path / "run"))
    labels = tab.texts("#numbers dt")
    values = dict(zip(labels, tab.texts("#numbers dd:not(.more)"), strict=True))
    assert values["Reward"] == "0.35 → 0.7"
    assert values["Held-out reward"] == "0.625 ± 0.062 → 0.750 ± 0.031"
    assert values["Tokens per second"] == "15,004" and values["Time per step"] == "20 s"
    split = values["Where the time went"]
    assert split == "Rollout 50%Waiting for rewards 10%Update 30%Other parts of steps 10%Checkpoints 0.3%"
    assert "change +0.125 ± 0.07" in tab.texts("#numbers .more")[1]


def test_charts_are_grouped_and_say_each_thing_once(tab, tmp_path):
    open_run(tab, make_run(tmp_path / "run"))
    assert groups(tab) == {
        "Reward and completions": ["reward/mean"],
        "Evaluation": ["eval/reward"],
        "Optimisation": ["kl/mean", "loss/policy", "grad_norm", "entropy/mean", "kl/max"],
        "Engine match": ["canary/gap"],
        "Time": ["tokens_per_s"],
        "Memory": ["memory/peak"],
        "Other": ["my_own"],
    }
    reward = captions(tab)["reward/mean"]
    assert reward == "reward/meanlast: step 8= reward/exact_matchmean 0.7std 0.33"
    constants = "Constant: lr 1.00e-4, time/reward 2, time/rollout 12, time/step 20, time/update 6"
    assert tab.text(".constants") == constants
    assert tab.count("figure[data-chart='eval/reward'] .band") == 1
    assert captions(tab)["eval/reward"].endswith("0.75 ± 0.031")


def test_an_interval_is_drawn_from_end_to_end_also_where_the_value_is_not_in_its_middle(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, value in zip(found, (0.0, 0.25), strict=False):  # Wilson's of 4 rows
        low, high = ((0.0, 0.5), (0.0625, 0.6875))[bool(value)]
        line["metrics"] |= {"eval/pass@1": value, "eval/pass@1_low": low, "eval/pass@1_high": high}
    write_lines(folder / "metrics.jsonl", found)
    (chart,) = (
        each for each in charts_of([RunReader(folder).read()])["charts"] if each["title"] == "eval/pass@1"
    )
    assert chart["series"][0]["band"] == [[0.0, 0.5], [0.1875, 0.4375]]
    open_run(tab, folder)
    assert tab.count("figure[data-chart='eval/pass@1'] .band") == 1
    assert captions(tab)["eval/pass@1"].endswith("0.25 (0.0625 to 0.6875)")


def test_metrics_of_given_completions_teachers_pools_and_sets_stand_where_they_belong(tmp_path):
    values = {
        **{
            f"{name}/{kind}": 0.0
            for name in ("reward", "logps", "eval/a/reward")
            for kind in ("chosen", "rejected")
        },
        **{"teacher/kl": 0.1, "teacher/kl_k3": 0.2, "pool/easy": 0.3, "pool/hard": 0.4},
        **{"data/share/a": 0.5, "data/share/b": 0.6, "version": 0.7},
        **{"eval/aime/pass@8": 0.8, "eval/aime/pass@32": 0.9, "eval/aime/reward": 1.0},
    }
    lines = [
        {
            "step": step,
            "metrics": {
                name: value + (place + 1) * step for place, (name, value) in enumerate(values.items())
            },
        }
        for step in (1, 2)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    run = RunReader(tmp_path).read()
    shown = charts_of([run])
    charts = {each["title"]: [series["name"] for series in each["series"]] for each in shown["charts"]}
    assert charts == {
        "teacher/kl": ["teacher/kl", "teacher/kl_k3"],
        "logps/chosen": ["logps/chosen", "logps/rejected"],
        "reward/chosen": ["reward/chosen", "reward/rejected"],
        "eval/a/reward/chosen": ["eval/a/reward/chosen", "eval/a/reward/rejected"],
        "data/share": ["data/share/a", "data/share/b"],
        "pool": ["pool/easy", "pool/hard"],
        "eval/aime/pass@8": ["eval/aime/pass@8"],
        "eval/aime/pass@32": ["eval/aime/pass@32"],
        "eval/aime/reward": ["eval/aime/reward"],
        "version": ["version"],
    }
    assert [title for title in charts if "pass" in title] == ["eval/aime/pass@8", "eval/aime/pass@32"]
    assert shown["groups"] == ["Reward and completions", "Data", "Evaluation", "Optimisation"]
    labels = [number["label"] for number in numbers_of(run)]
    assert labels == ["KL to the teacher", "aime reward"]


def test_a_curve_that_stands_for_another_has_its_band(tmp_path):
    ends = {"eval/pass@1_low": 0.25, "eval/pass@1_high": 0.75}
    lines = [
        {"step": step, "metrics": {"eval/exact_match": right, "eval/pass@1": right, **ends}}
        for step, right in ((0, 0.5), (1, 0.625))
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    (chart,) = charts_of([RunReader(tmp_path).read()])["charts"]
    assert (chart["title"], chart["same"]) == ("eval/exact_match", ["eval/pass@1"])
    assert chart["series"][0]["band"] == [[0.25, 0.25], [0.375, 0.125]]


def test_the_crosshair_shows_the_values_at_a_step(tab, tmp_path):
    open_run(tab, make_run(tmp_path / "run"), "#hover=3")
    shown = captions(tab)
    assert shown["reward/mean"] == "reward/meanstep 3= reward/exact_matchmean 0.45std 0.28"
    assert shown["tokens_per_s"] == "tokens_per_sstep 3 15.003K"
    assert shown["eval/reward"] == "eval/rewardstep 3 -", "there was no evaluation at step 3"
    assert tab.count("line.cross") == len(shown)


def test_a_pointer_over_one_chart_moves_the_crosshair_of_all(tab, tmp_path):
    open_run(tab, make_run(tmp_path / "run"))
    box = tab.box("[data-chart='eval/reward'] svg")
    # Three quarters along an axis that is inset by 52 and 10 pixels, over the chart with steps 4 and 8 only.
    tab.mouse("mouseMoved", box["x"] + 52 + (box["width"] - 62) * 0.75, box["y"] + 50)
    assert captions(tab)["eval/reward"] == "eval/rewardstep 8 0.75 ± 0.031"
    assert captions(tab)["kl/mean"] == "kl/meanstep 8 0.008"


def test_values_that_are_not_finite_are_gaps_that_are_counted(tab, tmp_path):
    open_run(tab, make_run(tmp_path / "run"), "#hover=5")
    assert captions(tab)["loss/policy"] == "loss/policystep 5 not finite (1 not finite)"
    path = tab.js("document.querySelector(\"figure[data-chart='loss/policy'] .curve\").getAttribute('d')")
    assert path.count("M") == 2 and path.count("L") == 5 and "NaN" not in path


def test_samples_by_step_group_and_answer(tab, tmp_path):
    open_run(tab, make_run(tmp_path / "run"))
    assert tab.text("#samples output") == "step 8"
    tab.set("#sample-step", "2")
    assert tab.text("#samples output") == "step 3"
    card = tab.text("#samples .sample-group")
    assert card.startswith("Prompt3+1=Expected answer42 of 4 completions")
    first = tab.text("#samples .completion")
    assert first == "1advantage +1.5exact_match 1length 0.54"
    assert tab.texts("#samples .group-rewards .reward") == ["1", "0", "0", "0"]
    tab.click("#samples [aria-label='previous step']")
    assert tab.text("#samples output") == "step 2"
    tab.click("#samples input[value=ends]")
    assert tab.texts("#samples .column h3") == ["Step 1", "Step 8"]


def test_the_facts_of_the_run(tab, tmp_path):
    open_run(tab, make_run(tmp_path / "run"))
    facts = dict(zip(tab.texts(".facts dt"), tab.texts(".facts dd"), strict=True))
    assert facts["Command"] == "shardproof train tiny.toml" and facts["Commit"] == "abc123"
    assert facts["CPU"] == "a CPU, 2 cores, 8 GiB memory" and facts["torch"] == "2.13.0"
    assert tab.texts("#changed tbody td") == ["optimizer.lr", "0.0001", "1e-06"]
    assert tab.count("#config[open]") == 0
    tab.click("#config summary")
    tab.wait("document.querySelector('#config pre') !== null")
    assert '"path": "models/tiny"' in tab.text("#config pre")


@pytest.mark.parametrize(
    ("status", "shown"),
    [("running", "running"), ("stopped", "stopped"), ("failed", "failed"), (None, "finished")],
)
def test_how_the_run_ended(tab, tmp_path, status, shown):
    folder = make_run(tmp_path / "run")
    (folder / "run.json").write_text(json.dumps(make_facts(status)))
    open_run(tab, folder)
    assert tab.text("header .status") == shown
    assert tab.count("#alerts .alert.bad") == (status == "failed")


@pytest.mark.fault
def test_a_killed_run_is_not_running(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "run.json").write_text(json.dumps(make_facts("running")))
    leave_claim(folder)
    open_run(tab, folder)
    assert tab.text("header .status") == "killed" and tab.count("progress") == 0
    assert tab.text("#alerts .alert.bad").startswith("The run was killed")


def test_what_failed_before_a_resume_stays_in_sight(tab, tmp_path):
    """The ledger is green: the steps were taken again. What went wrong in them is still named."""
    folder = make_run(tmp_path / "run")
    add_events(folder, {"step": 3, "kind": "publish", "text": "the upload failed"})
    text = "R503 sync: the log-probs differ"
    earlier = [sync(9, passed=False, text=text), {"step": 8, "kind": "finding", "text": text}, sync(7)]
    write_lines(folder / "events.superseded.jsonl", earlier)
    open_run(tab, folder)
    assert "failed" not in tab.text("#ledger h2")
    titles = [f"{title}: 1" for title in ("Upload", "Failed in steps that were repeated later")]
    assert tab.texts("#alerts .alert summary b")[-2:] == titles


def test_an_empty_folder_has_a_page(tab, tmp_path):
    folder = tmp_path / "nothing-yet"
    folder.mkdir()
    open_run(tab, folder, "#hover=3")
    assert captions(tab) == {} and proof_rows(tab) == {}
    assert (
        tab.text("#constants") == "No metrics yet." and tab.text("header .state") == "not finishedno step yet"
    )


@pytest.mark.parametrize(
    "missing", ["metrics.jsonl", "events.jsonl", "samples.jsonl", "config.json", "run.json"]
)
def test_any_file_may_be_missing(tab, tmp_path, missing):
    folder = make_run(tmp_path / "run")
    (folder / missing).unlink()
    open_run(tab, folder)
    assert tab.count("section[id]") == 5


@pytest.mark.fault
def test_torn_and_repeated_lines(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 8, "time": 170.0, "metrics": {"reward/mean": 0.9}}) + "\n")
        file.write('{"step": 9, "ti')
    (folder / "config.json").write_text("{")
    # Half of a surrogate pair is valid JSON and has no UTF-8.
    sample = {"step": 1, "prompt": "\ud800", "completion": "x" * 5000, "reward": 1.0}
    (folder / "samples.jsonl").write_text(json.dumps(sample))
    open_run(tab, folder)
    assert tab.texts("#notes .note") == [
        "metrics.jsonl: 1 unreadable line left out.",
        "config.json cannot be read.",
    ]
    assert "0.35 → 0.9" in tab.texts("#numbers dd")
    assert tab.text("#samples .completion").endswith("… and 1000 more characters")


def test_the_page_asks_for_nothing_from_outside(tab, tmp_path):
    page = write_report(make_run(tmp_path / "run"))
    html = page.read_text()
    addresses = set(re.findall(r"https?://[^\"' ;]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name of XML, never fetched
    assert re.findall(r"\b(?:src|href)=\"?([^\" >]*)", html) == ["data:,"]
    assert "default-src 'none'" in html and "unsafe" not in html
    assert tab.open(page.as_uri()).requests() == [page.as_uri()]


def without_policy(page: Path) -> str:
    html, count = re.subn(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page.read_text())
    assert count == 1
    return html


@pytest.mark.fault
def test_hostile_text_stays_text(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    metrics = [{"step": step, "time": 1.0 * step, "metrics": {HOSTILE: 1.0 * step}} for step in (1, 2)]
    write_lines(folder / "metrics.jsonl", metrics)
    sample = {"prompt": HOSTILE, "completion": HOSTILE, "reward": 0.0, "rewards": {HOSTILE: 0.0, "b": 1.0}}
    write_lines(folder / "samples.jsonl", [{"step": 1, "answer": HOSTILE, **sample}])
    events = [
        {"step": 1, "kind": kind, "text": HOSTILE, HOSTILE: HOSTILE}
        for kind in (HOSTILE, "finding", "receipt")
    ]
    failed = proof(
        HOSTILE, 1, False, role=HOSTILE, compared=HOSTILE, findings=[{"message": HOSTILE, "code": HOSTILE}]
    )
    write_lines(folder / "events.jsonl", [*events, failed])
    (folder / "config.json").write_text(json.dumps({"algorithm": {"name": HOSTILE}}))
    changed = {HOSTILE: {"value": HOSTILE, "default": HOSTILE}}
    (folder / "run.json").write_text(json.dumps(make_facts(HOSTILE, command=HOSTILE, changed=changed)))
    page = write_report(folder)
    # The policy would stop what gets past the escapes, and so hide it from this test.
    page.write_text(without_policy(page))
    tab.open(page.as_uri())
    tab.js("document.querySelectorAll('details').forEach(node => { node.open = true })")
    tab.wait("document.querySelectorAll('details .text').length > 3")
    assert tab.text("title") == "run · shardproof"
    assert tab.count("script") == 2 and tab.count("img") == 0
    assert list(captions(tab)) == [HOSTILE]
    shown = "document.querySelector('#samples .completion > .text').textContent"
    assert tab.js(shown) == HOSTILE


@pytest.mark.fault
def test_the_policy_stops_a_script_that_is_not_ours(tab, tmp_path):
    page = write_report(make_run(tmp_path / "run"))
    page.write_text(page.read_text().replace("</body>", "<script>document.title = 'taken'</script></body>"))
    tab.open(page.as_uri(), quiet=False)
    assert any("Content Security Policy" in message for message in tab.messages())
    assert tab.text("title") == "run · shardproof"


def test_settings_may_be_of_any_shape(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "config.json").write_text(json.dumps(make_config() | {"train": 3, "model": [1]}))
    (folder / "run.json").write_text(json.dumps({"hardware": 3, "changed": [], "packages": 4, "ranks": "x"}))
    open_run(tab, folder)
    assert tab.text("header .words") == "grpo"
