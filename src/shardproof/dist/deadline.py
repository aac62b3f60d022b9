"""Deadlines for stages: a lost rank or host ends all others with one clear error, not after half an hour."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardproof.bounds import require_number
from shardproof.dist import groups as process_groups
from shardproof.dist import stacks
from shardproof.dist.collectives import exchange, known_control_group
from shardproof.dist.groups import set_timeout, timeout_of
from shardproof.dist.lost import Wait, explain
from shardproof.dist.news import Interrupted, News
from shardproof.errors import ShardproofError, fail
from shardproof.text import printable

HOST_NAMES = "SHARDPROOF_HOST_NAMES"  # of ranks: JSON, in the order of GROUP_RANK
_MAX_NAMES = 4
_TELL_S = 60.0  # how often ranks that wait for what is no collective tell each other so, at the least
_MAX_SECONDS = 10**9  # more than timedelta and the backends can count with would overflow
# What backends say when a peer is gone or does not answer.
_LOST = (
    "gloo",
    "nccl",
    "timed out waiting",
    "wait timeout",
    "application timeout caused pair closure",  # what gloo says of a collective after the one that timed out
    "socket timeout",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
)

_news: News | None = None  # of the outermost block


class Deadline:
    """Seconds that several waits share."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """What is left, never less than a millisecond."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


def mesh_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups that a model on this mesh talks through."""
    assert dist.group.WORLD is not None
    return [dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))]


@contextmanager
def deadline(
    stage: str,
    code: str = "T308",
    seconds: float = 600.0,
    groups: Sequence[dist.ProcessGroup] | None = None,
) -> Iterator[None]:
    """Fail with one clear error if a collective in the block waits longer than `seconds` for a lost or slow rank.

    The error says which rank was in which call at which line, which did not answer, and on which hosts; it is the same
    on all ranks that reach each other. Without `groups` the deadline applies to the default group. It always applies to
    shardproof's own exchanges, whichever group they use, and to groups that shardproof makes inside. Blocks may be
    nested: the innermost says how long, the outermost with which code.
    """
    assert dist.group.WORLD is not None
    require_number(stage, "deadline_s", seconds, above=0, at_most=_MAX_SECONDS)
    control = known_control_group()
    every = [*(groups or ()), dist.group.WORLD, *([control] if control is not None else [])]
    previous = [(group, timeout_of(group)) for group in {id(group): group for group in every}.values()]
    made_before = set(process_groups.made)
    for group, _ in previous:
        set_timeout(group, timedelta(seconds=seconds))
    stacks.start()
    watch = stacks.current()
    try:
        with _watched(watch, Wait(stage, code, seconds)):
            yield
    finally:
        for group, timeout in previous:
            set_timeout(group, timeout)
        for group in set(process_groups.made) - made_before:
            set_timeout(group, timeout_of(dist.group.WORLD))


def await_all(done: Callable[[float], bool]) -> None:
    """Wait until `done` is true on every rank; it looks for as many seconds as it is given, at the most.

    Ranks may need very different times, longer than the deadline of a collective: so they tell each other now and then,
    well within it, that they still wait. Collective: every rank.
    """
    assert dist.group.WORLD is not None
    seconds = min(_TELL_S, timeout_of(dist.group.WORLD).total_seconds() / 4)
    while not all(exchange(done(seconds))):
        pass


@contextmanager
def _watched(watch: stacks.Watch | None, wait: Wait) -> Iterator[None]:
    """Let the watch know what this thread does, and raise what it finds out when that fails."""
    global _news
    if watch is None:
        yield
        return
    outer = watch.wait
    wait = wait if outer is None else Wait(wait.stage, outer.code, wait.seconds)
    is_outermost = _news is None
    news = _news = _news or News()
    watch.set_wait(wait)
    try:
        yield
    except (Exception, Interrupted) as error:
        # Once a host is lost, whatever fails fails because of that, such as a request whose connection was broken.
        if not is_lost(error) and (news.said is None or news.said in str(error)):
            raise
        news.end()
        found = watch.report(error, wait)
        message, fix = explain(found, watch.world_size, news.said)
        raise fail(found.wait.code, found.wait.stage, f"{message}.", fix=fix) from error
    finally:
        if is_outermost:
            news.end()
            _news = None
        watch.set_wait(outer)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or does not answer."""
    if isinstance(error, Interrupted):
        return True
    if (
        isinstance(error, ShardproofError)
        or not isinstance(error, RuntimeError)
        or dist.get_world_size() == 1
    ):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _LOST)


@contextmanager
def joining(seconds: float) -> Iterator[None]:
    """For the block in which ranks meet, before there is a group: its error says who could not reach whom."""
    try:
        yield
    except RuntimeError as error:
        # An error of a device is this rank's own.
        if isinstance(error, ShardproofError | torch.AcceleratorError) or "RANK" not in os.environ:
            raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        message = (
            f"rank {os.environ['RANK']} on host {socket.gethostname()} could not join {_other_ranks()}, at "
            f"{place}, within {seconds:g} s: a host was lost, or the hosts do not reach each other. The backend says: "
            f"{first_line}"
        )
        fix = "look at the network between the hosts and at what the other hosts say, then rerun the same command"
        raise fail("T308", "launch", message, fix=fix) from error


def _other_ranks() -> str:
    """`the ranks of host b`, or `the other ranks` where the launcher named no hosts or this is the only one."""
    names = json.loads(os.environ.get(HOST_NAMES, "[]"))
    mine = int(os.environ.get("GROUP_RANK", "0"))
    others = [printable(str(name)) for number, name in enumerate(names) if number != mine]
    if not others:
        return "the other ranks"
    more = f" and {len(others) - _MAX_NAMES} more" if len(others) > _MAX_NAMES else ""
    return f"the ranks of host{'s' * (len(others) > 1)} {', '.join(others[:_MAX_NAMES])}{more}"
