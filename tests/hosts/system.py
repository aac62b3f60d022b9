"""What tests ask of Linux: commands that must succeed, and processes that end with the one that started them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

WITH_ME = ["setpriv", "--pdeathsig", "KILL"]  # the kernel ends it when this process ends, in whatever way
_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}


def missing() -> str | None:
    """What this machine lacks for hosts made of namespaces, and how to get it; None if it has everything."""
    lacking = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if sys.platform != "linux":
        return "hosts made of namespaces need Linux"
    if os.geteuid() != 0:
        return "hosts made of namespaces need root: run `sudo make test-hosts`"
    if lacking:
        return f"hosts made of namespaces need {' and '.join(lacking)}: run `apt-get install {' '.join(lacking)}`"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True
    )
    if tried.returncode:
        return "this container may not make namespaces: start it with --privileged, or use a virtual machine"
    return None


def run(*command: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def start_up(*command: str) -> subprocess.Popen[bytes]:
    """A process that ends with this one, once it has said that it is up."""
    process = subprocess.Popen([*WITH_ME, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n", f"{command} did not start"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and close its pipes."""
    process.kill()
    process.communicate()


def empty(folder: Path) -> None:
    """Delete what is in a folder."""
    for path in folder.iterdir():
        delete(path)


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder and what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


if __name__ == "__main__":  # for the Makefile
    raise SystemExit(missing())
