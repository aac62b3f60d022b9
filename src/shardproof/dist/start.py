"""Starting the ranks of this host, alone or together with other hosts."""

from __future__ import annotations

import errno
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from shardproof.dist import addresses
from shardproof.dist.agent import Agent, End, Lost, NotAdmitted, Work
from shardproof.dist.attendance import Attendance, Call
from shardproof.dist.launch import raise_file_limit
from shardproof.dist.meeting import (
    ENDED,
    FINISHED,
    LOST,
    MAX_TEXT,
    REFUSED,
    REFUSED_CODE,
    STOPPED,
    Meeting,
    Plan,
)
from shardproof.dist.rendezvous import Line, Server, answer, derive_key
from shardproof.dist.signals import SIGNALLED
from shardproof.errors import ShardproofError, fail
from shardproof.text import printable

logger = logging.getLogger(__name__)

_MIN_SECRET = 16  # characters
_TELL_S, _LOOK_S = 30, 0.2
_GRACE_S = "180"  # for the step and the checkpoint that ranks finish after a signal


@dataclass(frozen=True)
class Together:
    """How this host finds the others, and what the run does when hosts come and go."""

    nnodes: str = "1"
    endpoint: str | None = None  # HOST:PORT
    secret: str | None = None
    local_addr: str | None = (
        None  # at which other hosts reach this one, if not the one that reaches the endpoint
    )
    max_restarts: int = 0
    lost_after_s: float = 30.0
    host_wait_s: float = 30.0
    timeout_s: float = 600.0

    @property
    def plan(self) -> Plan:
        low, high = node_range(self.nnodes)
        return Plan(low, high, self.max_restarts, self.lost_after_s, self.host_wait_s, self.timeout_s)


class RankFailed(Exception):
    """A rank ended with an error or died: one of this host, or, where `rank` is None, of another."""

    def __init__(
        self,
        rank: int | None,
        exit_code: int,
        message: str,
        code: int,
        host: str = "",
        was_shown: bool = False,
    ):
        self.rank, self.exit_code, self.message, self.host = rank, exit_code, message, host
        self.code = code  # that this process is to end with, as on all hosts
        self.was_shown = was_shown  # a rank of this host has shown what it found
        super().__init__(f"exit code {exit_code}: {message}")


class RanksStopped(Exception):
    """A signal stopped the ranks of all hosts, after they had saved."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"signal {number}")


class RanksKilled(Exception):
    """A second interrupt ended the ranks at once; what they had not saved is lost."""


def start_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    together: Together | None = None,
    stop_signals: Collection[int] = (),
    refused_code: int | None = None,
    loopback_only: bool = True,
) -> dict[int, Any]:
    """What `function` returns on each rank of this host.

    Ranks that fail, or whose host is lost, are started again on all hosts, as often as `together` says, except after one
    of `stop_signals` or `refused_code`. On one host nothing listens beyond loopback; `loopback_only=False` lets NCCL
    reach other hosts, such as those of an inference server. The ranks do not outlive this process. Raises `RankFailed`,
    the same on all hosts.
    """
    raise_file_limit()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    grace_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE_S))
    together = together or Together()
    plan = together.plan
    loopback = addresses.loopback_interface() if loopback_only and plan.max_hosts == 1 else ""
    variables = (
        {"NCCL_SOCKET_IFNAME": loopback} if loopback and "NCCL_SOCKET_IFNAME" not in os.environ else {}
    )
    with tempfile.TemporaryDirectory(prefix="shardproof-ranks-", ignore_cleanup_errors=True) as folder:
        work = Work(function, args, num_ranks, folder, stop_signals, refused_code, grace_s, variables)
        if plan.max_hosts == 1:
            return _run_alone(work, plan)
        return _run_together(work, plan, together)


def _run_alone(work: Work, plan: Plan) -> dict[int, Any]:
    attendance = Attendance(_keeper(Meeting()), plan, socket.gethostname(), work.num_ranks)
    return _results(Agent(work, plan, attendance, "this host", ""))


def _run_together(work: Work, plan: Plan, together: Together) -> dict[int, Any]:
    host, port = parse_endpoint(together.endpoint)
    key = derive_key(check_secret(together.secret))
    local = _local_address(together.local_addr)
    logger.warning(
        "this host accepts connections from other machines: use a private network; see docs/multi-node.md"
    )
    server, line = serve_meeting(host, port, key, local), Line(host, port, key)
    call: Call = line.call
    address = local
    if server is not None:
        call, address = _keeper(server.meeting), local or server.address
    attendance = Attendance(call, plan, socket.gethostname(), work.num_ranks, address)
    agent = Agent(work, plan, attendance, str(together.endpoint), local)
    try:
        return _results(agent)
    except NotAdmitted as error:
        raise _not_admitted(str(error), together) from None
    except Lost as error:
        raise _lost(str(error), attendance.was_heard) from None
    finally:
        line.close()
        if server is not None:
            server.close()


def tell_refusal(together: Together, text: str, code: int = REFUSED_CODE) -> None:
    """Tell the hosts that wait, or come soon, why this one does not take part: they would wait for minutes.

    `code` is the exit code that all of them end with.
    """
    plan = together.plan
    if plan.max_hosts == 1:
        return
    host, port = parse_endpoint(together.endpoint)
    key = derive_key(check_secret(together.secret))
    logger.info("the other hosts are told, for at most %d s", _TELL_S)
    server, line = serve_meeting(host, port, key), Line(host, port, key)
    call: Call = line.call if server is None else _keeper(server.meeting)
    attendance = Attendance(call, plan, socket.gethostname(), num_ranks=0)
    attendance.update(refuses=text[:MAX_TEXT], code=code)
    attendance.start()
    until = time.monotonic() + _TELL_S
    try:
        while time.monotonic() < until and attendance.refusal is None:
            found = attendance.wait(_LOOK_S)
            if found is not None and (found["phase"] != ENDED or found["told"] >= plan.max_hosts):
                return
            if attendance.was_heard and attendance.trouble:  # who kept the meeting was told, and is gone
                return
            time.sleep(_LOOK_S)
    finally:
        attendance.leave()
        line.close()
        if server is not None:
            server.close(patience_s=0)


def _keeper(meeting: Meeting) -> Call:
    """How the host that keeps the meeting attends it."""
    return lambda report: answer(meeting, report, is_keeper=True)


def _results(agent: Agent) -> dict[int, Any]:
    """What the agent's ranks returned, or the error that says how the run ended."""
    end = agent.run()
    cause = end.cause
    if agent.was_killed:
        raise RanksKilled
    if cause.kind == FINISHED:
        return end.results
    if cause.kind == STOPPED:
        raise RanksStopped(cause.number or cause.code - SIGNALLED)
    if cause.kind == REFUSED and not cause.host:  # by the meeting, not by ranks
        fix = "start the same command on every host; if hosts share a hostname, write the endpoint as an address"
        raise fail("C002", "launch", printable(cause.text) + ".", fix=fix)
    raise _failed(end)


