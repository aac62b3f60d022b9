"""What a reader can do with the curves: smooth, zoom, search, change the axes; with a mouse, a finger or a keyboard."""

from __future__ import annotations

import json
import math

import pytest

from shardproof.report.page import write_report
from tests.report.folders import add_events, make_run, proof, write_lines

CHART = "figure[data-chart='kl/mean']"


@pytest.fixture
def page(tmp_path):
    return write_report(make_run(tmp_path / "run", num_steps=40)).as_uri()


def axis(tab, chart: str = CHART) -> list[str]:
    """The labels of the x axis."""
    selector = json.dumps(f"{chart} > svg > text[text-anchor=middle]")
    return tab.js(f"[...document.querySelectorAll({selector})].map(node => node.textContent)")


def path_of(tab, selector: str) -> str:
    return tab.js(f"document.querySelector({json.dumps(selector)}).getAttribute('d')")


def test_smoothing_keeps_the_raw_curve_in_sight(tab, page):
    tab.open(page)
    raw = path_of(tab, f"{CHART} .curve")
    tab.set("#smooth", "0.9")
    tab.wait(f'document.querySelector("{CHART} .curve.smooth") !== null')
    assert path_of(tab, f"{CHART} .curve.raw") == raw != path_of(tab, f"{CHART} .curve.smooth")
    # A straight line from 0.001 to 0.04; an average that begins with the first value.
    weights = [0.9 ** (40 - step) for step in range(1, 41)]
    average = sum(w * 0.001 * step for w, step in zip(weights, range(1, 41))) / sum(weights)
    assert f" smoothed {average:.4g}" in tab.text(f"{CHART} figcaption")
    # Few evaluations make a curve; an average of them would hide how many there are.
    assert tab.count("figure[data-chart='eval/reward'] .smooth") == 0
    tab.set("#smooth", "0")
    tab.wait("document.querySelector('.curve.smooth') === null")


def test_a_drag_zooms_all_charts_and_a_double_click_resets(tab, page):
    tab.open(page)
    whole = axis(tab)
    box = tab.box(f"{CHART} svg")
    plot = box["width"] - 62
    tab.drag(box["x"] + 52 + plot * 0.5, box["x"] + 52 + plot * 0.75, box["y"] + 60)
    zoomed = axis(tab)
    assert zoomed != whole and all(20 <= float(step) <= 31 for step in zoomed)
    assert axis(tab, "figure[data-chart='eval/reward']") == zoomed
    assert not tab.js("document.getElementById('reset').hidden")
    for count in (1, 2):
        tab.mouse("mousePressed", box["x"] + 100, box["y"] + 60, button="left", clickCount=count)
        tab.mouse("mouseReleased", box["x"] + 100, box["y"] + 60, button="left", clickCount=count)
    assert axis(tab) == whole and tab.js("document.getElementById('reset').hidden")


def test_a_finger_zooms_too(phone, page):
    phone.open(page)
    whole = axis(phone)
    box = phone.box(f"{CHART} svg")
    plot = box["width"] - 62
    phone.touch_drag(box["x"] + 52 + plot * 0.2, box["x"] + 52 + plot * 0.6, box["y"] + 60)
    phone.wait("!document.getElementById('reset').hidden")
    assert axis(phone) != whole
    phone.click("#reset")
    assert axis(phone) == whole


def test_the_keyboard_moves_the_crosshair_and_zooms(tab, page):
    tab.open(page)
    tab.js(f'document.querySelector("{CHART} > svg").focus()')
    for _ in range(3):
        tab.key("ArrowRight")
    assert "step 3" in tab.text(f"{CHART} .at") and "step 3" in tab.text("figure[data-chart='kl/max'] .at")
    whole = axis(tab)
    for _ in range(17):
        tab.key("ArrowRight")
    tab.key("+")
    assert axis(tab) != whole
    tab.key("Escape")
    assert axis(tab) == whole


def test_every_control_can_be_reached_with_the_tab_key(tab, page):
    tab.open(page)
    reached = set()
    for _ in range(30):
        tab.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        tab.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(tab.js("document.activeElement.id || document.activeElement.tagName"))
    assert {"search", "smooth", "log", "SUMMARY", "svg", "BUTTON"} <= reached
    unnamed = tab.js(
        "[...document.querySelectorAll('input, button')].filter(node => !(node.labels && node.labels.length)"
        " && !node.getAttribute('aria-label') && !node.textContent).length"
    )
    assert unnamed == 0


