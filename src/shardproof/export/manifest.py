"""What was sent: a receipt for the sender, a manifest that a receiver can be compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from shardproof.digest import digest
from shardproof.findings import Finding
from shardproof.weights.writer import TensorMeta


@dataclass(frozen=True)
class Manifest:
    """Every tensor of a payload with its digest."""

    version: int
    tensors: tuple[TensorMeta, ...]
    digests: Mapping[str, int]

    @property
    def total(self) -> str:
        """One digest of all: names, dtypes, shapes and contents, in order."""
        lines = [f"{meta.described}{self.digests.get(meta.name)}\n" for meta in self.tensors]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def compare(
        self,
        received: Iterable[tuple[str, torch.Tensor]],
        receiver: str = "the receiver",
        sent: str = "what was sent",
    ) -> list[Finding]:
        """What a receiver holds that was not sent so, or does not hold."""
        wanted = {meta.name: meta for meta in self.tensors}
        findings = []
        for name, tensor in received:
            meta = wanted.pop(name, None)
            if meta is None:
                problem = "is not in the manifest, or arrived twice"
            elif (tensor.dtype, tuple(tensor.shape)) != (meta.dtype, meta.shape):
                problem = f"is {tensor.dtype} {tuple(tensor.shape)}, expected {meta.dtype} {meta.shape}"
            elif name in self.digests and digest(tensor.contiguous()) != self.digests[name]:
                problem = f"differs from {sent}"
            else:
                continue
            findings.append(Finding("E404", "verify", f"{name!r} at {receiver} {problem}.", tensor=name))
        for name in wanted:
            findings.append(Finding("E404", "verify", f"{name!r} did not arrive at {receiver}.", tensor=name))
        return findings


@dataclass(frozen=True)
class ExportReceipt:
    """What one run of a stream sent."""

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float  # in the stream itself; the consumer's time is not counted
    manifest: Manifest
    findings: list[Finding] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return self.manifest.total

    def __str__(self) -> str:
        rate = self.num_bytes / 2**30 / max(self.seconds, 1e-9)
        return (
            f"sent version {self.version}: {self.num_tensors} tensors, {self.num_bytes / 2**20:.1f} MiB in "
            f"{self.seconds:.2f} s ({rate:.2f} GiB/s), digest {self.digest[:16]}"
        )
