"""The first process of a host made of namespaces: gives it its own name and folders, then waits for orphans.

Runs inside the new namespaces, without site packages: `init.py NAME HOSTS_FILE CLUSTER_FOLDER DISK SHARED KEPT...`. What
is kept and lies in /tmp, such as this source tree, is seen in the new /tmp too.
"""

import ctypes
import os
import signal
import socket
import sys

_BIND, _MOVE = 4096, 8192  # sys/mount.h
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, None):
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}")


def main() -> None:
    name, names, folder, disk, shared, *kept = sys.argv[1:]
    socket.sethostname(name)
    mount(names, "/etc/hosts", flags=_BIND)
    mount("shm", "/dev/shm", "tmpfs")
    mount("sysfs", "/sys", "sysfs")  # shows the interfaces of this host
    # A new /tmp, in which the disk and the shared folder keep their paths.
    new = os.path.join(folder, "tmp")
    os.makedirs(new, exist_ok=True)
    mount("tmp", new, "tmpfs")
    os.chmod(new, 0o1777)
    visible = {disk: [disk, "/tmp/disk"], shared: [shared, "/tmp/shared"]}
    visible |= {path: [path] for path in kept if path.startswith("/tmp/")}
    for source, targets in visible.items():
        for target in targets if source else ():
            inside = new + target.removeprefix("/tmp")
            os.makedirs(inside, exist_ok=True)
            mount(source, inside, flags=_BIND)
    mount(new, "/tmp", flags=_MOVE)
    print("up", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        signal.sigwait([signal.SIGCHLD])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue


main()