def test_log_axes_one_by_one_and_all_at_once(tab, page):
    tab.open(page)
    linear = path_of(tab, f"{CHART} .curve")
    tab.click(f"{CHART} .log")
    assert path_of(tab, f"{CHART} .curve") != linear
    assert tab.js(f"document.querySelector(\"{CHART} .log\").getAttribute('aria-pressed')") == "true"
    other = "figure[data-chart='kl/max']"
    before = path_of(tab, f"{other} .curve")
    tab.click("#log")
    assert path_of(tab, f"{other} .curve") != before
    # A loss that is never above zero has no logarithm, and stays as it is.
    assert tab.js("document.querySelector(\"figure[data-chart='loss/policy'] .log\").disabled")
    assert "NaN" not in path_of(tab, "figure[data-chart='loss/policy'] .curve")


def test_time_on_the_x_axis(tab, page):
    tab.open(page)
    tab.click("input[name=x][value=time]")
    assert axis(tab)[-1].endswith("min") and tab.text(f"{CHART} .at") == "last: 13.333 min"
    tab.open(page + "#hover=3")
    tab.click("input[name=x][value=time]")
    assert tab.text(f"{CHART} .at") == "60 s"


def test_search_leaves_the_charts_that_match(tab, page):
    tab.open(page)
    tab.set("#search", "KL")
    shown = "[...document.querySelectorAll('figure:not([hidden])')].map(node => node.dataset.chart)"
    assert tab.js(shown) == ["kl/mean", "kl/max"]
    assert tab.text("#found").startswith("2 of ")
    tab.set("#search", "exact_match")  # the other name of a curve that is shown once
    assert tab.js(shown) == ["reward/mean"]
    tab.set("#search", "nothing has this name")
    assert tab.js(shown) == [] and tab.count(".group:not([hidden])") == 0
    tab.set("#search", "")
    assert len(tab.js(shown)) > 8


@pytest.mark.parametrize("width", [320, 390, 768, 1440])
def test_no_width_scrolls_sideways(browser, tmp_path, width):
    folder = make_run(tmp_path / ("a-rather-long-name-of-a-run-" * 4))
    sample = {"step": 9, "prompt": "w" * 500, "completion": "x" * 3000, "reward": 1.0, "answer": "y" * 300}
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample) + "\n")
    with browser.tab(width, 844) as tab:
        tab.open(write_report(folder).as_uri())
        tab.js("document.querySelectorAll('details').forEach(node => { node.open = true })")
        tab.wait("document.querySelector('#config pre') !== null")
        assert tab.js("document.documentElement.scrollWidth") <= width
        tab.click("#samples input[value=ends]")
        assert tab.js("document.documentElement.scrollWidth") <= width


def test_the_numbers_of_eight_ranks_are_readable_on_a_phone(phone, tmp_path):
    folder = make_run(tmp_path / "run")
    add_events(folder, *(proof("load", 0, role="critic", rank=rank) for rank in range(8)))
    phone.open(write_report(folder).as_uri())
    chips = "[...document.querySelectorAll('.strip b')].filter(chip => chip.textContent.startsWith('rank'))"
    assert phone.js(f"{chips}.length") >= 8
    inside = (
        "chip => chip.getBoundingClientRect().bottom <= chip.parentNode.getBoundingClientRect().bottom + 1"
    )
    assert phone.js(f"{chips}.every({inside})")
    assert phone.js(f"{chips}.every(chip => chip.scrollHeight <= chip.clientHeight + 1)")
    assert phone.js("document.documentElement.scrollWidth") <= 390


def test_light_and_dark(browser, page):
    colours = []
    for dark in (False, True):
        with browser.tab(dark=dark) as tab:
            tab.open(page)
            colours.append(tab.js("getComputedStyle(document.body).backgroundColor"))
    light, dark = ([int(part) for part in colour[4:-1].split(",")] for colour in colours)
    assert min(light) > 200 and max(dark) < 60


def test_a_run_of_ten_thousand_steps(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    names = [f"group{index % 6}/metric{index}" for index in range(59)]
    records = [
        {
            "step": step,
            "time": 0.5 * step,
            "metrics": {name: math.sin(step * 0.01 * (place + 1)) + 2 for place, name in enumerate(names)}
            | {"reward/mean": 1e6 if step == 7777 else step / 10_000},
        }
        for step in range(1, 10_001)
    ]
    write_lines(folder / "metrics.jsonl", records)
    page = write_report(folder)
    assert page.stat().st_size < 3_000_000
    tab.open(page.as_uri())
    assert tab.count("figure .curve") == 60
    assert "2,000 points" in tab.text("#constants .note")
    # The one outlier is there, at its step.
    tab.open(page.as_uri() + "#hover=7777")
    assert "1M" in tab.text("figure[data-chart='reward/mean'] .keys")
