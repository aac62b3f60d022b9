"""The reference to compare with: the whole model in one process, as plain transformers runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from shardproof.dist.collectives import broadcast, together
from shardproof.export.stream import WeightStream
from shardproof.model.roles import CRITIC, VALUE_HEAD
from shardproof.shard.sharded_model import ShardedModel


@dataclass(frozen=True)
class Reference:
    """Scores of a single process in float32, and how far the layout's own dtypes take a single process from them."""

    scores: list[torch.Tensor]
    noise: float


def score_alone(
    policy: ShardedModel, folder: str, sequences: Sequence[Sequence[int]], trust_remote_code: bool
) -> Reference:
    """Rank 0 scores the sequences with the whole model, one by one, eager attention, no sharding and no packing.

    Collective: every rank. Memory: the whole model in float32 on rank 0.
    """
    head = _value_head(policy) if policy.role == CRITIC else None
    scores: list[torch.Tensor] = []
    noise = 0.0
    with together("reference"):
        if dist.get_rank() == 0:
            scores = _score(policy, folder, sequences, torch.float32, head, trust_remote_code)
            settings = policy.settings
            if {settings.compute_dtype, settings.param_dtype} != {torch.float32}:
                dtype = settings.compute_dtype
                rounded = _score(policy, folder, sequences, dtype, head, trust_remote_code, rounding=True)
                noise = float((torch.cat(rounded) - torch.cat(scores)).abs().mean())
    rows, noise = broadcast([[row.tolist() for row in scores], noise])
    return Reference([torch.tensor(row) for row in rows], noise)


@torch.no_grad()
def _score(
    policy: ShardedModel,
    folder: str,
    sequences: Sequence[Sequence[int]],
    dtype: torch.dtype,
    head: torch.Tensor | None,
    trust_remote_code: bool,
    rounding: bool = False,
) -> list[torch.Tensor]:
    """Scores in `dtype`; with `rounding` the weights first lose what the policy's stored dtype does not hold."""
    device = policy.device
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
    )
    model = model.eval().to(device)  # a whole, unsharded module: moving it is safe
    if rounding:
        for param in model.parameters():
            param.copy_(param.to(policy.settings.param_dtype))
    rows = []
    for sequence in sequences:
        ids = torch.tensor([list(sequence)], device=device)
        if head is not None:
            hidden = model.base_model(input_ids=ids, use_cache=False)[0][0, :-1]
            rows.append((hidden @ head.to(hidden.dtype).T).squeeze(-1).float().cpu())
            continue
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        every = torch.log_softmax(logits, dim=-1)
        rows.append(every.gather(1, ids[0, 1:, None]).squeeze(1).cpu())
    return rows


def _value_head(policy: ShardedModel) -> torch.Tensor:
    """The critic's head: it is drawn from a seed, so no file has it. Collective: every rank."""
    found: list[torch.Tensor] = []
    for name, tensor in WeightStream(policy, digests=False):
        if name == f"{VALUE_HEAD}.weight":
            found.append(tensor.clone())
    (head,) = found
    return head
