"""Trackers by name: a run's metrics, samples and findings, sent to the services that its recipe names.

Trackers are guests of a run. One that cannot be started stops a run that begins, before its first step; one that fails
later costs a warning, and what it did not take is kept and sent again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import netrc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardproof.config.load import to_json
from shardproof.config.output import Output
from shardproof.config.schema import Recipe
from shardproof.errors import fail
from shardproof.files import write_atomic
from shardproof.findings import Finding
from shardproof.report.read import EVENTS_NAME, SAMPLES_NAME, parse_object
from shardproof.rl.tracker_services import SERVICES, Tracker, TrackerStart, UsersTracker
from shardproof.text import without_secrets
from shardproof.user_code import describe_error

logger = logging.getLogger(__name__)

STATE_NAME = "trackers.json"
_RETRY_S = 60.0  # after a failure; a service that is down may take seconds to say so
_SAMPLE_TABLES = 20  # about as many in a run
_WANDB_HOST = "https://api.wandb.ai"


@dataclass
class _Tracked:
    """A tracker, and what it has not taken yet."""

    name: str
    tracker: Tracker
    skip_to: int  # the last step that the tracker has from an earlier part of the run
    pending: list[Callable[[], None]] = field(default_factory=list)
    retry_at: float = 0.0
    is_down: bool = False


class Trackers:
    """The trackers of a run, on rank 0; on the other ranks, and before `start`, there are none.

    `note(step, kind, text)` adds an event to the run's own ones.
    """

    def __init__(self, folder: Path, note: Callable[[int, str, str], None]):
        self._folder, self._note = folder, note
        self._all: list[_Tracked] = []
        self._step, self._sample_every, self._next_sample = 0, 1, 0

    def start(self, recipe: Recipe, step: int, last_step: int, is_new: bool) -> None:
        """Start every tracker; `last_step` is the last one that an earlier part of the run has sent.

        A tracker that cannot be started raises C007 where the run begins, and costs a warning where it resumes.
        """
        self._step = step
        self._sample_every = max(1, recipe.train.steps // _SAMPLE_TABLES)
        known = {} if is_new else _read_state(self._folder)
        run_name = recipe.output.run_name or known.get("run_name") or _new_name(self._folder)
        state: dict[str, Any] = {"run_name": run_name, "run_ids": dict(known.get("run_ids", {}))}
        for name in dict.fromkeys(recipe.output.trackers):
            run_id = state["run_ids"].get(name)
            try:
                tracker = _make(
                    name, recipe, TrackerStart(self._folder, recipe.output.project, run_name, step, run_id)
                )
            except Exception as error:
                if step == 0:
                    raise _not_started(name, error) from error
                self._warn(
                    name,
                    f"did not start and gets no metrics until the run is restarted: {describe_error(error)}",
                )
                continue
            skip_to = -1 if is_new or run_id is None or tracker.takes_steps_again else last_step
            self._all.append(_Tracked(name, tracker, skip_to))
            if tracker.run_id is not None:
                state["run_ids"][name] = tracker.run_id
        if self._all:
            write_atomic(self._folder / STATE_NAME, json.dumps(state, indent=2) + "\n")
        self._samples, self._events = _Tail(self._folder / SAMPLES_NAME), _Tail(self._folder / EVENTS_NAME)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics, with some of its samples, and what the run found wrong since the last step."""
        self._step = step
        if not self._all:
            return
        samples = [line for line in self._samples.read() if line.get("step") == step]
        if step < self._next_sample or not samples:
            samples = []
        else:
            self._next_sample = step + self._sample_every
        for each in self._all:
            if step > each.skip_to:
                each.pending.append(partial(each.tracker.log, step, metrics))
                if samples:
                    each.pending.append(partial(each.tracker.log_samples, step, samples))
        self._send_alerts()
        self._flush()

    def close(self, status: str) -> None:
        """Send what is left, the report, and how the run ended: "finished", "stopped" or "failed"."""
        everyone, self._all = self._all, []
        if not everyone:
            return
        self._send_alerts(everyone)
        page = self._folder / "report.html"
        for each in everyone:
            if page.is_file():
                each.pending.append(partial(each.tracker.attach, page))
            each.pending.append(partial(each.tracker.close, status))
            each.retry_at = 0.0
        self._flush(everyone)
        for each in everyone:
            if each.pending:
                left = len(each.pending)
                # What it refuses must not leave the run open there.
                with contextlib.suppress(Exception):
                    each.pending[-1]()
                self._warn(
                    each.name, f"did not accept the last {left} messages; metrics.jsonl has every step"
                )

    def _send_alerts(self, everyone: list[_Tracked] | None = None) -> None:
        for event in self._events.read():
            if event.get("kind") == "finding" or event.get("passed") is False:
                step, text = event.get("step", self._step), str(event.get("text", ""))
                for each in self._all if everyone is None else everyone:
                    each.pending.append(partial(each.tracker.alert, step, text))

    def _flush(self, everyone: list[_Tracked] | None = None) -> None:
        for each in self._all if everyone is None else everyone:
            if time.monotonic() < each.retry_at:
                continue
            try:
                while each.pending:
                    each.pending[0]()
                    each.pending.pop(0)
            except Exception as error:
                each.retry_at = time.monotonic() + _RETRY_S
                if not each.is_down:
                    self._warn(each.name, f"failed; it is retried every minute: {describe_error(error)}")
                each.is_down = True
            else:
                each.is_down = False

    def _warn(self, name: str, problem: str) -> None:
        text = f"tracker {name} {problem}"
        logger.warning("%s", text)
        self._note(self._step, "tracker", text)


