"""The proof ledger: each load, sync, trained batch, checkpoint and export of a run, and what was compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.report.read import Record, dig, finite, step_of
from shardproof.text import shortened

PROOFS = {
    "load": "Load",
    "resume": "Resume",
    "sync": "Weight sync",
    "tokens": "Trained tokens",
    "checkpoint": "Checkpoint",
    "export": "Export",
    "receipt": "Receipt",
}
# Events of these kinds are problems; the page names them at its top.
ALERTS = {
    "finding": ("bad", "Findings"),
    "reward": ("warn", "Reward errors"),
    "environment": ("warn", "Environment errors"),
    "skip": ("warn", "Skipped steps"),
    "report": ("warn", "Report"),
    "engine": ("warn", "Engines"),
    "publish": ("warn", "Upload"),
    "tracker": ("warn", "Trackers"),
}
FIRST_WHOLE, LAST_WHOLE, MAX_FAILED = 20, 180, 200  # entries of a group that are kept with their receipts
MAX_ENTRIES = 20_000  # of a group, of which the others are kept as step, verdict and gap
MAX_ALERTS = 50  # of a kind
MAX_TEXT = 4000

# Runs of earlier versions note receipts as plain text; it begins with what was done.
_BEGINNINGS = {
    "loaded": "load",
    "resumed": "resume",
    "saved": "checkpoint",
    "wrote": "export",
    "sent": "sync",
}


def ledger_of(events: Sequence[Record]) -> dict[str, Any]:
    """The proofs of a run in groups, one per kind and role, in the order of the page."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for event in events:
        if event.get("kind") in ("proof", "receipt"):
            proof = _proof_of(event)
            groups.setdefault((proof, cut(event.get("role") or "", 100)), []).append(event)
    order = list(PROOFS)
    names = sorted(
        groups, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key[1] != "policy")
    )
    found = [_group(proof, role, groups[proof, role]) for proof, role in names]
    return {
        "groups": found,
        "num": sum(group["num"] for group in found),
        "failed": sum(group["failed"] for group in found),
    }


def alerts_of(events: Sequence[Record], earlier: Sequence[Record] = ()) -> list[dict[str, Any]]:
    """What a reader must see first: failed proofs, findings, errors of rewards and environments, skipped steps, the worst first.

    A run that failed and resumed has taken the steps again: what failed in them is in `earlier`, and must stay in sight.
    """
    failed = _failed_proofs(events)
    alerts = [_alert("failed", "bad", "Failed proofs", failed)] if failed else []
    for kind, (tone, title) in ALERTS.items():
        found = [event for event in events if event.get("kind") == kind]
        found = _not_said(found, failed) if kind == "finding" else found
        if found:
            alerts.append(_alert(kind, tone, title, found))
    proofs = _failed_proofs(earlier)
    ended = _not_said([event for event in earlier if event.get("kind") == "finding"], proofs)
    if proofs or ended:
        alerts.append(
            _alert("earlier", "warn", "Failed in steps that were repeated later", [*proofs, *ended])
        )
    return alerts


def _not_said(findings: Sequence[Record], failed: Sequence[Record]) -> list[Record]:
    """The findings without those that ended the run as failed proofs: a proof has them in the same words."""
    said = "\n".join(["", *(str(event.get("text")) for event in failed), ""])
    return [event for event in findings if f"\n{event.get('text')}\n" not in said]


def _failed_proofs(events: Sequence[Record]) -> list[Record]:
    return [event for event in events if event.get("kind") == "proof" and event.get("passed") is not True]


def other_events(events: Sequence[Record]) -> dict[str, Any]:
    """Events that are neither proofs nor problems, the newest last."""
    known = ("proof", "receipt", *ALERTS)
    others = [event for event in events if event.get("kind") not in known]
    rows = [
        {
            "step": step_of(event),
            "kind": cut(event.get("kind"), 100),
            "text": cut(event.get("text", "")),
            **_fields(event, "step", "kind", "text"),
        }
        for event in others[-LAST_WHOLE:]
    ]
    return {"num": len(others), "rows": rows}


def cut(text: Any, limit: int = MAX_TEXT) -> str:
    """The text, at most `limit` characters of it and the number of those that were left out."""
    try:
        text = str(text)
    except RecursionError:
        return "(nested too deeply to show)"
    return shortened(text, limit)


