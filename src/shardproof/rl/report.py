"""The page of a run: `report.html`, one file that needs no network, made from the files in the run folder."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from shardproof.bounds import within
from shardproof.files import write_atomic

FIRST_METRICS = ("reward/mean", "eval/reward", "kl/mean", "loss/policy", "grad_norm", "tokens_per_s")
# These share the axes of the quantity's mean. Extremes do not: one outlier would flatten the other curves.
STATISTICS = ("mean", "median", "std", "group_std")
EVENT_TITLES = {"finding": "Findings", "skip": "Skipped steps", "receipt": "Receipts"}
MAX_SAMPLES, MAX_EVENTS_FIRST, MAX_EVENTS_LAST, MAX_CHARACTERS = 30, 20, 180, 4000

Record = Mapping[str, Any]


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the run folder, from what is there so far, and return its path."""
    notes: list[str] = []
    metrics = merge_steps(_read_lines(run_folder / "metrics.jsonl", notes))
    samples = _read_lines(run_folder / "samples.jsonl", notes)
    events = _read_lines(run_folder / "events.jsonl", notes)
    config = _read_config(run_folder / "config.json", notes)
    name = run_folder.resolve().name
    kinds = dict.fromkeys((*EVENT_TITLES, *(str(event.get("kind")) for event in events)))
    by_kind = {kind: [event for event in events if str(event.get("kind")) == kind] for kind in kinds}
    body = [
        _header(name, config),
        _summary(metrics, by_kind, config),
        "".join(f"<p class=note>{escape(note)}</p>" for note in notes),
        "<section><h2>Curves</h2><noscript>The curves need JavaScript.</noscript><div id=curves></div></section>",
        *(_events_section(kind, by_kind[kind]) for kind in kinds if kind != "receipt"),
        _samples_section(samples),
        _events_section("receipt", by_kind["receipt"]),
        _config_section(config),
    ]
    skipped = sorted({event["step"] for event in by_kind["skip"] if isinstance(event.get("step"), int)})
    page = _page(name, "\n".join(body), {"charts": group_curves(metrics), "skipped": skipped})
    path = run_folder / "report.html"
    # A completion may hold half of a surrogate pair, which UTF-8 cannot say: it must not cost the whole report.
    write_atomic(path, page.encode("utf-8", "replace"))
    return path


