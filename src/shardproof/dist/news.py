"""What the process that started this rank knows of lost hosts, and how the rank is taken out of what it waits in.

The agents of a run's hosts hear of each other every second. When one is lost, the agent writes that into a file of its
own host. A rank may be anywhere then: in a collective whose other end is gone, or in Python code that needs no other
rank for minutes. Its connections to other hosts are broken, which ends collectives; then the thread is interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import stat
import threading
from ipaddress import ip_address
from pathlib import Path

from shardproof.text import printable

VARIABLE = "SHARDPROOF_NEWS_FILE"
_LOOK_S = 0.5
_AGAIN_S = 2.0  # how long a collective may take to notice that its connections are gone


class Interrupted(BaseException):
    """Raised in a thread that is in no collective, when a host was lost. No Exception: nothing but a deadline takes it."""


class News:
    """Looks for news on a thread of its own while the thread that made it is inside a block."""

    def __init__(self) -> None:
        self.said: str | None = None  # "host b was lost: ..."
        self._watched = threading.get_ident()
        self._lock = threading.Lock()
        self._inside = True
        self._left = threading.Event()
        path = os.environ.get(VARIABLE)
        if path:
            looking = threading.Thread(
                target=self._look, args=(Path(path),), name="shardproof news", daemon=True
            )
            looking.start()

    def end(self) -> None:
        """From now on the thread is not interrupted."""
        with self._lock:
            self._inside = False
            if self.said is not None:
                _interrupt(self._watched, None)  # one that was not raised yet
        self._left.set()

    def _look(self, path: Path) -> None:
        while not self._left.wait(_LOOK_S):
            with contextlib.suppress(FileNotFoundError):
                self.said = read_news(path)
                break
        while not self._left.is_set():
            break_connections()
            if self._left.wait(_AGAIN_S):
                return
            with self._lock:
                if self._inside:
                    _interrupt(self._watched, Interrupted)


def read_news(path: Path) -> str:
    """What an agent wrote, as a sentence without its full stop."""
    content = path.read_bytes()
    try:
        told = json.loads(content)
        names = [printable(str(name)) for name in told["lost"]]
        seconds = float(told["seconds"])
    except (ValueError, KeyError, TypeError):
        return "another host was lost"
    who = f"host{'s' * (len(names) > 1)} {', '.join(names)}" if names else "another host"
    return f"{who} {'were' if len(names) > 1 else 'was'} lost: not heard of for {seconds:.0f} s"


def break_connections() -> None:
    """Break this process's TCP connections to other hosts, other than the one to the process group's store."""
    port = os.environ.get("MASTER_PORT", "")
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                peer = found.getpeername() if found.family in (socket.AF_INET, socket.AF_INET6) else None
                if peer is None or ip_address(peer[0].partition("%")[0]).is_loopback or str(peer[1]) == port:
                    continue
                found.shutdown(socket.SHUT_RDWR)


def _interrupt(ident: int, kind: type[BaseException] | None) -> None:
    """Raise in another thread as soon as it runs Python code; None takes back what was not raised yet."""
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), raised)
