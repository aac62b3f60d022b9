"""`NetworkWeights`: each rank sends its own slices once to each engine host, and nothing is gathered.

A receiver there (`shardproof receive`) puts them together, proves them against the manifest, and shows them to engines
of its host through shared memory. A rank keeps its slices of the last committed version: to a receiver that has that
version it sends differences from them, to any other receiver everything.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist.collectives import broadcast, together
from shardproof.dist.deadline import Deadline, deadline, mesh_groups
from shardproof.export.channel import Lost, Refused, parse_address, read_secret
from shardproof.export.image import Image, ImageLayout
from shardproof.export.manifest import ExportReceipt
from shardproof.export.packing import Packing
from shardproof.export.received import announce, manifest_rows
from shardproof.export.sender import Blocks, Session, send_slices
from shardproof.export.slice_digests import digest_slices
from shardproof.export.slices import own_ranges, write_slices
from shardproof.export.stream import WeightStream
from shardproof.findings import Finding
from shardproof.shard.sharded_model import ShardedModel

_DEADLINE_S = 600.0
_MARGIN_S = 60.0
# What the transfer may take of the deadline: a receiver that is lost in it must not take the others' time to prove theirs.
_TRANSFER_SHARE = 0.5
# A session lasts until its engines have loaded the payload: much longer than the transfer itself.
_SESSION_FACTOR = 10
_STAGE = "sync"


@dataclass(frozen=True)
class Sent:
    """What one transfer came to; the same on every rank."""

    receipt: ExportReceipt
    updates: Mapping[str, dict[str, Any]]  # by receiver: where its engines read the payload, and the manifest
    lost: Mapping[str, Finding]  # by receiver: why it does not have the payload
    wire_bytes: Mapping[str, int] = field(default_factory=dict)  # by receiver: what all ranks sent it
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase


@dataclass(frozen=True)
class _Base:
    """This rank's slices of the last committed version."""

    version: int
    digest: str
    image: Image


