"""Counts of what shardproof's own collectives move, in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class Count:
    """Collectives, and the bytes that this rank sent and received in them, without the transport's own."""

    collectives: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def add(self, sent: int, received: int) -> None:
        self.collectives += 1
        self.bytes_sent += sent
        self.bytes_received += received


@dataclass
class Traffic:
    """What this rank has taken part in since the process began.

    Control messages are JSON and short rows of numbers. Everything else is data: weights, tokens, momentum, file
    contents. Collectives that FSDP issues are not counted.
    """

    messages: int = 0  # exchanges, broadcasts and the like; each takes one or more collectives
    control: dict[str, Count] = field(default_factory=dict)  # by kind of collective
    data: dict[str, Count] = field(default_factory=dict)  # by what is moved

    def count_control(self, kind: str, sent: int, received: int) -> None:
        self.control.setdefault(kind, Count()).add(sent, received)

    def count_data(self, what: str, sent: int, received: int) -> None:
        self.data.setdefault(what, Count()).add(sent, received)

    @property
    def total_control(self) -> Count:
        """All kinds of control collectives together."""
        return _sum(self.control)

    @property
    def total_data(self) -> Count:
        """All data that our own collectives moved."""
        return _sum(self.data)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def _sum(counts: dict[str, Count]) -> Count:
    total = Count()
    for count in counts.values():
        total.collectives += count.collectives
        total.bytes_sent += count.bytes_sent
        total.bytes_received += count.bytes_received
    return total


def tree_sends(rank: int, root: int, size: int) -> int:
    """To how many ranks this one passes a broadcast on: gloo sends it along a binomial tree."""
    place = (rank - root) % size
    return sum((1 << bit) > place and place + (1 << bit) < size for bit in range(size.bit_length()))


traffic = Traffic()
