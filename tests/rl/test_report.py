"""The report page, as a real browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder

import pytest

from shardproof.rl.report import MAX_SAMPLES, write_report

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",  # root, as in most containers, cannot have one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u2028<!--"
)


class DomReader(HTMLParser):
    """An element tree from the HTML that Chromium dumps."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.builder = TreeBuilder()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in self.VOID:
            self.builder.end(tag)

    def handle_endtag(self, tag: str) -> None:
        self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        self.builder.data(data)


def open_page(page: Path, profile: Path, fragment: str = "") -> Element:
    """The DOM after the page's scripts ran. A message in the browser's console is a failure."""
    browser = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if browser is None:
        pytest.fail("Chromium is not installed. Fix: apt-get install -y --no-install-recommends chromium")
    command = [browser, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri() + fragment]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert result.returncode == 0, result.stderr
    assert "CONSOLE" not in result.stderr, result.stderr
    reader = DomReader()
    reader.feed(result.stdout.strip().removeprefix("<!DOCTYPE html>"))
    return reader.builder.close()


def text_of(element: Element | None) -> str:
    assert element is not None
    return " ".join(" ".join(element.itertext()).split())


def charts(dom: Element) -> dict[str, str]:
    """The caption of each chart that has a curve, by title, in the order of the page."""
    figures = dom.findall(".//figure")
    assert all(figure.find("svg/path[@class='curve']") is not None for figure in figures)
    return {figure.attrib["data-chart"]: text_of(figure.find("figcaption")) for figure in figures}


def tiles(dom: Element) -> dict[str, str]:
    return {
        text_of(tile.find("dt")): text_of(tile.find("dd")) for tile in dom.findall(".//*[@id='summary']/div")
    }


def rows(dom: Element, table: str) -> list[str]:
    return [text_of(row) for row in dom.findall(f".//table[@id='{table}']//tr")[1:]]


def write_lines(path: Path, records: list[dict]) -> None:
    # Not ASCII: U+2028 must reach the reader as it is.
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def make_metrics(num_steps: int) -> list[dict]:
    records = []
    for step in range(1, num_steps + 1):
        metrics = {
            "lr": 1e-4,
            "entropy/mean": 1.0 / step,
            "tokens_per_s": 15000.0 + step,
            "grad_norm": float("inf") if step == 5 else 0.5,
            "loss/policy": float("nan") if step == 5 else -0.01 * step,
            "kl/mean": 0.001 * step,
            "kl/max": 0.1 * step,
            "reward/std": 0.25,
            "reward/mean": 0.3 + 0.05 * step,
        }
        if step % 4 == 0:
            metrics["eval/reward"] = {4: 0.75, 8: 0.625}[step]
        records.append({"step": step, "time": 20.0 * step, "metrics": metrics})
    return records


def make_run(folder: Path) -> Path:
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", make_metrics(num_steps=8))
    config = {"algorithm": {"name": "grpo"}, "model": {"path": "models/tiny"}, "train": {"steps": 10}}
    (folder / "config.json").write_text(json.dumps(config))
    samples = [
        {"step": step, "prompt": f"{step}+{index}=", "completion": f"{step + index}", "reward": 1.0, "rewards": {"exact": 1.0}}
        for step in range(1, 9)
        for index in range(6)
    ]  # fmt: skip
    write_lines(folder / "samples.jsonl", samples)
    events = [
        {"step": 0, "kind": "receipt", "text": "loaded 38 tensors", "num_tensors": 38},
        {"step": 1, "kind": "receipt", "text": "sent version 1"},
        {"step": 5, "kind": "skip", "text": "T304 train_step: rank 1: not finite"},
        {"step": 6, "kind": "finding", "text": "R503 canary: rank 0: engine and trainer disagree"},
    ]
    write_lines(folder / "events.jsonl", events)
    return folder


def test_the_page_shows_the_run(tmp_path):
    page = write_report(make_run(tmp_path / "tiny-grpo"))
    assert page == tmp_path / "tiny-grpo" / "report.html"
    dom = open_page(page, tmp_path / "profile")
    assert text_of(dom.find(".//title")) == "tiny-grpo · shardproof"
    assert text_of(dom.find(".//header")) == "tiny-grpo grpo · models/tiny"
    assert tiles(dom) == {
        "Last step": "8 of 10",
        "Final reward": "0.7 from 0.35",
        "Best eval": "0.75 at step 4",
        "Skipped steps": "1",
        "Findings": "1",
        "Receipts": "2",
        "Duration": "2 min 40 s",
    }
    first = ["reward/mean", "eval/reward", "kl/mean", "loss/policy", "grad_norm", "tokens_per_s"]
    assert list(charts(dom)) == [*first, "entropy/mean", "kl/max", "lr"]
    assert charts(dom)["reward/mean"] == "reward/mean last: step 8 mean 0.7 std 0.25"
    assert not dom.findall(".//line[@class='cross']")
    assert rows(dom, "events-skip") == ["5 T304 train_step: rank 1: not finite"]
    assert rows(dom, "events-finding") == ["6 R503 canary: rank 0: engine and trainer disagree"]
    load, export = rows(dom, "events-receipt")
    assert load == '0 loaded 38 tensors details { "num_tensors": 38 }' and export == "1 sent version 1"
    samples = rows(dom, "samples")
    assert (
        len(samples) == MAX_SAMPLES and samples[0] == "8 1 exact 1 8+5= 13" and samples[-1].startswith("4 ")
    )
    config = dom.find(".//details[@id='config']")
    assert '"path": "models/tiny"' in text_of(config) and "open" not in config.attrib


