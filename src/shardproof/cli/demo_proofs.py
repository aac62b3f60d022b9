"""What the ranks of `shardproof demo` show before they train: what each holds, and that one wrong byte is found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardproof.checkpoints.resume import resume
from shardproof.checkpoints.save import save_checkpoint
from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange
from shardproof.dist.mesh import make_mesh
from shardproof.errors import ShardproofError
from shardproof.export.stream import WeightStream
from shardproof.files import remove_folder
from shardproof.findings import Finding
from shardproof.shard.attest import attest, held_tensors
from shardproof.shard.load import load
from shardproof.shard.sharded_model import ShardedModel

SHOWN = ("model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.rotary_emb.inv_freq")
DAMAGED = "model.layers.1.mlp.down_proj.weight"
_LAST_RANK = -1


@dataclass(frozen=True)
class Injected:
    """A byte that was changed on purpose, and what the check of that place reported."""

    place: str
    change: str
    check: str
    findings: list[Finding]


def describe_load(policy: ShardedModel) -> list[str]:
    """Each rank's receipt, the origin of some tensors on the last rank, and the result of the comparison.

    Collective: every rank.
    """
    mine = [str(policy.receipt), [str(policy.provenance[name]) for name in SHOWN]]
    rows = exchange(mine)
    lines = [
        f"  rank {rank}: {receipt}".replace("\n", "\n        ") for rank, (receipt, _) in enumerate(rows)
    ]
    lines += ["", f"  Where rank {len(rows) - 1} has its values from:"]
    lines += [f"    {name}\n      <- {writer}" for name, writer in zip(SHOWN, rows[_LAST_RANK][1])]
    findings = attest(policy)
    lines += ["", f"  Attested: every rank compared what it holds with the others: {len(findings)} findings."]
    return lines + [_indented(finding) for finding in findings]


def load_model(recipe: Recipe, replicate: int = 1) -> ShardedModel:
    """The recipe's model, sharded as its run shards it, or with several whole copies. Collective: every rank."""
    return load(
        recipe.model.path,
        strategy=recipe.model.strategy,
        mesh=make_mesh(replicate=replicate),
        compute_dtype=torch.float32,
        progress=False,
    )


def inject_faults(recipe: Recipe, folder: Path) -> list[Injected]:
    """Change one byte in three places, one after the other, and report what the check of each place finds.

    The model is a second one, with a copy per rank, so that nothing of this can reach the training that follows.

    Collective: every rank.
    """
    policy = load_model(recipe, replicate=dist.get_world_size())
    return [_in_memory(policy), _to_engine(policy), _on_disk(policy, folder)]


def _in_memory(policy: ShardedModel) -> Injected:
    """One bit on the last rank; every rank has a copy of the tensor."""
    last = dist.get_world_size() - 1
    tensor = next(item.local for item in held_tensors(policy.module) if item.name == DAMAGED)
    if dist.get_rank() == last:
        flip_bit(tensor)
    findings = attest(policy)
    if dist.get_rank() == last:
        flip_bit(tensor)
    change = f"one bit of {DAMAGED} in the memory of rank {last}"
    return Injected("memory", change, "attest(model)", findings)


def _to_engine(policy: ShardedModel) -> Injected:
    """One bit of what an inference engine receives."""
    stream = WeightStream(policy, torch.float32)
    received = {name: tensor.clone() for name, tensor in stream}
    assert stream.receipt is not None
    flip_bit(received[DAMAGED])
    findings = stream.receipt.manifest.compare(received.items(), "the engine")
    return Injected(
        "transfer", f"one bit of {DAMAGED} on its way to the engine", "manifest.compare(received)", findings
    )


def _on_disk(policy: ShardedModel, folder: Path) -> Injected:
    """One bit of a checkpoint's largest file."""
    save_checkpoint(folder, policy, step=1)
    files = [path for path in (folder / "step-00000001").iterdir() if path.is_file()]
    damaged = max(files, key=lambda path: (path.stat().st_size, path.name))
    dist.barrier()
    if dist.get_rank() == 0:
        raw = bytearray(damaged.read_bytes())
        raw[len(raw) // 2] ^= 1
        damaged.write_bytes(raw)
    dist.barrier()
    findings: list[Finding] = []
    try:
        resume(folder, policy)
    except ShardproofError as error:
        findings = error.findings
    dist.barrier()
    if dist.get_rank() == 0:
        remove_folder(folder)
    return Injected("disk", f"one bit of a checkpoint, in {damaged.name}", "resume(folder, model)", findings)


def flip_bit(tensor: torch.Tensor) -> None:
    """Change the lowest bit of a tensor's first element: a number that is wrong by about one part in ten million."""
    tensor.detach().view(-1)[:1].view(torch.uint8)[0] ^= 1


def describe_faults(injected: Iterable[Injected]) -> list[str]:
    """For each change: what was done, which check ran, and what it reported."""
    lines = []
    for fault in injected:
        lines += [f"  Changed {fault.change}.", f"  {fault.check} reports:"]
        lines += [_indented(finding) for finding in fault.findings] or ["    nothing: THE FAULT WAS MISSED"]
        lines += [""]
    return lines[:-1]


def _indented(finding: Finding) -> str:
    return "    " + str(finding).replace("\n", "\n    ")
