"""The addresses of this host: which of them others reach it at, and which interface has it."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import sys


def resolve(host: str) -> list[str]:
    """The addresses that a name stands for on this host, without repetitions. Raises OSError for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty or endless part of a name
        raise OSError(f"{host!r} is no name of a host") from error
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_own(address: str) -> bool:
    """Whether an address is one of this host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_towards(other: str) -> str:
    """This host's own address on the way to another one; loopback if there is no way. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(other or None, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def listening_addresses(host: str) -> list[str] | None:
    """Where the host of the endpoint listens: "" means every interface. None on all other hosts."""
    try:
        own = [address for address in resolve(host) if is_own(address)]
    except OSError:  # a cluster's names may come a moment later
        return [""] if host.partition(".")[0] == socket.gethostname().partition(".")[0] else None
    if not own:
        return None
    reachable = [address for address in own if not is_loopback(address)]
    if reachable:
        return reachable
    # Debian gives a host's own name the address 127.0.1.1, which other hosts resolve to the real one.
    return own[:1] if host == "localhost" or _is_address(host) else [""]


def loopback_interface() -> str:
    """The name of the loopback interface; empty where there is none, or where it is down."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:  # a namespace whose loopback is down
            return ""
    return names.pop() if names else ""


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class _Interface(ctypes.Structure):
    """struct ifaddrs, as far as it is read here."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


def interface_of(address: str) -> str:
    """The name of the interface that has an address; empty if it cannot be found out."""
    if sys.platform != "linux":
        return ""
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed
    kind, offset = (socket.AF_INET, 4) if len(wanted) == 4 else (socket.AF_INET6, 8)
    libc, first = ctypes.CDLL(None), ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return ""
    try:
        each = first.value
        while each:
            found = _Interface.from_address(each)
            where = found.address
            is_kind = where and ctypes.c_ushort.from_address(where).value == kind
            if is_kind and ctypes.string_at(where + offset, len(wanted)) == wanted:
                return str(found.name.decode())
            each = found.next
    finally:
        libc.freeifaddrs(first)
    return ""
