"""Carries packets between two network interfaces, late, and not all of them: `slow_link.py HERE THERE DELAY_MS LOSS_PERCENT`.

The kernel's own way (netem) is a module that many virtual machines lack.
"""

import heapq
import itertools
import random
import select
import socket
import sys
import time

_ALL_PACKETS = 3  # ETH_P_ALL
_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
_LARGEST = 1 << 17


def open_interface(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # Packets come with what the kernel left for a network card to do, such as checksums.
    for option in (_VNET_HDR, _IGNORE_OUTGOING):
        opened.setsockopt(_SOL_PACKET, option, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    opened.bind((name, _ALL_PACKETS))
    opened.setblocking(False)
    return opened


def main() -> None:
    here, there = map(open_interface, sys.argv[1:3])
    delay_s, loss = float(sys.argv[3]) / 1e3, float(sys.argv[4]) / 100
    other = {here: there, there: here}
    chance, numbers = random.Random(0), itertools.count()
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    print("up", flush=True)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([here, there], [], [], pause)[0]:
            packet = source.recv(_LARGEST)
            if chance.random() >= loss:
                heapq.heappush(waiting, (time.monotonic() + delay_s, next(numbers), other[source], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            try:
                target.send(packet)
            except OSError as error:  # as a cable would: whoever sent it will notice
                print(f"lost a packet of {len(packet)} bytes: {error}", file=sys.stderr)


main()
