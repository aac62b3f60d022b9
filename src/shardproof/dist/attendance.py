"""This host's place at the meeting, kept by a thread that reports about once per second whatever the agent does."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from shardproof.dist.meeting import WAITING, Plan
from shardproof.dist.rendezvous import Denied

_INTERVAL_S = 1.0

Call = Callable[[Mapping[str, Any]], dict[str, Any]]


class Attendance(threading.Thread):
    """Reports this host's state to the meeting and keeps the newest answer."""

    def __init__(self, call: Call, plan: Plan, name: str, num_ranks: int, address: str = ""):
        super().__init__(name="shardproof attendance", daemon=True)
        self._call = call
        self._report: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "plan": asdict(plan),
            "name": name,
            "ranks": num_ranks,
            "address": address,
            "state": WAITING,
            "round": 0,
            "restarts": 0,
            "job": "",
        }
        self._changed = threading.Condition()
        self._version = 0
        self._answer: dict[str, Any] | None = None
        self._heard = time.monotonic()  # when the newest request that was answered was sent
        self._is_leaving = False
        self.was_heard = False  # at least once
        self.refusal: str | None = None  # why the meeting does not admit this host
        self.trouble = ""  # why the last request failed

    @property
    def silent_s(self) -> float:
        """For how long the meeting has not answered."""
        return time.monotonic() - self._heard

    @property
    def restarts(self) -> int:
        """How many restarts the run has had, as far as this host knows."""
        return int(self._report["restarts"])

    def update(self, **changes: Any) -> None:
        """Report a new state, at once; answers to older reports are forgotten."""
        with self._changed:
            self._report |= changes
            self._version += 1
            self._answer = None
            self._changed.notify_all()

    def start_over(self) -> None:
        """Take part as a new host; the meeting no longer knows this one."""
        restarts = self._report["restarts"] + 1
        self.update(
            id=uuid.uuid4().hex, state=WAITING, store=None, failure=None, stop=None, restarts=restarts
        )

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The newest answer to the present report, as soon as there is one; None if the time is over first."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self.refusal is not None, seconds)
            return self._answer

    def leave(self) -> None:
        """End the thread, and tell the meeting that this host needs it no more."""
        with self._changed:
            self._is_leaving = True
            self._changed.notify_all()
        is_there = self.was_heard and self.silent_s < 2 * _INTERVAL_S
        if self.is_alive():
            self.join(None if is_there else 0.0)  # a call that nobody answers holds up nobody
        if is_there:
            with contextlib.suppress(OSError, Denied):
                self._call({"id": self._report["id"], "leaves": True})

    def run(self) -> None:
        while True:
            with self._changed:
                if self._is_leaving or self.refusal is not None:
                    return
                version, report = self._version, dict(self._report)
            began = time.monotonic()
            try:
                answer = self._call(report)
            except Denied as error:
                if not self.was_heard:
                    self._refuse(str(error))
                    return
                self.trouble = str(error)  # the meeting may come back where somebody else listens now
            except (OSError, ValueError) as error:  # ValueError: what can be no name of a host
                self.trouble = str(error) or type(error).__name__
            else:
                self._note(answer, version, began)
            with self._changed:
                if not self._is_leaving and self._version == version:
                    self._changed.wait(_INTERVAL_S)

    def _refuse(self, why: str) -> None:
        with self._changed:
            self.refusal = why
            self._changed.notify_all()

    def _note(self, answer: dict[str, Any], version: int, began: float) -> None:
        if "refused" in answer:
            self._refuse(str(answer["refused"]))
            return
        if "later" in answer:
            self.trouble = str(answer["later"])
            return
        with self._changed:
            self._heard, self.was_heard, self.trouble = began, True, ""
            if "restarts" in answer:
                self._report |= {"restarts": answer["restarts"], "job": answer["job"]}
            if version == self._version:
                self._answer = answer
                self._changed.notify_all()