class NetworkWeights:
    """A policy's weights at receivers on other hosts, in two phases: `write`, and `commit` once engines have loaded them.

    Collective: every rank makes it, writes and commits. Memory: this rank's slices twice.
    """

    def __init__(
        self,
        policy: ShardedModel,
        receivers: Sequence[str],
        secret_file: str | os.PathLike[str],
        dtype: torch.dtype | str | None = None,
        merge_lora: bool = True,
        deadline_s: float = _DEADLINE_S,
        differences: bool = True,
    ):
        self.policy = policy
        self.deadline_s = deadline_s
        self.differences = differences
        with together(_STAGE):
            self._key = read_secret(secret_file, _STAGE)
            self._receivers = {
                name: parse_address(name, _STAGE, "rollout.vllm.receivers")
                for name in dict.fromkeys(receivers)
            }
        self._stream = WeightStream(policy, dtype, merge_lora=merge_lora, deadline_s=deadline_s)
        self._layout = ImageLayout(self._stream.metadata())
        self._ranges = own_ranges(self._stream)
        self._packing = Packing.of(self._ranges, self._layout)
        self._next = Image.private(self._layout)
        self._base: _Base | None = None
        self._written: ExportReceipt | None = None
        self._sessions: dict[str, Session] = {}  # on rank 0
        self.run = str(broadcast(f"weights-{secrets.token_hex(8)}"))

    def write(self) -> Sent:
        """Send this rank's slices to every receiver, and have them proved there.

        A receiver that is lost or refuses is in `lost`, and the others go on. Collective: every rank.
        """
        started = time.perf_counter()
        with self._deadline():
            write_slices(self._stream, self._next.flat)
            digests = digest_slices(self._next, self._ranges)
        written = time.perf_counter()
        receipt = self._written = self._stream.make_receipt(digests, written - started)
        limit, transfer = Deadline(self.deadline_s), Deadline(self.deadline_s * _TRANSFER_SHARE)
        seconds = {"write": written - started}
        with self._deadline():
            opened, lost = self._begin(receipt, transfer)
            wire_bytes = self._send(opened, lost, transfer)
            seconds["send"] = time.perf_counter() - written
            proved = self._verify(receipt, [name for name in opened if name not in lost], lost, limit)
            seconds["verify"] = time.perf_counter() - written - seconds["send"]
        rows = manifest_rows(receipt.manifest)
        updates = {name: {"address": found["address"], "manifest": rows} for name, found in proved.items()}
        return Sent(receipt, updates, lost, wire_bytes, seconds)

    def commit(self, receivers: Sequence[str]) -> dict[str, Finding]:
        """Make the payload the base of the next one at these receivers; returns those whose receipt did not come.

        The others, and a receiver whose receipt is lost, get everything next time. Collective: every rank.
        """
        assert self._written is not None, "write comes first"
        receipt, limit = self._written, Deadline(self.deadline_s)

        def commit_one(name: str) -> dict[str, Any]:
            if name not in self._sessions:
                raise Refused("it did not get this version")
            answer = self._sessions[name].commit(receipt.version, limit)
            if (answer.get("version"), answer.get("digest")) != (receipt.version, receipt.digest):
                raise Refused("its receipt is for another payload")
            return answer

        with self._deadline():
            done, lost = self._by_rank_0(receivers, commit_one)
        self._hang_up()
        if done:
            spare = self._base.image if self._base is not None else Image.private(self._layout)
            self._base = _Base(receipt.version, receipt.digest, self._next)
            self._next = spare
        return lost

    def close(self) -> None:
        """Hang up and give the memory back."""
        self._hang_up()
        self._next.drop()
        if self._base is not None:
            self._base.image.drop()
            self._base = None

    # The phases of a transfer.

    def _begin(self, receipt: ExportReceipt, limit: Deadline) -> tuple[dict[str, Any], dict[str, Finding]]:
        """Announce the payload everywhere. Collective: every rank."""
        self._hang_up()
        announced = {
            "run": self.run,
            "version": receipt.version,
            "tensors": announce(self._layout.metas),
            "size": self._layout.size,
        }

        def begin_one(name: str) -> dict[str, Any]:
            session = Session(self._receivers[name], self._key, _SESSION_FACTOR * self.deadline_s, limit)
            self._sessions[name] = session
            return session.begin(announced, limit)

        return self._by_rank_0(list(self._receivers), begin_one)

    def _send(self, opened: Mapping[str, Any], lost: dict[str, Finding], limit: Deadline) -> dict[str, int]:
        """Send this rank's slices; adds receivers that a rank could not reach to `lost`. Collective: every rank."""
        bases = {name: self._base_of(answer) for name, answer in opened.items()}
        new = self._next.memory.numpy()
        blocks = {
            base: Blocks(self._packing, new, base.image.memory.numpy() if base is not None else None)
            for base in set(bases.values())
        }

        def send_one(name: str) -> int:
            base = bases[name]
            request = {
                "ticket": opened[name]["ticket"],
                "rank": dist.get_rank(),
                "base": base.version if base is not None else None,
            }
            return send_slices(self._receivers[name], self._key, request, blocks[base], limit)

        with together(_STAGE) as message:
            sent, problems = self._each(list(opened) if self._packing.size else [], send_one, dist.get_rank())
            message.mine = [sent, {name: finding.to_json() for name, finding in problems.items()}]
        total = dict.fromkeys(opened, 0)
        for counts, found in message.rows:
            for name, finding in found.items():
                lost.setdefault(name, Finding.from_json(finding))
            for name, count in counts.items():
                total[name] += count
        return total

    def _verify(
        self, receipt: ExportReceipt, names: Sequence[str], lost: dict[str, Finding], limit: Deadline
    ) -> dict[str, Any]:
        """The receivers' receipts; adds those that hold something else to `lost`. Collective: every rank."""
        digests = [receipt.manifest.digests[meta.name] for meta in self._layout.metas]

        def verify_one(name: str) -> dict[str, Any]:
            answer = self._sessions[name].verify(digests, limit)
            if (answer.get("version"), answer.get("digest")) != (receipt.version, receipt.digest):
                raise Refused("its receipt is for another payload")
            return answer

        proved, problems = self._by_rank_0(names, verify_one)
        lost |= problems
        return proved

    def _base_of(self, answer: Mapping[str, Any]) -> _Base | None:
        """What to send differences from: our committed version, if that is what the receiver has."""
        mine, theirs = self._base, answer.get("base")
        if not self.differences or mine is None or theirs is None:
            return None
        same = (self.run, mine.version, mine.digest) == (theirs["run"], theirs["version"], theirs["digest"])
        return mine if same else None

    def _by_rank_0(
        self, names: Sequence[str], ask: Callable[[str], dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Finding]]:
        """({receiver: answer}, {receiver: finding}) of what rank 0 asks; on every rank. Collective: every rank."""
        with together(_STAGE) as message:
            if dist.get_rank() == 0:
                answers, problems = self._each(names, ask, None)
                message.mine = [answers, {name: finding.to_json() for name, finding in problems.items()}]
        answers, problems = message.rows[0]
        return answers, {name: Finding.from_json(finding) for name, finding in problems.items()}

    def _each(
        self, names: Sequence[str], ask: Callable[[str], Any], rank: int | None
    ) -> tuple[dict[str, Any], dict[str, Finding]]:
        """What receivers answer, all at once, and what is wrong with those that do not."""

        def ask_one(name: str) -> tuple[str, Any, Finding | None]:
            try:
                return name, ask(name), None
            except Lost as error:
                message = f"the receiver of weights at {name} is lost or too slow: {error}."
                fix = "see that `shardproof receive` runs there and can be reached; the next sync sends it everything"
                return name, None, Finding("R505", _STAGE, message, rank=rank, fix=fix)
            except Refused as error:
                message = f"the receiver of weights at {name} refused: {error}."
                return name, None, Finding("R502", _STAGE, message, rank=rank, tensor=error.tensor)

        if not names:
            return {}, {}
        with ThreadPoolExecutor(len(names)) as pool:
            rows = list(pool.map(ask_one, names))
        answers = {name: answer for name, answer, finding in rows if finding is None}
        return answers, {name: finding for name, _, finding in rows if finding is not None}

    def _hang_up(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions = {}

    def _deadline(self) -> Any:
        """Ranks wait for each other a little longer than for receivers, so that these are what is named."""
        return deadline("export", "E406", self.deadline_s + _MARGIN_S, mesh_groups(self.policy.mesh))
