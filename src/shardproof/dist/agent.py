"""The agent of one host: starts its ranks when the hosts have met, and ends or restarts them with those of all hosts."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardproof.dist import addresses, news
from shardproof.dist.attendance import Attendance
from shardproof.dist.deadline import HOST_NAMES
from shardproof.dist.interface import interface_variables
from shardproof.dist.launch import STORE_FOLDER
from shardproof.dist.meeting import (
    DONE,
    ENDED,
    FAILED,
    GATHERING,
    JOINED,
    LOST,
    MAX_TEXT,
    REFUSED,
    RUNNING,
    STOPPED,
    WAITING,
    Cause,
    Plan,
)
from shardproof.dist.processes import Failure, Function, RankProcesses
from shardproof.dist.signals import SIGNALLED, Signals
from shardproof.dist.stores import serve_store
from shardproof.folder_lock import ATTEMPT

logger = logging.getLogger(__name__)

FINDING_FILE = "SHARDPROOF_FINDING_FILE"  # where the first rank of a host writes the finding that it shows
_FAILED_GRACE_S = 15.0  # for ranks to say what they saw of the rank that failed
_LOST_GRACE_S = 10.0  # for ranks to say where they were when a host was lost
_STOP_S = 2.0  # for other hosts to hear of a signal that came before there were ranks
_POLL_S = 0.1
_SAY_S = 30.0  # between two lines that say what the agent waits for
_STORE_S = 300.0
_FORGOTTEN = (
    "the rendezvous does not know this host: this host was given up, or the rendezvous was started anew"
)


class Lost(Exception):
    """The host of the endpoint does not answer."""


class NotAdmitted(Exception):
    """The meeting refused this host."""


@dataclass(frozen=True)
class Work:
    """What the ranks of this host run."""

    function: Function
    args: tuple[Any, ...]
    num_ranks: int
    folder: str  # for the store, the findings and the news of this host's ranks
    stop_signals: Collection[int] = ()  # ranks that one of these ends are not started again
    refused_code: int | None = None  # nor are ranks that end with this exit code
    grace_s: float = 180.0  # for the step and the checkpoint that ranks finish after a signal
    variables: dict[str, str] = field(default_factory=dict)  # of the environment of every rank


@dataclass
class End:
    """How the run ended, for all hosts, and what this host saw of it."""

    cause: Cause
    results: dict[int, Any] = field(default_factory=dict)
    failure: Failure | None = None  # of this host's own ranks
    was_shown: bool = False  # by a rank of this host


class Agent:
    """Runs this host's part of a run, until it ends on all hosts."""

    def __init__(self, work: Work, plan: Plan, attendance: Attendance, endpoint: str, local_address: str):
        self._work, self._plan, self._attendance = work, plan, attendance
        self._endpoint, self._local_address = endpoint, local_address
        self._round = 0
        self._store: Any = None  # the ranks' store, where this host serves it
        self._signals = Signals()
        self._said_at = time.monotonic()
        self._stopped: Cause | None = None  # by a signal to another host
        self.was_killed = False  # the ranks, by a second interrupt

    def run(self) -> End:
        """How the run ended. Raises `Lost` and `NotAdmitted`; no rank is left in any case."""
        with self._signals:
            self._attendance.start()
            try:
                while True:
                    answer = self._await_round()
                    if answer["phase"] == ENDED:
                        return End(Cause(**answer["cause"]))
                    end = self._run_round(answer)
                    if end is not None:
                        return end
            finally:
                self._store = None
                self._attendance.leave()

    # --- between rounds ---

    def _await_round(self) -> dict[str, Any]:
        """The answer that lets ranks start, or that ends the run."""
        self._attendance.update(state=WAITING, store=None, failure=None)
        while True:
            answer = self._attendance.wait(_POLL_S)
            self._check_line()
            if self._signals.number and (answer is None or answer["phase"] != ENDED):
                return self._stop_waiting()
            if answer is None:
                self._say_waiting([])
            elif answer["phase"] == ENDED:
                return answer
            elif answer["phase"] == RUNNING and "hosts" in answer and answer["round"] > self._round:
                if self._has_store(answer):
                    return answer
            elif answer["phase"] == GATHERING:
                self._say_waiting(answer["waiting"])
            elif answer["phase"] == RUNNING and "place" not in answer:
                self._say_waiting([], is_spare=True)
            time.sleep(_POLL_S / 2)

    def _check_line(self) -> None:
        """Raise if the meeting does not admit this host, or has been out of reach for too long."""
        line, plan = self._attendance, self._plan
        if line.refusal is not None:
            raise NotAdmitted(line.refusal)
        limit = plan.lost_after_s if line.was_heard and not plan.max_restarts else plan.timeout_s
        if line.silent_s > limit:
            why = f" ({line.trouble})" if line.trouble else ""
            raise Lost(f"{self._endpoint} did not answer for {limit:g} s{why}")

    def _stop_waiting(self) -> dict[str, Any]:
        """Tell the others that a signal ends the run before ranks have started."""
        number = self._signals.number
        self._attendance.update(stop=number)
        answer = self._attendance.wait(_STOP_S)
        if answer is not None and answer["phase"] == ENDED:
            return answer
        return {"phase": ENDED, "cause": vars(_stopped_by(number))}

    def _has_store(self, answer: dict[str, Any]) -> bool:
        """Whether the ranks know where to meet; host 0's agent makes that place, anew for every round."""
        if self._plan.max_hosts == 1 or answer["store"] is not None:
            return True
        if answer["place"] == 0:
            address = self._own_address(answer["hosts"])
            self._store = serve_store(address, 0, _STORE_S)
            where = {"round": answer["round"], "address": address, "port": self._store.port}
            self._attendance.update(store=where, address=address)
        return False

    def _own_address(self, hosts: list[dict[str, Any]]) -> str:
        """The address at which the other hosts of a round reach this one."""
        if self._local_address:
            return self._local_address
        found = [host["address"] for host in hosts if host["address"]]
        # A host that shares its machine with the rendezvous reaches that through loopback, which nobody else can use.
        others = [address for address in found if not addresses.is_loopback(address)]
        return addresses.address_towards(others[-1]) if len(hosts) > 1 and others else "127.0.0.1"

    def _say_waiting(self, here: list[str], is_spare: bool = False) -> None:
        now = time.monotonic()
        if self._plan.max_hosts == 1 or now - self._said_at < _SAY_S:
            return
        self._said_at = now
        if is_spare:
            logger.info("waiting: the run has all of its hosts; this one takes part if one is lost")
        elif here:
            low, high = self._plan.min_hosts, self._plan.max_hosts
            wanted = f"{low} needed" if len(here) < low else f"{high} wanted"
            logger.info("waiting for hosts: %d here, %s: %s", len(here), wanted, ", ".join(here))
        elif self._attendance.trouble or not self._attendance.was_heard:
            logger.info("waiting for %s: %s", self._endpoint, self._attendance.trouble or "no answer yet")

    # --- a round ---

    def _run_round(self, answer: dict[str, Any]) -> End | None:
        """How the run ended, or None if ranks are to start again."""
        self._round = answer["round"]
        if self._round > 1:
            self._say_again(answer)
        shown, told = (Path(self._work.folder, f"{name}-{self._round}") for name in ("finding", "news"))
        files = {FINDING_FILE: str(shown), news.VARIABLE: str(told)}
        ranks = RankProcesses(self._work.function, self._work.args, self._environments(answer, files))
        self._attendance.update(state=RUNNING, round=self._round)
        try:
            self._watch(ranks, shown, told)
            return self._await_verdict(ranks, shown)
        finally:
            ranks.kill()
            self._store = None

    def _say_again(self, answer: dict[str, Any]) -> None:
        hosts, cause = answer["hosts"], answer["cause"]
        names = ", ".join(host["name"] for host in hosts)
        where = f" on {len(hosts)} host{'s' * (len(hosts) > 1)} ({names})" if self._plan.max_hosts > 1 else ""
        count = f" (restart {answer['restarts']} of {self._plan.max_restarts})"
        is_free = cause is not None and cause["kind"] == JOINED
        logger.info("starting again%s from the newest checkpoint%s", where, "" if is_free else count)

    def _environments(self, answer: dict[str, Any], files: dict[str, str]) -> list[dict[str, str]]:
        """What each rank of this host finds in its environment: what torchrun would put there, and ours."""
        hosts, place, num_local = answer["hosts"], answer["place"], self._work.num_ranks
        first, world_size = (sum(host["ranks"] for host in some) for some in (hosts[:place], hosts))
        store = answer["store"] or {"address": "127.0.0.1", "port": 0}
        common = {
            "ROLE_NAME": "rank",
            "LOCAL_WORLD_SIZE": str(num_local),
            "WORLD_SIZE": str(world_size),
            "ROLE_WORLD_SIZE": str(world_size),
            "GROUP_RANK": str(place),
            "GROUP_WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": store["address"],
            "MASTER_PORT": str(store["port"]),
            "TORCHELASTIC_RESTART_COUNT": str(self._round - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(self._plan.max_restarts),
            "TORCHELASTIC_RUN_ID": os.path.basename(self._work.folder),
            "TORCHELASTIC_USE_AGENT_STORE": str(answer["store"] is not None),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ATTEMPT: f"{answer['job']}:{self._round - 1}",
            HOST_NAMES: json.dumps([host["name"] for host in hosts]),
            **files,
            **self._work.variables,
        }
        if answer["store"] is None:
            common[STORE_FOLDER] = self._work.folder
        elif len(hosts) > 1:
            common |= interface_variables(self._own_address(hosts))
        return [
            common | {"RANK": str(first + local), "ROLE_RANK": str(first + local), "LOCAL_RANK": str(local)}
            for local in range(num_local)
        ]

    def _watch(self, ranks: RankProcesses, shown: Path, told: Path) -> None:
        """Return once this host's ranks have ended, by themselves or because those of all hosts do."""
        kill_at, is_reported, known = float("inf"), False, ""
        while ranks.are_running:
            ranks.poll(_POLL_S)
            now = time.monotonic()
            if ranks.failure is not None and not is_reported:
                is_reported = True
                report = self._report(ranks.failure, shown)
                self._attendance.update(failure=report)
                if report["kind"] == STOPPED:
                    ranks.send(signal.SIGTERM)  # to those that the signal did not reach
                grace_s = _FAILED_GRACE_S if report["kind"] == FAILED else self._work.grace_s
                kill_at = min(kill_at, now + grace_s)
            cause = self._cause_to_end()
            if cause is not None and cause.kind != known and (cause.kind == LOST or not is_reported):
                known = cause.kind
                kill_at = min(kill_at, now + self._end_ranks(ranks, cause, told))
            self.was_killed |= self._signals.is_repeated
            if now >= kill_at or self._signals.is_repeated:
                ranks.kill()

    def _cause_to_end(self) -> Cause | None:
        """Why this host's ranks end, if they do."""
        if self._signals.number:
            return _stopped_by(self._signals.number)
        if self._is_cut_off:
            return self._cut_off()
        answer = self._attendance.wait(0)
        if answer is None:
            return None
        if "unknown" in answer:
            return Cause(LOST, _FORGOTTEN)
        over = answer["phase"] != RUNNING or answer["round"] != self._round
        return Cause(**answer["cause"]) if over and answer["cause"] is not None else None

    def _end_ranks(self, ranks: RankProcesses, cause: Cause, told: Path) -> float:
        """Tell this host's ranks that they are to end; the seconds that they have for it."""
        number = self._signals.number
        if number:
            logger.info("stopping the ranks; press Ctrl-C again to kill them")
            self._attendance.update(stop=number)
            ranks.send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            return self._work.grace_s
        if cause.kind in (STOPPED, JOINED):
            logger.info("%s: saving, then ending this host's ranks", cause.text)
            ranks.send(signal.SIGTERM)
            self._stopped = cause if cause.kind == STOPPED else None
            # Nobody is in a hurry when a host joins: what the ranks do until they have saved has its own deadlines.
            return self._work.grace_s if cause.kind == STOPPED else float("inf")
        if cause.kind == LOST:
            if not cause.host:  # the others have gone on already
                return 0.0
            draft = told.with_suffix(".part")
            draft.write_text(json.dumps({"lost": [cause.host], "seconds": cause.seconds}))
            draft.replace(told)
            return _LOST_GRACE_S
        return _FAILED_GRACE_S

    @property
    def _is_cut_off(self) -> bool:
        return self._attendance.silent_s > self._plan.lost_after_s

    def _cut_off(self) -> Cause:
        seconds, endpoint = self._plan.lost_after_s, self._endpoint
        text = f"this host lost its connection to host {endpoint}: no answer for {seconds:g} s"
        return Cause(LOST, text, host=endpoint.rpartition(":")[0], seconds=seconds)

    def _report(self, failure: Failure, shown: Path) -> dict[str, Any]:
        """What the other hosts are told of a failure."""
        code = failure.exit_code if failure.exit_code > 0 else 1
        kind = FAILED
        stops = [SIGNALLED + number for number in self._work.stop_signals]
        if code in stops or -failure.exit_code in self._work.stop_signals:
            kind = STOPPED
            code = code if code in stops else SIGNALLED - failure.exit_code
        elif code == self._work.refused_code:
            kind = REFUSED
        text = shown.read_text(errors="replace") if shown.exists() else ""
        text = text or f"rank {failure.rank} failed with exit code {failure.exit_code}: {failure.text}"
        return {"kind": kind, "code": code, "text": text[:MAX_TEXT]}

    def _await_verdict(self, ranks: RankProcesses, shown: Path) -> End | None:
        """How the run ended, or None if ranks are to start again, once the ranks of all hosts have ended."""
        failure = None if ranks.failure is None else self._report(ranks.failure, shown)
        self._attendance.update(state=DONE, failure=failure)
        was_stopped = bool(self._signals.number)
        while True:
            answer = self._attendance.wait(_POLL_S)
            if self._is_cut_off:
                return self._await_endpoint(End(self._cut_off(), {}, ranks.failure, shown.exists()))
            if self._signals.number and not was_stopped:
                was_stopped = True
                self._attendance.update(stop=self._signals.number)
            if self._signals.is_repeated:  # who interrupts twice does not wait for the ranks of other hosts
                self._attendance.wait(_STOP_S)
                return End(_stopped_by(self._signals.number), {}, ranks.failure, shown.exists())
            if answer is None:
                continue
            if "unknown" in answer:
                self._say_cause(Cause(LOST, _FORGOTTEN), shown.exists())
                self._attendance.start_over()
                return None
            if answer["phase"] == ENDED:
                return End(Cause(**answer["cause"]), ranks.results, ranks.failure, shown.exists())
            if answer["phase"] == GATHERING or answer["round"] != self._round:
                self._say_cause(Cause(**answer["cause"]), shown.exists())
                return None
            time.sleep(_POLL_S)

    def _await_endpoint(self, end: End) -> End | None:
        """None if the host of the endpoint may come back and the ranks may be started again; else the end."""
        if self._signals.number:
            return End(_stopped_by(self._signals.number), {}, end.failure, end.was_shown)
        if self._stopped is not None:
            return End(self._stopped, {}, end.failure, end.was_shown)
        if self._attendance.restarts >= self._plan.max_restarts:
            return end
        self._say_cause(end.cause, end.was_shown)
        self._attendance.start_over()
        return None

    def _say_cause(self, cause: Cause, was_shown: bool) -> None:
        """Say why ranks are started again, unless a rank of this host has."""
        if cause.kind == LOST and not was_shown:
            logger.warning("%s", cause.text)
        elif cause.kind == FAILED and not was_shown:
            where = f"host {cause.host}: " if self._plan.max_hosts > 1 else ""
            logger.warning("%s%s", where, cause.text)
        self._said_at = time.monotonic() - _SAY_S + 1.0  # say soon what is waited for


def _stopped_by(number: int) -> Cause:
    return Cause(STOPPED, f"stopped by signal {number}", SIGNALLED + number, number=number)