def merge_steps(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One record per step, in order. A resumed run writes some steps again, and the later line counts."""
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        step, values = record.get("step"), record.get("metrics")
        if not isinstance(step, int) or not isinstance(values, dict):
            continue
        merged = steps.setdefault(step, {"step": step, "time": None, "metrics": {}})
        merged["time"] = _finite(record.get("time"))
        merged["metrics"] |= {str(name): _finite(value) for name, value in values.items()}
    return [steps[step] for step in sorted(steps)]


def group_curves(metrics: Iterable[Record]) -> list[dict[str, Any]]:
    """The charts in the order of the page: a title, and the steps and values of each curve; None is not finite."""
    curves: dict[str, dict[str, Any]] = {}
    for record in metrics:
        for name, value in record["metrics"].items():
            curve = curves.setdefault(name, {"name": name, "steps": [], "values": []})
            curve["steps"].append(record["step"])
            # Six digits are more than a curve shows, and half the bytes of seventeen.
            curve["values"].append(None if value is None else float(f"{value:.6g}"))
    order = {name: index for index, name in enumerate(FIRST_METRICS)}
    charts: dict[str, list[dict[str, Any]]] = {}
    for name in sorted(curves, key=lambda name: (order.get(name, len(order)), name)):
        quantity, _, statistic = name.rpartition("/")
        shared = statistic in STATISTICS and f"{quantity}/mean" in curves
        charts.setdefault(f"{quantity}/mean" if shared else name, []).append(curves[name])
    return [{"title": title, "series": series} for title, series in charts.items()]


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)  # and an int of any size
    return float(value) if is_number and within(abs(value), sys.float_info.max) else None


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file, none if it is missing; lines that cannot be read are counted in the notes."""
    if not path.is_file():
        return []
    # Not splitlines(): it also splits at U+2028, which a completion may hold.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        parsed = [_parse(line) for line in file if line.strip()]
    records = [record for record in parsed if record is not None]
    # A killed run tears the last line of a file; that must not hide the others.
    if num_torn := len(parsed) - len(records):
        notes.append(f"{path.name}: {num_torn} unreadable line{'s' * (num_torn > 1)} left out.")
    return records


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    config = _parse(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}
    if config is None:
        notes.append(f"{path.name} cannot be read.")
    return config or {}


def _dig(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _number(value: Any) -> str:
    finite = _finite(value)
    return "not finite" if finite is None else f"{finite:.4g}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _text(text: Any) -> str:
    """A block of escaped text that keeps its line breaks."""
    text = str(text)
    rest = len(text) - MAX_CHARACTERS
    more = f"<i> … and {rest} more characters</i>" if rest > 0 else ""
    return f"<div class=text>{escape(text[:MAX_CHARACTERS])}{more}</div>"


def _header(name: str, config: Record) -> str:
    keys = (("name",), ("algorithm", "name"), ("model", "path"), ("model", "strategy"))
    line = " · ".join(escape(str(fact)) for fact in (_dig(config, *path) for path in keys) if fact)
    return f"<header><h1>{escape(name)}</h1><p>{line}</p></header>"


def _summary(metrics: list[dict[str, Any]], by_kind: Mapping[str, list[Any]], config: Record) -> str:
    rewards = [record["metrics"]["reward/mean"] for record in metrics if "reward/mean" in record["metrics"]]
    evals = [(record["metrics"].get("eval/reward"), record["step"]) for record in metrics]
    best = max(((value, -step) for value, step in evals if value is not None), default=None)
    times = [record["time"] for record in metrics if record["time"] is not None]
    planned = _dig(config, "train", "steps")
    num_skipped, num_findings = len(by_kind["skip"]), len(by_kind["finding"])
    tiles = [
        ("", "Last step", metrics[-1]["step"] if metrics else "-", f"of {planned}" if planned else ""),
        ("", "Final reward", *((_number(rewards[-1]), f"from {_number(rewards[0])}") if rewards else ("-", ""))),
        ("", "Best eval", *((_number(best[0]), f"at step {-best[1]}") if best else ("-", ""))),
        ("warn" if num_skipped else "", "Skipped steps", num_skipped, ""),
        ("bad" if num_findings else "", "Findings", num_findings, ""),
        ("", "Receipts", len(by_kind["receipt"]), ""),
        ("", "Duration", _duration(max(times)) if times else "-", ""),
    ]  # fmt: skip
    cells = "".join(
        f'<div class="tile {tone}"><dt>{label}</dt><dd>{value} <small>{escape(more)}</small></dd></div>'
        for tone, label, value, more in tiles
    )
    return f"<dl id=summary>{cells}</dl>"


def _table(table_id: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{head}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class=scroll><table id="{table_id}"><tr>{head}</tr>{body}</table></div>'


def _events_section(kind: str, events: list[dict[str, Any]]) -> str:
    title = escape(EVENT_TITLES.get(kind, f"Other events: {kind}"))
    head = f"<h2>{title} <span class=count>{len(events)}</span></h2>"
    if not events:
        return f'<section class="events">{head}<p class=none>None.</p></section>'
    # The first ones hold the load; the last ones hold what the run ended with.
    num_left_out = max(0, len(events) - MAX_EVENTS_FIRST - MAX_EVENTS_LAST)
    shown = events[:MAX_EVENTS_FIRST] + events[MAX_EVENTS_FIRST + num_left_out :]
    note = f"<p class=note>{num_left_out} in the middle are only in events.jsonl.</p>" if num_left_out else ""
    rows = []
    for event in shown:
        more = {key: value for key, value in event.items() if key not in ("step", "kind", "text")}
        rows.append((escape(str(event.get("step", "-"))), _text(event.get("text", "")), _details(more)))
    table = _table(f"events-{escape(kind)}", ("Step", "What", ""), rows)
    return f'<section class="events">{head}{note}{table}</section>'


def _details(fields: Record) -> str:
    if not fields:
        return ""
    text = json.dumps(fields, indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>details</summary>{_text(text)}</details>"


def _samples_section(samples: list[dict[str, Any]]) -> str:
    ordered = sorted(samples, key=lambda sample: _finite(sample.get("step")) or 0.0)
    shown = ordered[-MAX_SAMPLES:][::-1]
    count = f"last {len(shown)} of {len(samples)}" if len(shown) < len(samples) else str(len(samples))
    head = f"<h2>Samples <span class=count>{count}</span></h2>"
    if not shown:
        return f"<section>{head}<p class=none>None were recorded.</p></section>"
    rows = []
    for sample in shown:
        parts = sample.get("rewards")
        each = parts.items() if isinstance(parts, dict) else ()
        names = "".join(f"<div>{escape(str(name))} {_number(value)}</div>" for name, value in each)
        reward = f"<b>{_number(sample.get('reward'))}</b><small>{names}</small>"
        prompt, completion = _text(sample.get("prompt", "")), _text(sample.get("completion", ""))
        rows.append((escape(str(sample.get("step", "-"))), reward, prompt, completion))
    table = _table("samples", ("Step", "Reward", "Prompt", "Completion"), rows)
    return f"<section>{head}{table}</section>"


def _config_section(config: Record) -> str:
    text = escape(json.dumps(config, indent=2, ensure_ascii=False)) if config else "config.json is not there."
    return f"<details id=config><summary>Resolved config</summary><pre>{text}</pre></details>"


def _page(title: str, body: str, data: Record) -> str:
    # Without "<" no text can close the script element; as ASCII it has no U+2028, which may end a line.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    # Only this very script may run and nothing may be fetched, should a completion ever get past the escapes.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)} · shardproof</title>
<style>{_STYLE}</style></head>
<body><main>
{body}
</main>
<script type="application/json" id="data">{embedded}</script>
<script>{_SCRIPT}</script></body></html>
"""


_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --ink: #1b1f24; --dim: #5f6873; --line: #dfe3e8;
  --grid: #eceff2; --bad: #c02626; --warn: #a65b00; --c0: #1f66d1; --c1: #c2570c; --c2: #0f8a5f; --c3: #8a3fc7; }
@media (prefers-color-scheme: dark) { :root { --back: #111418; --card: #1a1e24; --ink: #e6e9ed; --dim: #98a2ae;
  --line: #2e353e; --grid: #262c34; --bad: #ff7b72; --warn: #f0a848; --c0: #6aa9ff; --c1: #ff9d5c; --c2: #4fd1a1;
  --c3: #c99bff; } }
.bad dd { color: var(--bad); } .warn dd { color: var(--warn); } summary { cursor: pointer; color: var(--dim); }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1400px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } header p { margin: 2px 0 18px; color: var(--dim); }
h2 { font-size: 17px; margin: 30px 0 10px; } .count { color: var(--dim); font-weight: normal; margin-left: 4px; }
small { font-size: 12px; color: var(--dim); font-weight: normal; } .none, .note { color: var(--dim); margin: 6px 0; }
#summary { display: grid; grid-template-columns: repeat(auto-fit, minmax(172px, 1fr)); gap: 10px; margin: 0; }
.tile, figure, .scroll, #config { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 10px 14px; } dt { color: var(--dim); font-size: 13px; }
dd { margin: 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
#curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); gap: 12px; }
figure { margin: 0; padding: 10px 12px 6px; min-width: 0; }
svg { display: block; width: 100%; overflow: visible; touch-action: pan-y; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 12px; align-items: baseline; font-size: 13px; min-height: 2.9em; }
.name { font-weight: 600; flex: 1 0 auto; } .at { color: var(--dim); }
.keys { flex: 0 0 100%; overflow: hidden; white-space: nowrap; } .key { margin-right: 12px; font-variant-numeric: tabular-nums; }
.key i { display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: middle; }
svg text { fill: var(--dim); font-size: 11px; } .grid { stroke: var(--grid); } .axis { stroke: var(--line); }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.cross { stroke: var(--dim); stroke-dasharray: 3 3; } .skip { stroke: var(--warn); stroke-width: 2; }
.scroll { overflow: auto; max-height: 70vh; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 8px 12px; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--card); color: var(--dim); font-size: 13px; }
tr:last-child td { border-bottom: 0; } td:first-child { width: 4em; font-variant-numeric: tabular-nums; }
#samples { min-width: 640px; } #samples td:nth-child(2) { width: 9em; } #samples td:nth-child(3) { width: 36%; }
.text, pre { font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.text { max-height: 16em; overflow: auto; } pre { margin: 8px 0 0; } .events td:last-child { width: 30%; }
#config { margin-top: 30px; padding: 12px 14px; } #config > summary { color: var(--ink); font-weight: 600; }
"""

_SCRIPT = """
"use strict";
const { charts, skipped } = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 170, LEFT = 50, RIGHT = 10, TOP = 8, BOTTOM = 22;

function make(parent, tag, attributes, text) {
  const node = document.createElementNS(tag === "svg" ? "http://www.w3.org/2000/svg" : parent.namespaceURI, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}
function format(value) {
  if (value === null || value === undefined) return value === null ? "not finite" : "-";
  const size = Math.abs(value);
  if (size >= 1e4) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 5 });
  return size && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(size < 1 ? 4 : 5)));
}
function ticks(low, high, count, smallest) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const gap = Math.max(smallest, power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999));
  const from = Math.ceil(low / gap - 1e-9), to = Math.floor(high / gap + 1e-9);
  return Array.from({ length: to - from + 1 }, (_, index) => (from + index) * gap);
}
function range(lists, margin) {
  const values = lists.flat().filter(value => value !== null);
  if (!values.length) return [0, 1];
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const room = high > low ? (high - low) * margin : Math.abs(low) * 0.1 || 0.5;
  return [low - room, high + room];
}
const stepRange = range(charts.flatMap(chart => chart.series.map(series => series.steps)), 0);

function build(chart) {
  const figure = make(document.getElementById("curves"), "figure", { "data-chart": chart.title });
  const caption = make(figure, "figcaption", {});
  make(caption, "span", { class: "name" }, chart.title);
  chart.at = make(caption, "span", { class: "at" });
  const keys = make(caption, "span", { class: "keys" });
  chart.series.forEach((series, index) => {
    series.colour = `var(--c${index % 4})`;
    series.byStep = new Map(series.steps.map((step, at) => [step, series.values[at]]));
    const key = make(keys, "span", { class: "key" });
    make(key, "i", { style: `background:${series.colour}` });
    if (chart.series.length > 1) make(key, "span", {}, series.name.split("/").pop() + " ");
    series.readout = make(key, "b", {});
    const many = series.values.filter(value => value === null).length;
    if (many) make(key, "small", {}, ` (${many} not finite)`);
  });
  chart.steps = [...new Set(chart.series.flatMap(series => series.steps))].sort((a, b) => a - b);
  chart.svg = make(figure, "svg", { height: HEIGHT, role: "img", "aria-label": `curve of ${chart.title}` });
  chart.svg.addEventListener("pointermove", event => {
    const at = chart.toStep(event.clientX - chart.svg.getBoundingClientRect().left);
    show(chart.steps.reduce((best, step) => Math.abs(step - at) < Math.abs(best - at) ? step : best));
  });
  chart.svg.addEventListener("pointerleave", showHash);
}
function draw(chart) {
  const { svg } = chart, width = Math.max(200, svg.parentNode.clientWidth - 24);
  const [low, high] = range(chart.series.map(series => series.values), 0.06), [first, last] = stepRange;
  const x = step => LEFT + (step - first) / (last - first) * (width - LEFT - RIGHT);
  const y = value => TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const toStep = pixel => first + (pixel - LEFT) / (width - LEFT - RIGHT) * (last - first);
  Object.assign(chart, { x, y, toStep });
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  for (const value of ticks(low, high, 6, 0)) {
    make(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
    make(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value));
  }
  const floor = HEIGHT - BOTTOM;
  make(svg, "line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: floor, y2: floor });
  for (const step of ticks(first, last, 6, 1))
    make(svg, "text", { x: x(step), y: HEIGHT - 6, "text-anchor": "middle" }, format(step));
  for (const step of skipped.filter(step => step >= first && step <= last))
    make(svg, "line", { class: "skip", x1: x(step), x2: x(step), y1: floor - 6, y2: floor });
  for (const { steps, values, colour } of chart.series) {
    let path = "", join = false;
    values.forEach((value, at) => {
      // The line of no length makes a value between two gaps a dot, not nothing.
      if (value !== null) path += `${join ? "L" : "M"}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}h0`;
      join = value !== null;
      if (value !== null && values.length <= 40)
        make(svg, "circle", { cx: x(steps[at]), cy: y(value), r: 2, fill: colour });
    });
    make(svg, "path", { class: "curve", d: path, style: `stroke:${colour}` });
  }
  chart.cross = make(svg, "g", {});
}
function show(step) {
  for (const chart of charts) {
    const at = step === null ? chart.steps[chart.steps.length - 1] : step;
    chart.at.textContent = (step === null ? "last: step " : "step ") + at;
    chart.cross.replaceChildren();
    const [x, y2] = [chart.x(at), HEIGHT - BOTTOM];
    if (step !== null) make(chart.cross, "line", { class: "cross", x1: x, x2: x, y1: TOP, y2 });
    for (const series of chart.series) {
      const value = series.byStep.get(at);
      series.readout.textContent = format(value);
      if (step !== null && Number.isFinite(value))
        make(chart.cross, "circle", { cx: x, cy: chart.y(value), r: 4, fill: series.colour });
    }
  }
}
// `#hover=STEP` in the address holds the crosshair at a step, so that a link can point at it.
function showHash() {
  const match = /^#hover=(\\d+)$/.exec(location.hash);
  show(match ? Number(match[1]) : null);
}
function redraw() { charts.forEach(draw); showHash(); }

charts.forEach(build);
redraw();
addEventListener("hashchange", showHash);
addEventListener("resize", redraw);
"""
