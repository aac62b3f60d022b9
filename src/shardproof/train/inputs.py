"""A micro-batch as a model sees it: tokens in one row on the device, and the way back to its predictions."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from shardproof.model.packing import Packing, to_device
from shardproof.model.routing import NO_RECORD
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch


class Inputs:
    """A micro-batch as tensors on the device: tokens end to end, this rank's slice of them, and the way back.

    A sequence's last token predicts nothing. In a packed row it is left out, unless the router's statistics, which
    count every token, are wanted.
    """

    def __init__(self, policy: ShardedModel, micro_batch: Batch, packed: bool, every_token: bool):
        self._group = policy.sequence_group if packed else None
        size = self._group.size if self._group is not None else 1
        sequences = micro_batch.sequences or [[0, 0, 0]]
        trimmed = packed and not every_token
        lengths = [len(sequence) - trimmed for sequence in sequences]
        tokens = [token for sequence in sequences for token in (sequence[:-1] if trimmed else sequence)]
        # A last token that is kept has no target; the 0 in its place is never used.
        targets = [token for sequence in sequences for token in (*sequence[1:], *([] if trimmed else [0]))]
        # The tokens that make the row divisible are a sequence of their own, which nothing attends to. Two tokens per rank
        # are the least: for a single one, compiled code would be compiled again.
        fill = max(-len(tokens) % size, 2 * size - len(tokens))
        padded = [*lengths, fill] if fill else lengths
        local = slice(0, None)
        self.num_tokens = len(tokens)  # of this rank, without the fill
        if self._group is not None:
            step = (len(tokens) + fill) // size
            local = slice(self._group.rank * step, (self._group.rank + 1) * step)
            self.num_tokens = min(max(self.num_tokens - local.start, 0), step)
        device = policy.device
        self.targets = to_device(torch.tensor(targets + [0] * fill)[local], device)
        ids = torch.tensor(tokens + [0] * fill)[local]
        self.model_inputs: dict[str, object] = {"input_ids": to_device(ids, device)[None]}
        if packed:
            sizes = torch.tensor(padded)
            positions = torch.arange(int(sizes.sum())) - torch.repeat_interleave(
                sizes.cumsum(0) - sizes, sizes
            )
            self.model_inputs["position_ids"] = to_device(positions[local], device)[None]
            self.model_inputs["packing"] = Packing(padded, device, self._group)
        self.experts: torch.Tensor | None = None
        if micro_batch.experts:
            rows = torch.cat([each[: len(each) - trimmed] for each in micro_batch.experts])
            filled = pad(rows, (0, 0, 0, 0, 0, fill), value=NO_RECORD)[local]
            self.experts = to_device(filled.contiguous(), device).long()
        keep = _prediction_positions(lengths, trimmed) if micro_batch.sequences else torch.arange(0)
        self._keep = to_device(keep, device)

    def predictions(self, row: torch.Tensor) -> torch.Tensor:
        """The entries of a per-token row that predict a token, gathered over the sequence-parallel group."""
        if self._group is not None:
            row = self._group.gather_tokens(row)
        return row if len(self._keep) == len(row) else row.index_select(0, self._keep)


def _prediction_positions(lengths: list[int], trimmed: bool) -> torch.Tensor:
    """Every position of the packed row but each sequence's last, which is not there if they are trimmed."""
    predicts = torch.ones(sum(lengths), dtype=torch.bool)
    if not trimmed:
        predicts[torch.tensor(lengths).cumsum(0) - 1] = False
    return predicts.nonzero().flatten()