class _Tail:
    """The lines that are added to one of the run's files from now on."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def read(self) -> list[dict[str, Any]]:
        """The whole lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = file.read()
        except OSError:  # the folder is gone or its disk does not answer: the run's own lines say so
            return []
        whole = raw[: raw.rfind(b"\n") + 1]
        self._offset += len(whole)
        # A full disk tears a line, and must not cost the run its last words.
        return [line for each in whole.split(b"\n") if (line := parse_object(each)) is not None]


def _make(name: str, recipe: Recipe, start: TrackerStart) -> Tracker:
    given = {
        "config": without_secrets(json.loads(to_json(recipe))),
        "options": recipe.output.tracker_options.get(name, {}),
    }
    start = replace(start, **given)
    service = SERVICES.get(name)
    tracker: Tracker = UsersTracker(name, start) if service is None else service(start)
    return tracker


def _new_name(folder: Path) -> str:
    """A name that tells runs in equally named folders apart."""
    return f"{folder.resolve().name}-{os.urandom(2).hex()}"


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / STATE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(found, dict) and isinstance(found.get("run_ids"), dict)
    return found if is_whole else {}


def _not_started(name: str, error: Exception) -> Exception:
    message = f"the tracker {name!r} could not be started: {describe_error(error)}."
    fix = f"fix this, or remove {name!r} from output.trackers"
    return fail("C007", "output", message, fix=fix)


def check_logins(output: Output) -> list[Finding]:
    """What would keep a tracker from starting, as far as that is seen without asking it."""
    if "wandb" not in output.trackers:
        return []
    options = output.tracker_options.get("wandb", {})
    mode = options.get("mode") or os.environ.get("WANDB_MODE", "online")
    host = urlsplit(os.environ.get("WANDB_BASE_URL", _WANDB_HOST)).hostname or ""
    has_key = any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    if mode not in ("online", "run", "shared") or has_key or _has_netrc_entry(host):
        return []
    message = f"output.trackers has 'wandb', and this user is not logged in at {host}."
    fix = "run `wandb login`, set WANDB_API_KEY, or work without a network: output.tracker_options.wandb.mode=offline"
    return [Finding("C007", "output", message, fix=fix)]


def _has_netrc_entry(host: str) -> bool:
    places = [os.environ.get("NETRC"), os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc")]
    for place in filter(None, places):
        try:
            if netrc.netrc(place).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
