"""Where the hosts of a run meet: who takes part, when ranks start, who was lost, when they start again, how it ends.

One meeting is kept on the host of the endpoint. Every host's agent tells it about once per second what state that host is
in, and is answered with what all hosts are to do. A report says the same thing however often it arrives, so a message
that is lost or repeated changes nothing. Only the clock of the meeting counts: clocks of hosts may differ.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardproof.dist.signals import SIGNALLED
from shardproof.text import printable

GATHERING, RUNNING, CLOSING, ENDED = "gathering", "running", "closing", "ended"  # phases of a meeting
WAITING, DONE = "waiting", "done"  # states of a host, beside RUNNING
FINISHED, FAILED, REFUSED, STOPPED = "finished", "failed", "refused", "stopped"  # how a host's ranks ended
LOST, JOINED = "lost", "joined"  # further causes for which ranks end

REFUSED_CODE, FAILED_CODE = 2, 3  # exit codes of a run that cannot begin, and of one that a finding stopped

_RECONNECT_S = 3.0  # for an agent whose connection was closed; after this its process is gone
_REPLACED_S = 5.0  # silence after which a new agent on the same host stands for the old one
_PAUSE_S = 5.0  # between two looks: the meeting's own process stood still
MAX_TEXT = 4000  # characters of a finding that are passed on


@dataclass(frozen=True)
class Plan:
    """What all hosts of a run must have been started with."""

    min_hosts: int
    max_hosts: int
    max_restarts: int = 0
    lost_after_s: float = 30.0  # without a sign of life
    host_wait_s: float = 30.0  # for more hosts, once there are enough
    timeout_s: float = 600.0  # for enough hosts


@dataclass
class Member:
    """A host that takes part, or waits to."""

    id: str
    name: str
    address: str
    num_ranks: int
    is_keeper: bool  # the meeting is kept by this very process
    seen: float
    state: str = WAITING
    result: str = ""  # how its ranks ended in this round
    closed_at: float | None = None  # when its connection was closed, unless it came back

    def __str__(self) -> str:
        return f"host {self.name}" + (f" ({self.address})" if self.address else "")


@dataclass
class Cause:
    """Why the ranks of a round end."""

    kind: str
    text: str
    code: int = FAILED_CODE
    host: str = ""
    number: int = 0  # of the signal that stopped the run
    seconds: float = 0.0  # for which a host was silent


@dataclass
class Meeting:
    """The state of all hosts. `attend` is called with each host's report, from any thread."""

    clock: Callable[[], float] = time.monotonic
    plan: Plan | None = None
    phase: str = GATHERING
    job: str = field(default_factory=lambda: uuid.uuid4().hex)  # names this run among all others
    round: int = 0  # how many times ranks were started
    restarts: int = 0
    cause: Cause | None = None  # of the end of the newest round
    members: dict[str, Member] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)  # ids of the hosts of this round, host 0 first
    _hosts: list[dict[str, Any]] = field(default_factory=list)  # the same hosts, for their agents
    _store: dict[str, Any] | None = None  # where the ranks' store listens
    _told: set[str] = field(default_factory=set)  # ids of hosts that know how the run ended
    _known_round: int = 0  # the latest that any host knows of, also from a meeting before this one
    _since: float | None = None  # when the gathering began
    _enough_since: float | None = None
    _looked: float | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def attend(self, report: Mapping[str, Any], is_keeper: bool = False) -> dict[str, Any]:
        """What a host is to know and to do, after its report was noted."""
        with self._lock:
            self.look()
            member = self.members.get(report["id"])
            if member is None and self.phase == ENDED and self.round and not report["round"]:
                return {"later": "an earlier run is still ending there"}
            if (refusal := self._check_plan(report)) is not None:
                return {"refused": refusal}
            if report.get("refuses"):
                return self._hear_refusal(report)
            if member is None:
                if report["state"] != WAITING:
                    return {"unknown": True}
                member = self._welcome(report, is_keeper)
            self._note(member, report)
            self.look()
            return self._answer(member, int(report["round"]))

    def closed(self, identity: str) -> None:
        """A host's connection was closed; it is lost unless it connects again."""
        with self._lock:
            if (member := self.members.get(identity)) is not None:
                member.closed_at = self.clock()

    def leave(self, identity: str) -> None:
        """A host needs the meeting no more: it knows how the run ended, or its command ended before."""
        with self._lock:
            member = self.members.get(identity)
            if member is not None and self.phase == RUNNING:
                self._lose(member, self.clock(), "its command has ended")
            self.members.pop(identity, None)

    def num_left(self) -> int:
        """How many hosts have not left."""
        with self._lock:
            self.look()
            return len(self.members)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and every host knows it."""
        return self.phase == ENDED and not self.num_left()

    def look(self) -> None:
        """Notice what only time shows: hosts that are silent, and waits that are over."""
        with self._lock:
            now = self.clock()
            pause = now - self._looked if self._looked is not None else 0.0
            self._looked = now
            if pause > _PAUSE_S:  # whoever spoke meanwhile was not heard
                for member in self.members.values():
                    member.seen += pause
                    member.closed_at = None
            for member in [each for each in self.members.values() if self._is_lost(each, now)]:
                self._lose(member, now)
            if self.phase == CLOSING and all(self._state_of(each) == DONE for each in self._order):
                self._decide(now)
            if self.phase == GATHERING and self.plan is not None:
                self._gather(self.plan, now)
            if self.phase == RUNNING:
                self._admit()

    # --- hosts ---

    def _check_plan(self, report: Mapping[str, Any]) -> str | None:
        plan = Plan(**report["plan"])
        if self.plan is None or (not self.members and not self.round):
            self.plan, self._since = plan, self.clock()
        if plan == self.plan:
            return None
        theirs, ours = asdict(plan), asdict(self.plan)
        different = [name for name in ours if ours[name] != theirs[name]]
        said = ", ".join(f"{name} {theirs[name]:g} against {ours[name]:g}" for name in different)
        return f"host {printable(report['name'])} was started with other options than the hosts before it: {said}"

    def _hear_refusal(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """End a run that has not begun: a host found out that it does not take part. Later, others may replace it."""
        if self.phase == GATHERING and not self.round:
            code, name = int(report.get("code", REFUSED_CODE)), printable(report["name"])
            self._end(Cause(REFUSED, str(report["refuses"])[:MAX_TEXT], code, name))
        self._told.add(report["id"])
        return {"phase": self.phase, "told": len(self._told)}

    def _welcome(self, report: Mapping[str, Any], is_keeper: bool) -> Member:
        name, address = printable(str(report["name"]))[:253], printable(str(report["address"]))[:60]
        member = Member(
            report["id"], name or "unnamed", address, int(report["ranks"]), is_keeper, self.clock()
        )
        # A meeting that was started anew learns from the hosts how far they had come.
        if report["job"] and report["round"] and not self.round:
            self.job = str(report["job"])
        self._known_round = max(self._known_round, int(report["round"]))
        if self.phase == GATHERING:
            self.round = max(self.round, self._known_round)
        # A host that was lost and comes back has counted a restart that is counted here as well.
        if not self._order:
            self.restarts = max(self.restarts, int(report["restarts"]))
        self.members[member.id] = member
        return member

    def _note(self, member: Member, report: Mapping[str, Any]) -> None:
        member.seen, member.closed_at = self.clock(), None
        member.address = printable(str(report["address"]))[:60] or member.address
        stop = int(report.get("stop") or 0)
        if stop and self.phase in (GATHERING, RUNNING):
            text = f"{member} was stopped by signal {stop}"
            self._close(Cause(STOPPED, text, SIGNALLED + stop, member.name, stop))
        elif stop and self.cause is not None and self.cause.kind == JOINED:  # the run ends after all
            self.cause = Cause(
                STOPPED, f"{member} was stopped by signal {stop}", SIGNALLED + stop, member.name, stop
            )
        store = report.get("store")
        if store is not None and store["round"] == self.round and self._order[:1] == [member.id]:
            self._store = dict(store)
        if report["state"] == WAITING:
            if self.phase == CLOSING and member.id in self._order:
                member.state = DONE  # its ranks were never started
            elif self.phase != RUNNING or member.id not in self._order:
                member.state = WAITING
            return
        if int(report["round"]) != self.round or member.id not in self._order:
            return
        failure = report.get("failure")
        if failure is not None:
            self._note_failure(member, failure)
        if report["state"] == DONE and member.state == RUNNING:
            member.state, member.result = DONE, str(failure["kind"]) if failure is not None else FINISHED
            if self.phase == RUNNING and all(self._state_of(each) == DONE for each in self._order):
                self._end(Cause(FINISHED, "finished", 0))

    def _note_failure(self, member: Member, failure: Mapping[str, Any]) -> None:
        """Note how a host's ranks ended if not as they should. The first failure is the cause."""
        kind, code = str(failure["kind"]), int(failure["code"])
        cause = Cause(kind, str(failure["text"])[:MAX_TEXT], code, member.name)
        if self.phase == RUNNING:
            self._close(cause)
        elif self.phase == CLOSING and self.cause is not None and kind != FAILED:
            # Ranks that were told to save for a new host stop with a signal; that is not the end.
            if self.cause.kind == FAILED or (self.cause.kind in (JOINED, LOST) and kind == REFUSED):
                self.cause = cause
        elif self.phase == CLOSING and self.cause is not None and self.cause.kind == JOINED:
            self.cause = cause

    def _is_lost(self, member: Member, now: float) -> bool:
        if member.is_keeper or self.plan is None:
            return False
        if member.closed_at is not None and now - member.closed_at > _RECONNECT_S:
            return True
        return now - member.seen > self.plan.lost_after_s or (
            now - member.seen > _REPLACED_S and self._is_replaced(member)
        )

    def _is_replaced(self, member: Member) -> bool:
        """Whether a new agent waits on the same host."""
        return any(
            (each.name, each.address) == (member.name, member.address) and each.state == WAITING
            for each in self.members.values()
            if each is not member
        )

    def _lose(self, member: Member, now: float, how: str | None = None) -> None:
        del self.members[member.id]
        if member.id not in self._order:
            return
        silent = now - member.seen
        if how is None:
            is_closed = member.closed_at is not None
            how = "its connection was closed" if is_closed else f"no sign of life for {silent:.0f} s"
        cause = Cause(LOST, f"{member} was lost: {how}", host=member.name, seconds=silent)
        if self.phase == RUNNING:
            self._close(cause)
        elif self.phase == CLOSING and self.cause is not None and self.cause.kind in (FAILED, JOINED):
            # What the others' ranks saw of it is told by themselves.
            self.cause = cause

    def _state_of(self, identity: str) -> str:
        member = self.members.get(identity)
        return DONE if member is None else member.state

    # --- rounds ---

    def _gather(self, plan: Plan, now: float) -> None:
        if self.restarts > plan.max_restarts:
            anew = f"the rendezvous was started anew while ranks ran; restarts allowed: {plan.max_restarts}"
            self._end(self.cause or Cause(LOST, anew))
            return
        before = {identity: place for place, identity in enumerate(self._order)}
        ready = [each for each in self.members.values() if each.state == WAITING]
        ready.sort(key=lambda each: before.get(each.id, len(before)))  # spare hosts come last
        if len(ready) >= plan.min_hosts:
            self._enough_since = now if self._enough_since is None else self._enough_since
            # Hosts of the round before report again soon, or are lost: nobody begins without them.
            all_are_ready = len(ready) == len(self.members)
            is_over = now - self._enough_since >= plan.host_wait_s
            if len(ready) >= plan.max_hosts or (is_over and all_are_ready):
                self._begin(ready[: plan.max_hosts])
            return
        self._enough_since = None
        if self._since is not None and now - self._since > plan.timeout_s:
            here = ", ".join(map(str, ready)) or "none"
            text = f"{len(ready)} of {plan.min_hosts} hosts were there after {plan.timeout_s:g} s: {here}"
            if self.cause is not None:
                text = f"{self.cause.text}; {text}"
            self._end(
                Cause(LOST if self.round else REFUSED, text, FAILED_CODE if self.round else REFUSED_CODE)
            )

    def _begin(self, chosen: list[Member]) -> None:
        chosen.sort(
            key=lambda each: (not each.is_keeper, _natural(each.name), _natural(each.address), each.id)
        )
        self._order = [each.id for each in chosen]
        self.round, self.phase = max(self.round, self._known_round) + 1, RUNNING
        self._store = self._enough_since = None
        for each in chosen:
            each.state, each.result = RUNNING, ""
        self._hosts = [
            {"name": each.name, "address": each.address, "ranks": each.num_ranks} for each in chosen
        ]

    def _admit(self) -> None:
        """End the round, after a save, for hosts that came later, if there is room for them."""
        spare = [each for each in self.members.values() if each.state == WAITING]
        if spare and self.plan is not None and len(self._order) < self.plan.max_hosts:
            names = " and ".join(map(str, spare))
            self._close(Cause(JOINED, f"{names} joined", host=spare[0].name))

    def _close(self, cause: Cause) -> None:
        """Let every host end its ranks."""
        self.cause = cause
        if self.phase == GATHERING:
            self._end(cause)
        else:
            self.phase = CLOSING

    def _decide(self, now: float) -> None:
        """Gather for the next round, or end the run, now that no rank runs any more."""
        assert self.cause is not None and self.plan is not None
        if self.cause.kind in (STOPPED, REFUSED):
            self._end(self.cause)
            return
        results = [each.result for each in map(self.members.get, self._order) if each is not None]
        if self.cause.kind == JOINED and all(result == FINISHED for result in results):
            self._end(Cause(FINISHED, "finished", 0))
            return
        if self.cause.kind != JOINED:
            if self.restarts >= self.plan.max_restarts:
                self._end(self.cause)
                return
            self.restarts += 1
        self.phase, self._since, self._enough_since = GATHERING, now, None

    def _end(self, cause: Cause) -> None:
        self.cause, self.phase = cause, ENDED

    def _answer(self, member: Member, known_round: int) -> dict[str, Any]:
        if self.phase == ENDED:
            self._told.add(member.id)
        answer: dict[str, Any] = {"phase": self.phase, "round": self.round, "restarts": self.restarts}
        answer["job"] = self.job
        answer["cause"] = None if self.cause is None else asdict(self.cause)
        if self.phase == GATHERING:
            answer["waiting"] = [str(each) for each in self.members.values() if each.state == WAITING]
        if self.phase == RUNNING and member.id in self._order:
            answer["place"] = self._order.index(member.id)
            if known_round != self.round:  # an agent that has started its ranks knows all this
                answer |= {"store": self._store, "hosts": self._hosts}
        return answer


def _natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts node10 behind node9."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", text))