def _alert(kind: str, tone: str, title: str, events: Sequence[Record]) -> dict[str, Any]:
    # A reward that fails at every step has one error: it is shown once, with its number.
    texts: dict[str, list[int | None]] = {}
    for event in events:
        texts.setdefault(cut(_problem(event)), []).append(step_of(event))
    items = [
        {"text": text, "num": len(steps), "first": steps[0], "last": steps[-1]}
        for text, steps in texts.items()
    ]
    return {"kind": kind, "tone": tone, "title": title, "num": len(events), "items": items[:MAX_ALERTS]}


def _problem(event: Record) -> str:
    """A failed proof in words: its findings, or its text where that has them already."""
    text = str(event.get("text") or event.get("compared") or "no text was recorded")
    return "\n".join(_findings(event)) or text


def _findings(event: Record) -> list[str]:
    """The findings of a proof that its text does not say."""
    findings, text = event.get("findings"), str(event.get("text"))
    if not isinstance(findings, list):
        return []
    return [_finding_text(each) for each in findings[:20] if str(dig(each, "message") or each) not in text]


def _finding_text(finding: Any) -> str:
    if not isinstance(finding, dict):
        return str(finding)
    rank = f"rank {finding['rank']}: " if finding.get("rank") is not None else ""
    head = f"{finding.get('code', '')} {finding.get('stage', '')}: ".lstrip()
    fix = f"\nFix: {finding['fix']}" if finding.get("fix") else ""
    return f"{head}{rank}{finding.get('message', '')}{fix}"


def _proof_of(event: Record) -> str:
    if event.get("kind") == "proof":
        return cut(event.get("proof"), 100)
    words = str(event.get("text", "")).split(maxsplit=1)
    return _BEGINNINGS.get(words[0], "receipt") if words else "receipt"


def _group(proof: str, role: str, events: Sequence[Record]) -> dict[str, Any]:
    gaps = [gap for event in events if (gap := _detail(event, "gap")) is not None]
    tolerances = [each for event in events if (each := _detail(event, "tolerance")) is not None]
    ranks = {event["rank"] for event in events if isinstance(event.get("rank"), int)}
    compared = [event["compared"] for event in events if event.get("compared")]
    return {
        "proof": proof,
        "title": PROOFS.get(proof, proof),
        "role": role,
        "num": len(events),
        "failed": sum(not _passed(event) for event in events),
        "ranks": len(ranks),
        "compared": cut(compared[-1]) if compared else "",
        "worst_gap": max(gaps, default=None),
        "tolerance": tolerances[-1] if tolerances else None,
        "last": step_of(events[-1]),
        "left_out": max(0, len(events) - MAX_ENTRIES),
        "entries": _entries(events[-MAX_ENTRIES:]),
    }


def _entries(events: Sequence[Record]) -> list[Any]:
    """Whole entries for the first and last ones and those that failed; [step, passed, gap] for the others."""
    num_failed, entries = 0, list[Any]()
    for place, event in enumerate(events):
        passed = _passed(event)
        num_failed += not passed
        whole = place < FIRST_WHOLE or place >= len(events) - LAST_WHOLE
        if whole or (not passed and num_failed <= MAX_FAILED):
            entries.append(_entry(event, passed))
        else:
            entries.append([step_of(event), int(passed), _detail(event, "gap")])
    return entries


def _entry(event: Record, passed: bool) -> dict[str, Any]:
    entry = {
        "step": step_of(event),
        "passed": passed,
        "rank": event.get("rank") if isinstance(event.get("rank"), int) else None,
        "gap": _detail(event, "gap"),
        "seconds": finite(event.get("seconds")),
        "text": cut(event.get("text", "")),
        "findings": [cut(text) for text in _findings(event)],
        **_fields(
            event,
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
        ),
    }
    return {key: value for key, value in entry.items() if value not in (None, "", [])}


def _fields(event: Record, *known: str) -> dict[str, Any]:
    """What else an event holds, as pairs of short texts."""
    details = event.get("details")
    more = {key: value for key, value in event.items() if key not in (*known, "details")}
    more |= details if isinstance(details, dict) else {}
    return (
        {
            "details": [
                [cut(key, 100), cut(_words(key, value), 1000)] for key, value in list(more.items())[:40]
            ]
        }
        if more
        else {}
    )


def _words(key: str, value: Any) -> str:
    """A detail as a person reads it: bytes also in MiB, parts by name."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    number = finite(value)
    if number is not None and "bytes" in key:
        return f"{number:,.0f} ({number / 2**20:,.1f} MiB)"
    return str(value)


def _passed(event: Record) -> bool:
    """Receipts of earlier versions were written for what was proved, and for nothing else."""
    return event.get("passed") is True or event.get("kind") == "receipt"


def _detail(event: Record, key: str) -> float | None:
    details = event.get("details")
    return finite(details.get(key)) if isinstance(details, dict) else None
