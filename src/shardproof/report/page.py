"""The page itself: what a run folder says as data, and the one HTML file that shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardproof.files import write_atomic
from shardproof.report.curves import charts_of
from shardproof.report.ledger import alerts_of, ledger_of, other_events
from shardproof.report.read import Record, Run, RunReader, step_of
from shardproof.report.samples import samples_of
from shardproof.report.summary import differing_settings, facts_of, header_of, numbers_of, time_split

PAGE_NAME = "report.html"
_SCRIPTS = ("dom.js", "charts.js", "ledger.js", "conversations.js", "samples.js", "page.js")
_STYLES = ("page.css", "conversations.css")


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the run folder, from what is there so far, and return its path."""
    return write_page(run_folder / PAGE_NAME, [RunReader(run_folder).read(time.time())])


def write_page(path: Path, runs: Sequence[Run]) -> Path:
    """Write one page about a run, or about several beside each other, and return its path."""
    title = " and ".join(run.name for run in runs[:2]) + (" and others" if len(runs) > 2 else "")
    # A completion may hold half of a surrogate pair, which UTF-8 cannot say: it must not cost the whole report.
    write_atomic(path, page(title, data_of(runs)).encode("utf-8", "replace"))
    return path


def data_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the page shows, as JSON. One run has all sections; several have those that compare."""
    alone = len(runs) == 1
    return {
        "runs": [_run_data(run, alone) for run in runs],
        "charts": charts_of(runs),
        "settings": [] if alone else differing_settings(runs),
    }


def page(title: str, data: dict[str, Any], live: bool = False) -> str:
    """The HTML of a page with its style, script and data inside. A live page asks its own server for newer data."""
    # Without "<" no text can close the script element; as ASCII it has no U+2028, which may end a line.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script, style = _content(_SCRIPTS), _content(_STYLES)
    return f"""<!doctype html>
<html lang="en"{" data-live" * live}><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(live)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)} · shardproof</title>
<style>{style}</style></head>
<body><main id="main"><noscript>This page needs JavaScript, which is inside the file; it loads nothing.</noscript></main>
<script type="application/json" id="data">{embedded}</script>
<script>{script}</script></body></html>
"""


def policy(live: bool = False) -> str:
    """The content security policy: only this very script and style, and no address but a live page's own server."""
    # It holds even should a completion ever get past the escapes.
    rules = [
        "default-src 'none'",
        f"style-src '{_digest(_content(_STYLES))}'",
        f"script-src '{_digest(_content(_SCRIPTS))}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join([*rules, "connect-src 'self'"] if live else rules)


def _run_data(run: Run, alone: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "header": header_of(run),
        "alerts": alerts_of(run.events, run.earlier),
        "ledger": ledger_of(run.events),
        "numbers": numbers_of(run),
        "time": time_split(run),
        "steps": run.steps,
        "times": [None if seconds is None else round(seconds, 2) for seconds in run.times],
        "skipped": sorted({step for event in run.events if (step := _skipped_step(event)) is not None}),
        "notes": run.notes,
    }
    if not alone:
        for group in data["ledger"]["groups"]:
            del group["entries"]  # a comparison counts proofs, and does not list them
        return data
    return data | {
        "samples": samples_of(run.samples, _policy_versions(run)),
        "facts": facts_of(run),
        "events": other_events(run.events),
    }


def _policy_versions(run: Run) -> dict[int, float]:
    """The version of the policy at the beginning of each step: that at its end, less the updates that it took."""
    known = zip(run.steps, ((metrics.get("version"), metrics.get("updates")) for metrics in run.metrics))
    return {
        step: version - updates
        for step, (version, updates) in known
        if version is not None and updates is not None
    }


def _skipped_step(event: Record) -> int | None:
    return step_of(event) if event.get("kind") == "skip" else None


@cache
def _content(names: tuple[str, ...]) -> str:
    return "\n".join(files("shardproof.report").joinpath(name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
