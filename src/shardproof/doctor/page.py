"""The doctor's report as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from shardproof.doctor.report import first_values, shorten, verdict_of
from shardproof.doctor.results import Buffer, Examination, Report
from shardproof.findings import CODES

_MAX_RANKS = 16


def write_page(report: Report, path: Path) -> Path:
    """Write the page; it asks for nothing from outside and runs no script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = [_header(report), _summary(report), _findings(report)]
    if len(report.examinations) > 1:
        body.append(_matrix(report))
    body += [_examination(examination) for examination in report.examinations]
    path.write_bytes(_page(report.label, "\n".join(body)).encode("utf-8", "replace"))
    return path


def _header(report: Report) -> str:
    facts = " · ".join(escape(f"{name} {value}") for name, value in report.facts.items())
    return f"<header><h1>{escape(report.label)}</h1><p>{facts}</p></header>"


def _summary(report: Report) -> str:
    count = report.num_findings
    safe = sum(not row.findings and row.refused is None for row in report.examinations)
    refused = sum(row.refused is not None for row in report.examinations)
    peak = max((stage.peak_bytes for row in report.examinations for stage in row.stages), default=0)
    tiles = [
        ("bad" if count else "good", "Findings", str(count)),
        ("", "Layouts examined", str(len(report.examinations))),
        ("", "Clean", str(safe)),
        ("", "Refused by name", str(refused)),
        ("", "Largest increase of memory", f"{peak / 2**20:.0f} MiB"),
        ("", "Duration", f"{report.seconds:.1f} s"),
    ]
    cells = "".join(
        f'<div class="tile {tone}"><dt>{label}</dt><dd>{value}</dd></div>' for tone, label, value in tiles
    )
    return f"<dl id=summary>{cells}</dl>"


def _findings(report: Report) -> str:
    rows = [
        (
            f"<b>{finding.code}</b>",
            "all" if finding.rank is None else str(finding.rank),
            f"<code>{escape(finding.tensor or '')}</code>",
            escape(finding.message),
            escape(finding.fix or CODES[finding.code][1]),
            escape(examination.layout),
        )
        for examination in report.examinations
        for finding in examination.findings
    ]
    if not rows:
        return "<section><h2>Findings</h2><p class=none>None.</p></section>"
    heads = ("Code", "Rank", "Tensor", "What", "Fix", "Layout")
    return f"<section><h2>Findings</h2>{_table('findings', heads, rows)}</section>"


def _matrix(report: Report) -> str:
    rows = []
    for examination in report.examinations:
        verdict, colour = verdict_of(examination)
        why = examination.refused.message if examination.refused is not None else ""
        rows.append((escape(examination.layout), f'<b class="{colour}">{verdict}</b>', escape(why)))
    return f"<section><h2>Layouts</h2>{_table('layouts', ('Layout', 'Verdict', 'Why'), rows)}</section>"


def _examination(examination: Examination) -> str:
    rows = [
        (
            escape(stage.name),
            f"{stage.seconds:.2f}",
            f"{stage.peak_bytes / 2**20:.1f}",
            f'<b class="{"red" if stage.findings else "green"}">{stage.verdict}</b>',
            escape(stage.note),
        )
        for stage in examination.stages
    ]
    stages = _table("", ("Stage", "Seconds", "Peak MiB", "Findings", "What"), rows)
    refused = (
        f"<p class=note>{escape(str(examination.refused))}</p>" if examination.refused is not None else ""
    )
    return (
        f"<section class=layout><h2>{escape(examination.layout)}</h2>{refused}{stages}"
        f"{_buffers(examination.buffers)}</section>"
    )


def _buffers(buffers: Sequence[Buffer]) -> str:
    if not buffers:
        return ""
    ranks = shorten(sorted({buffer.rank for buffer in buffers}), _MAX_RANKS)
    rows = [
        (
            f"<code>{escape(buffer.name)}</code>",
            str(buffer.rank),
            buffer.dtype,
            escape(str(tuple(buffer.shape))),
            f'<b class="{"red" if buffer.num_nan else ""}">{buffer.num_nan}</b>',
            f"<code>{escape(first_values(buffer))}</code>",
        )
        for buffer in buffers
        if buffer.rank in ranks
    ]
    heads = ("Buffer", "Rank", "Dtype", "Shape", "NaN", "First five")
    return f"<details open><summary>Buffers on every rank</summary>{_table('', heads, rows)}</details>"


def _table(table_id: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{head}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    named = f' id="{table_id}"' if table_id else ""
    return f"<div class=scroll><table{named}><tr>{head}</tr>{body}</table></div>"


def _page(title: str, body: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)} · shardproof doctor</title>
<style>{_STYLE}</style></head>
<body><main>
{body}
</main></body></html>
"""


_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --ink: #1b1f24; --dim: #5f6873; --line: #dfe3e8;
  --bad: #c02626; --good: #0f8a5f; --warn: #a65b00; }
@media (prefers-color-scheme: dark) { :root { --back: #111418; --card: #1a1e24; --ink: #e6e9ed; --dim: #98a2ae;
  --line: #2e353e; --bad: #ff7b72; --good: #4fd1a1; --warn: #f0a848; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } header p { margin: 2px 0 18px; color: var(--dim); }
h2 { font-size: 17px; margin: 30px 0 10px; } .none, .note { color: var(--dim); margin: 6px 0; white-space: pre-wrap; }
#summary { display: grid; grid-template-columns: repeat(auto-fit, minmax(172px, 1fr)); gap: 10px; margin: 0; }
.tile, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 10px 14px; } dt { color: var(--dim); font-size: 13px; }
dd { margin: 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.bad dd, .red { color: var(--bad); } .good dd, .green { color: var(--good); } .yellow { color: var(--warn); }
.scroll { overflow: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 7px 12px; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-size: 13px; } tr:last-child td { border-bottom: 0; }
td { font-variant-numeric: tabular-nums; } code { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--dim); margin-bottom: 8px; }
"""
