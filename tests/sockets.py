"""Where processes listen, as the kernel says it: no package is asked, so that any machine can tell."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses that these processes listen on, over IPv4 and IPv6."""
    return {address for address, _ in listening_ports(pids)}


def listening_ports(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses and ports that these processes listen on, each in its own network."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            inodes = set()
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                        address, _, port = fields[1].partition(":")
                        found.add((str(_address(address)), int(port, 16)))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """As the kernel prints it: words of 32 bits in the host's order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def all_loopback(addresses: Iterable[str]) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def session_of(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(process.name))
        except OSError:
            continue  # it has ended
    return found