def test_the_page_asks_for_nothing_from_outside(tmp_path):
    html = write_report(make_run(tmp_path / "run")).read_text()
    addresses = set(re.findall(r"https?://[^\"' ]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name of XML, never fetched
    assert re.findall(r"\b(?:src|href)=\"?([^\" >]*)", html) == ["data:,"]
    assert "default-src 'none'" in html


def test_the_crosshair_shows_the_values_at_a_step(tmp_path):
    page = write_report(make_run(tmp_path / "run"))
    dom = open_page(page, tmp_path / "profile", "#hover=3")
    shown = charts(dom)
    assert shown["reward/mean"] == "reward/mean step 3 mean 0.45 std 0.25"
    assert shown["tokens_per_s"] == "tokens_per_s step 3 15.003K"
    assert shown["eval/reward"] == "eval/reward step 3 -", "there was no evaluation at step 3"
    assert len(dom.findall(".//line[@class='cross']")) == len(shown)


def test_a_pointer_over_one_chart_moves_the_crosshair_of_all(tmp_path):
    page = write_report(make_run(tmp_path / "run"))
    # Three quarters along an axis that is inset by 50 and 10 pixels, over the chart with steps 4 and 8 only.
    move = """<script>
      const svg = document.querySelector("[data-chart='eval/reward'] svg"), box = svg.getBoundingClientRect();
      const clientX = box.left + 50 + (box.width - 60) * 0.75;
      svg.dispatchEvent(new PointerEvent("pointermove", { clientX }));
    </script></body>"""
    page.write_text(without_policy(page).replace("</body>", move))
    shown = charts(open_page(page, tmp_path / "profile"))
    assert shown["eval/reward"] == "eval/reward step 8 0.625"
    assert shown["kl/mean"] == "kl/mean step 8 0.008"


def without_policy(page: Path) -> str:
    html, count = re.subn(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page.read_text())
    assert count == 1
    return html


def test_hostile_text_stays_text(tmp_path):
    folder = make_run(tmp_path / "run")
    write_lines(folder / "metrics.jsonl", [{"step": 1, "time": 1.0, "metrics": {HOSTILE: 1.0}}])
    sample = {"prompt": HOSTILE, "completion": HOSTILE, "reward": 0.0, "rewards": {HOSTILE: 0.0}}
    write_lines(folder / "samples.jsonl", [{"step": 1, **sample}])
    write_lines(folder / "events.jsonl", [{"step": 1, "kind": HOSTILE, "text": HOSTILE, HOSTILE: HOSTILE}])
    (folder / "config.json").write_text(json.dumps({"algorithm": {"name": HOSTILE}}))
    page = write_report(folder)
    # The policy would stop what gets past the escapes, and so hide it from this test.
    page.write_text(without_policy(page))
    dom = open_page(page, tmp_path / "profile")
    assert text_of(dom.find(".//title")) == "run · shardproof"
    assert len(dom.findall(".//script")) == 2 and not dom.findall(".//img")
    assert list(charts(dom)) == [HOSTILE]
    assert ["".join(cell.itertext()) for cell in dom.findall(".//table[@id='samples']//td")[2:]] == [
        HOSTILE
    ] * 2


def test_the_policy_stops_a_script_that_is_not_ours(tmp_path):
    page = write_report(make_run(tmp_path / "run"))
    page.write_text(page.read_text().replace("</body>", "<script>document.title = 'taken'</script></body>"))
    with pytest.raises(AssertionError, match="Content Security Policy"):
        open_page(page, tmp_path / "profile")


def test_values_that_are_not_finite_are_gaps_that_are_counted(tmp_path):
    page = write_report(make_run(tmp_path / "run"))
    dom = open_page(page, tmp_path / "profile", "#hover=5")
    assert charts(dom)["loss/policy"] == "loss/policy step 5 not finite (1 not finite)"
    path = dom.find(".//figure[@data-chart='loss/policy']/svg/path").attrib["d"]
    assert path.count("M") == 2 and path.count("L") == 5
    assert "NaN" not in path


def test_an_empty_folder_has_a_page(tmp_path):
    folder = tmp_path / "nothing-yet"
    folder.mkdir()
    dom = open_page(write_report(folder), tmp_path / "profile", "#hover=3")
    assert charts(dom) == {}
    assert set(tiles(dom).values()) == {"-", "0"}


def test_torn_and_repeated_lines(tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 8, "time": 170.0, "metrics": {"reward/mean": 0.9}}) + "\n")
        file.write('{"step": 9, "ti')
    (folder / "config.json").write_text("{")
    # Half of a surrogate pair is valid JSON and has no UTF-8.
    sample = {"step": 1, "prompt": "\ud800", "completion": "x" * 5000, "reward": 1.0}
    (folder / "samples.jsonl").write_text(json.dumps(sample))
    dom = open_page(write_report(folder), tmp_path / "profile")
    notes = [text_of(note) for note in dom.findall(".//p[@class='note']")]
    assert notes == ["metrics.jsonl: 1 unreadable line left out.", "config.json cannot be read."]
    assert tiles(dom)["Final reward"] == "0.9 from 0.35" and tiles(dom)["Last step"] == "8"
    assert rows(dom, "samples")[0].endswith("… and 1000 more characters")