def _failed(end: End) -> Exception:
    cause, failure = end.cause, end.failure
    if cause.kind == LOST and not end.was_shown:
        fix = "read that host's log, then rerun the same command; --max-restarts lets a run go on by itself"
        return fail("T308", "launch", printable(cause.text) + ".", fix=fix)
    if failure is None:
        return RankFailed(None, cause.code, printable(cause.text), cause.code, cause.host, end.was_shown)
    text = printable(failure.text)
    return RankFailed(failure.rank, failure.exit_code, text, cause.code, was_shown=end.was_shown)


def serve_meeting(
    host: str, port: int, key: bytes, local_address: str = "", keeps_on: bool = False
) -> Server | None:
    """The meeting's server where the endpoint is this host, unless another process of this host serves it already."""
    where = addresses.listening_addresses(host)
    if where is None:
        return None
    try:
        return Server([local_address] if where == [""] and local_address else where, port, key, keeps_on)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        message = f"this host cannot listen at {printable(host)}:{port}: {error.strerror}."
        raise fail("C002", "launch", message, fix="choose another port for --rdzv-endpoint") from None


def parse_endpoint(endpoint: str | None) -> tuple[str, int]:
    """The host and the port of HOST:PORT."""
    if endpoint is None:
        message = "a run on several hosts needs --rdzv-endpoint, the address of one of them."
        raise fail("C001", "launch", message, fix="pass --rdzv-endpoint HOST:PORT on every host")
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        message = f"--rdzv-endpoint {printable(endpoint)!r} is not a host and a port."
        raise fail("C001", "launch", message, fix="write it as HOST:PORT, with a port between 1 and 65535")
    return host, int(port)


def check_secret(secret: str | None) -> str:
    """The secret, if it is long enough."""
    if secret is None or len(secret) < _MIN_SECRET:
        message = f"a run on several hosts needs --rdzv-id, a secret of at least {_MIN_SECRET} characters."
        fix = "make one with `openssl rand -hex 16`, and pass it on every host, or as SHARDPROOF_RDZV_ID"
        raise fail("C001", "launch", message, fix=fix)
    return secret


def _local_address(text: str | None) -> str:
    if text is None:
        return ""
    try:
        own = [address for address in addresses.resolve(text) if addresses.is_own(address)]
    except OSError:
        own = []
    if not own:
        message = f"--local-addr {printable(text)!r} is not an address of this host."
        raise fail(
            "C001", "launch", message, fix="use one that `ip address` shows here, or leave the option out"
        )
    return own[0]


def _not_admitted(why: str, together: Together) -> ShardproofError:
    message = f"{together.endpoint} does not admit this host: {printable(why)}."
    fix = "start every host with the same options and the same --rdzv-id"
    return fail("C002", "launch", message, fix=fix)


def _lost(why: str, was_heard: bool) -> ShardproofError:
    """The error for a host that could not reach the endpoint, or lost its connection to it."""
    if was_heard:
        message = f"this host lost its connection to the rendezvous and ended its ranks: {printable(why)}."
        return fail("T308", "launch", message, fix="read that host's log, then rerun the same command")
    message = f"the hosts could not connect: {printable(why)}."
    fix = "make sure that every host can reach --rdzv-endpoint and has the same --rdzv-id"
    return fail("C002", "launch", message, fix=fix)


def node_range(nnodes: str) -> tuple[int, int]:
    """The smallest and the largest number of hosts that `--nnodes 2` or `--nnodes 1:4` allows."""
    low, _, high = nnodes.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        message = f"--nnodes {nnodes!r} is neither a number of nodes nor a range."
        raise fail("C001", "launch", message, fix="write it like --nnodes 2 or --nnodes 1:4")
    return int(low), int(high or low)
