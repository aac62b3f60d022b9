"""What settings of each row do to its logits before a token is drawn: penalties, and tokens that cannot be drawn.

In this order, which is vLLM's: stop ids before `min_new_tokens`; repetition, frequency and presence penalty; at the
temperature min_p, top_k and top_p, each on what the one before has left. A token that cannot be drawn has minus infinity. Of
equally likely tokens at the border of top_k or top_p all are kept. Rows without settings stay as they are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardproof.model.packing import to_device
from shardproof.rollout.engine import Request, Sampling

_NOWHERE = float("-inf")
_ALL = 2**30  # as top_k: more than any vocabulary has
_SURE = 2.0  # as top_p: more than any sum of probabilities

# (scores [rows, vocabulary] float32, top_k [rows], top_p [rows], temperature) -> the lowest score that is kept, [rows, 1]
Threshold = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """Which settings some row of a call has: what a step of the device does for all of its rows."""

    holds: bool  # stop ids that cannot be drawn yet
    penalises: bool
    floors: bool  # min_p
    ranks: bool  # top_k or top_p

    @staticmethod
    def of(settings: Sequence[Sampling]) -> Kind | None:
        """None: no row has any."""
        if all(each.is_whole for each in settings):
            return None
        draws = [each for each in settings if each.temperature > 0]
        return Kind(
            any(each.min_new_tokens and each.stop_ids for each in settings),
            any(each.penalises for each in settings),
            any(each.min_p for each in draws),
            any(each.top_k or each.top_p < 1.0 for each in draws),
        )


class Shaping:
    """The settings of some lines, each a request that is being answered, in memory that does not move."""

    def __init__(self, lines: int, vocabulary: int, most_stops: int, penalises: bool, device: torch.device):
        def filled(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.vocabulary = vocabulary
        self._top_k = filled(_ALL, lines, dtype=torch.int64)
        self._top_p, self._min_p = filled(_SURE, lines), filled(0.0, lines)
        self._repetition, self._frequency, self._presence = (
            filled(1.0, lines), filled(0.0, lines), filled(0.0, lines)
        )  # fmt: skip
        self._least = filled(0, lines, dtype=torch.int64)
        self._stops = filled(0, lines, max(most_stops, 1), dtype=torch.int64)
        # Twice how often each token was drawn, and 1 where the prompt has it.
        self._marks = filled(0, lines, vocabulary, dtype=torch.int32) if penalises else None

    @staticmethod
    def of(requests: Sequence[Request], sampling: Sampling, vocabulary: int, device: torch.device) -> Shaping:
        """One line for each request, that has drawn nothing."""
        settings = [request.settings(sampling) for request in requests]
        stops = max(len(each.stop_ids) for each in settings)
        found = Shaping(len(requests), vocabulary, stops, any(s.penalises for s in settings), device)
        found.begin(range(len(requests)), settings, [request.tokens for request in requests])
        return found

    @property
    def most_stops(self) -> int:
        return self._stops.shape[1]

    @property
    def penalises(self) -> bool:
        """Whether there is room for what penalties need."""
        return self._marks is not None

    def begin(
        self,
        lines: Sequence[int],
        settings: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Take requests into lines, with what they have drawn already."""
        device, size = self._top_k.device, self.vocabulary
        at = to_device(torch.tensor(list(lines)), device)
        columns = {
            "_top_k": [s.top_k or _ALL for s in settings],
            "_top_p": [s.top_p if s.top_p < 1.0 else _SURE for s in settings],
            "_min_p": [s.min_p for s in settings],
            "_repetition": [s.repetition_penalty for s in settings],
            "_frequency": [s.frequency_penalty for s in settings],
            "_presence": [s.presence_penalty for s in settings],
            "_least": [s.min_new_tokens if any(i < size for i in s.stop_ids) else 0 for s in settings],
        }
        for name, values in columns.items():
            column = getattr(self, name)
            column.index_copy_(0, at, to_device(torch.tensor(values, dtype=column.dtype), device))
        stops = [self._filled([token for token in s.stop_ids if token < self.vocabulary]) for s in settings]
        self._stops.index_copy_(0, at, to_device(torch.tensor(stops), device))
        if self._marks is not None:
            self._mark(lines, settings, prompts, drawn or [()] * len(settings))

    def _filled(self, stops: list[int]) -> list[int]:
        """As many as there is room for: a row with fewer repeats its first one, and one without holds none back."""
        return (stops + (stops[:1] or [0]) * self.most_stops)[: self.most_stops]

    def _mark(
        self,
        lines: Sequence[int],
        settings: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[int]],
    ) -> None:
        assert self._marks is not None
        device = self._marks.device
        self._marks.index_fill_(0, to_device(torch.tensor(list(lines)), device), 0)
        for line, each, prompt, said in zip(lines, settings, prompts, drawn, strict=True):
            if each.penalises:
                tokens, times = np.unique(np.array(said, np.int64), return_counts=True)
                row = self._marks[line]
                row.index_fill_(0, to_device(torch.tensor(sorted(set(prompt))), device), 1)
                row.index_add_(
                    0,
                    to_device(torch.from_numpy(tokens), device),
                    to_device(torch.from_numpy(times.astype(np.int32) * 2), device),
                )

    def apply(
        self,
        logits: torch.Tensor,
        lines: torch.Tensor,
        steps: torch.Tensor,
        temperature: float,
        kind: Kind,
        threshold: Threshold | None = None,
    ) -> torch.Tensor:
        """The logits [rows, vocabulary] of lines that have drawn so many tokens, as they are drawn from. In float32.

        Never waits for the device. `threshold` finds what top_k and top_p keep, where something is faster than a sort.
        """
        scores = logits.float()
        if kind.holds:
            stops = self._stops[lines]
            held = (steps < self._least[lines])[:, None]
            scores = scores.scatter(1, stops, scores.gather(1, stops).masked_fill(held, _NOWHERE))
        if kind.penalises:
            scores = self._penalised(scores, lines)
        if temperature == 0:
            return scores
        if kind.floors:
            weights = ((scores - scores.amax(-1, keepdim=True)) / temperature).exp_()
            scores = scores.masked_fill(weights < self._min_p[lines, None], _NOWHERE)
        if kind.ranks:
            find = sorted_threshold if threshold is None else threshold
            lowest = find(scores, self._top_k[lines], self._top_p[lines], temperature)
            scores = scores.masked_fill(scores < lowest, _NOWHERE)
        return scores

    def _penalised(self, scores: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        assert self._marks is not None
        marks = self._marks[lines]
        factor = self._repetition[lines, None]
        repeated = torch.where(scores > 0, scores / factor, scores * factor)
        scores = torch.where(marks > 0, repeated, scores)
        times = (marks >> 1).float()
        scores = scores - self._frequency[lines, None] * times
        return scores - self._presence[lines, None] * (times > 0)

    def note(self, lines: torch.Tensor, tokens: torch.Tensor, new: torch.Tensor) -> None:
        """Remember the tokens that lines have drawn, where they are new. Never waits for the device."""
        if self._marks is not None:
            self._marks[lines, tokens] += 2 * new.int()


def sorted_threshold(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The lowest score of each row that top_k and top_p keep, by sorting all of them."""
    ordered = scores.sort(dim=-1, descending=True).values
    kept = ordered >= ordered.gather(1, top_k[:, None].clamp(max=ordered.shape[1]) - 1)
    probs = torch.softmax(ordered.masked_fill(~kept, _NOWHERE) / temperature, -1)
    kept &= probs.cumsum(-1) - probs < top_p[:, None]
    return ordered.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))
