"""The program between a trainer and its vLLM server: it starts the server, and ends it when the trainer is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5
_GRACE_S = 8.0  # less than the trainer itself waits


def main() -> None:
    """`python -m shardproof.rollout.vllm_child TRAINER_PID vllm-arguments...`, in a session of its own."""
    trainer, *arguments = sys.argv[1:]
    # `vllm serve` is this program too, but its command asks for metadata that the CPU package does not have.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    sys.exit(watch(int(trainer), command))


def watch(trainer: int, command: list[str]) -> int:
    """Run a command until it ends, or until the trainer does; returns its exit code.

    A trainer that is killed cannot stop its server, and a server that hangs does not stop when asked: whatever is left
    of it a few seconds later is killed, with this program.
    """
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    if os.getppid() != trainer:
        sys.exit("the trainer exited before its vLLM server started")
    server = subprocess.Popen(command, preexec_fn=_die_with_parent)
    # A process that loses its parent gets another one. (A signal at the parent's death would come too early: it is
    # sent when the thread ends that started this program.)
    while server.poll() is None and not asked and os.getppid() == trainer:
        _wait(server, _LOOK_S)
    if server.poll() is None:
        server.terminate()
        end = time.monotonic() + _GRACE_S
        while server.poll() is None and time.monotonic() < end:
            _wait(server, _LOOK_S)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)  # its own children do not always follow it
        server.kill()
    code = server.wait()
    return code if code >= 0 else 128 - code


def _wait(server: subprocess.Popen[Any], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(seconds)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
