"""A few tokens that tell a right way of scoring from a wrong one, in any dtype and for models of any strength.

How far two right ways are apart depends on dtype and model; so does what a wrong one gets wrong. Both are therefore held
against what is at stake: how much it changes the scores if sequences are not kept apart, measured on the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardproof.bounds import largest, within
from shardproof.train.batching import Batch

# Two of one length behind a longer one: attention brings those of one length together.
_LENGTHS = (21, 13, 13)
# Of what is at stake: how far another way may be off on average, in 16 bits and in 32, and how much of other sequences
# may be seen.
_ERROR, _EXACT_ERROR, _LEAK = 1 / 8, 1 / 8192, 1 / 32
# What rounding alone may do on average; 16 bits say a logit no better than this.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
_WORST, _WORST_16_BITS = 1e-3, 0.2  # of single predictions


@dataclass(frozen=True)
class Probe:
    """Sequences, and the same ones with one of them replaced."""

    batch: Batch
    variants: dict[int, Batch]  # by which one is replaced

    @property
    def joined(self) -> Batch:
        """All tokens as one sequence: what a computation that knows no borders would see."""
        return Batch([[token for sequence in self.batch.sequences for token in sequence]])

    def at_stake(self, truth: torch.Tensor, joined: torch.Tensor) -> float:
        """How much it changes the scores on average if borders are ignored, where there is one before."""
        at, parts = 0, []
        for length in self.batch.lengths:
            parts.append(joined[at : at + length - 1])  # without the prediction across the border
            at += length
        return float((torch.cat(parts[1:]) - torch.cat(self.batch.rows(truth)[1:])).abs().float().mean())

    def change_of_others(self, replaced: int, found: torch.Tensor, again: torch.Tensor) -> float:
        """How much the scores of a sequence changed on average that was not replaced: of the one that changed most."""
        changes = [float(part.abs().float().mean()) for part in self.batch.rows(again - found)]
        return largest(change for at, change in enumerate(changes) if at != replaced)


def make_probe(vocabulary: int, max_length: int | None) -> Probe:
    """For a model with so many tokens and positions; all sequences end to end must fit too."""
    room = max_length or sum(_LENGTHS)
    lengths = _LENGTHS if sum(_LENGTHS) <= room else [max(2, room // 3 - at) for at in (0, 1, 1)]
    vocabulary = min(vocabulary, 1000)

    def sequence(seed: int, length: int) -> list[int]:
        return [(31 * i * i + 17 * i + 41 * seed + 3) % vocabulary for i in range(length)]

    sequences = [sequence(seed, length) for seed, length in enumerate(lengths)]
    variants = {}
    for at in range(len(lengths) - 1):
        others = list(sequences)
        others[at] = sequence(at + len(lengths), lengths[at])
        variants[at] = Batch(others)
    return Probe(Batch(sequences), variants)


@dataclass(frozen=True)
class Yardstick:
    """Scores that are right, and how far from them others may be."""

    truth: torch.Tensor
    at_stake: float
    dtype: torch.dtype
    has_experts: bool

    @property
    def largest_mean(self) -> float:
        """How far right scores may be from `truth` on average."""
        is_exact = self.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
        share = _EXACT_ERROR if is_exact else _ERROR
        return largest((share * self.at_stake, _ROUNDING[self.dtype]))

    def mean_distance(self, found: torch.Tensor) -> float:
        """How far scores of the same tokens, computed another way, are from `truth` on average."""
        return float((found - self.truth).abs().float().mean())

    def error(self, found: torch.Tensor) -> str | None:
        """What is wrong with scores of the same tokens, computed another way."""
        mean, worst = self.mean_distance(found), float((found - self.truth).abs().float().max())
        if not within(mean, self.largest_mean):
            return f"it differs by {mean:.3g} on average; mixing sequences would change it by {self.at_stake:.3g}"
        if self.dtype == torch.float32:
            limit = _WORST
        else:
            # Rounding may send a token to another expert, which then says something else of it.
            limit = float("inf") if self.has_experts else largest((_WORST_16_BITS, self.at_stake / 2))
        return None if within(worst, limit) else f"it differs by {worst:.3g}"

    def leak(self, change: float) -> str | None:
        """What is wrong if a sequence's scores change as much when another one is replaced.

        They do not depend on it, and are computed by the same operations on the same shapes: even rounding is the same,
        but for experts, whose numbers of tokens change, and who may then get a token that another one had.
        """
        share = _ERROR if self.has_experts else _LEAK
        if within(change, share * largest((self.at_stake, _ROUNDING[self.dtype]))):
            return None
        return f"a sequence's scores change by {change:.3g} when another sequence is replaced"
