"""Worker processes for users' code: they end with the process that started them, and so does all that they started.

A worker is a fresh interpreter, not a fork, because ranks hold threads and a CUDA context; and it is started by
`subprocess`, because `multiprocessing` would run the user's training script again in it, and refuses to start anything
below a daemon.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from pathlib import Path

# The worker's module is imported along the starter's own path, or, in another interpreter, from the package's folder alone:
# the starter's other packages are for the starter's Python.
_SAME = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from {module} import serve; serve()"
_OTHER = (
    "import importlib.util as u, sys; s = u.spec_from_file_location('shardproof', sys.argv.pop()); "
    "m = u.module_from_spec(s); sys.modules['shardproof'] = m; s.loader.exec_module(m); "
    "from {module} import serve; serve()"
)


class WorkerProcess:
    """A process in a session of its own that runs `serve` of a module, with open files to talk through.

    A session of its own: Ctrl-C does not reach it, and killing its group also ends what the user's code started.
    """

    def __init__(self, module: str, files: Sequence[int], python: str | None = None):
        if python is None:
            boot, place = _SAME, json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        else:
            boot, place = _OTHER, str(Path(__file__).with_name("__init__.py"))
        lifeline, self._lifeline = Pipe(duplex=False)
        with lifeline:
            numbers = [lifeline.fileno(), *files]
            self.popen = subprocess.Popen(
                [python or sys.executable, "-c", boot.format(module=module)]
                + [*map(str, [os.getpid(), *numbers]), place],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def end(self, patience_s: float = 0.0) -> str:
        """End the process and all it started, after some time to leave by itself; returns how it ended."""
        if not self._lifeline.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(patience_s)
            # Sandboxes run generated code in sessions of its own, which the group's signal does not reach.
            hidden = _descendants(self.popen.pid) if self.popen.poll() is None else []
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            for each in hidden:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
            self._lifeline.close()
        code = self.popen.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def take_files() -> list[int]:
    """In a worker: the open files that it was started with. It is killed from now on once its starter is gone."""
    parent, lifeline, *files = map(int, sys.argv[1:])
    _die_with_starter(parent, lifeline)
    for each in files:
        os.set_inheritable(
            each, False
        )  # a process that the user's code starts must not keep the connection open
    return files


def _die_with_starter(parent: int, lifeline: int) -> None:
    """Have this worker, and what the user's code starts, killed once its starter is gone, even in the middle of a call.

    The starter holds the other end of `lifeline` and writes nothing, so it is readable when the starter is gone. The
    kernel then sends the signal: a thread would not get to run beside C code that keeps the interpreter lock, such as a
    regular expression. The thread is for kernels that cannot, and for a starter whose own fork has a copy of its end.
    """
    os.set_inheritable(lifeline, False)
    with contextlib.suppress(OSError):  # sandboxes whose kernel cannot
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    """The processes that a process and its children started, where the system lists them as Linux does."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        # Whatever is not a process, or no longer. The name before the parent may hold anything, spaces and brackets too.
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = Path("/proc", str(int(entry)), "stat").read_text(errors="replace")
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, left = [], [process]
    while left:
        left += (started := children.pop(left.pop(), []))
        found += started
    return found
