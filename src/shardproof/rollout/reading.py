"""Reading the prompts of a batch into a cache: each different prompt once, and of a conversation only what is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from shardproof.rollout.engine import Request
from shardproof.rollout.kept import Found, KeptTurns
from shardproof.rollout.recording import Recorder

# (input_ids, attention_mask, position_ids, cache) -> logits of the last position, [rows, vocabulary]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DynamicCache], torch.Tensor]


class Prompts:
    """The different prompts of a batch: after `read`, a row of keys and values for each, padded on the left."""

    def __init__(
        self,
        requests: Sequence[Request],
        config: Any,
        device: torch.device,
        kept: KeptTurns | None = None,
        recorder: Recorder | None = None,
    ):
        self._config, self._device, self._recorder = config, device, recorder
        self._prompts = list(dict.fromkeys(request.tokens for request in requests))
        rows = {prompt: row for row, prompt in enumerate(self._prompts)}
        self._row_of = [rows[request.tokens] for request in requests]
        self._found: list[Found | None] = [
            kept.take(prompt) if kept is not None else None for prompt in self._prompts
        ]
        # Of each prompt's tokens, where they are recorded: what was kept of them, and then what is read.
        self._experts = [each.experts if each is not None else None for each in self._found]

    def experts(self, request: int) -> np.ndarray:
        """Those of the tokens of a request's prompt, [tokens, layers, chosen], where they are recorded."""
        found = self._experts[self._row_of[request]]
        assert found is not None
        return found

    def read(self, forward: Forward) -> torch.Tensor:
        """The logits after each prompt, [prompts, vocabulary]. `prompt_of` is the row of each request's prompt."""
        parts, order, logits = [], [], []
        for rows in self._parts():
            part = _Part(
                [self._prompts[row] for row in rows],
                [self._give_up(row) for row in rows],
                self._config,
                self._device,
            )
            if self._recorder is None:
                logits.append(forward(part.ids, part.mask, part.positions, part.cache))
            else:
                inputs = (part.ids, part.mask, part.positions, part.cache)
                logits.append(self._recorder.watch(forward, *inputs))
                self._note(rows, part, self._recorder.last_rows(len(rows)))
            parts.append(part)
            order += rows
        self._found = []
        place = {row: at for at, row in enumerate(order)}
        self.prompt_of = torch.tensor([place[row] for row in self._row_of], device=self._device)
        self.last_positions = torch.cat([part.positions[:, -1:] for part in parts])
        self.cache, self.mask, self.columns = parts[0].cache, parts[0].mask, None
        if len(parts) > 1:
            self._join(parts)
        elif parts[0].num_kept:
            self.mask, self.columns = self._packed(parts[0].prompts), _columns(parts[0], self._longest)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _note(self, rows: list[int], part: _Part, experts: np.ndarray) -> None:
        """Add the experts of what was read of a part's prompts, which are padded on the left."""
        for row, new, chosen in zip(rows, part.num_new, experts, strict=True):
            known, read = self._experts[row], chosen[len(chosen) - new :]
            self._experts[row] = read if known is None else np.concatenate([known, read])

    def _give_up(self, row: int) -> Found | None:
        """What was found for a row, which is then held by whoever asked alone: its memory is free once it was copied."""
        found, self._found[row] = self._found[row], None
        return found

    @property
    def _longest(self) -> int:
        return max(map(len, self._prompts))

    def _packed(self, prompts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The mask of prompts that are padded on the left, and have no gaps."""
        lengths = torch.tensor([[len(prompt)] for prompt in prompts])
        return (torch.arange(self._longest) >= self._longest - lengths).to(self._device, torch.int64)

    def states(self, layer: Any, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, [rows, heads, length, width], without gaps; of the chosen rows, or of all."""
        if self.columns is None:
            return (
                (layer.keys, layer.values) if chosen is None else (layer.keys[chosen], layer.values[chosen])
            )
        columns = self.columns
        if chosen is None:
            chosen = torch.arange(len(columns), device=columns.device)
        rows = chosen[:, None]
        # Indices around a slice: their dimensions come first.
        keys, values = (each[rows, :, columns[chosen]].transpose(1, 2) for each in (layer.keys, layer.values))
        return keys, values

    def _join(self, parts: list[_Part]) -> None:
        """One cache and one mask of all parts, without the gaps between what was kept and what was read."""
        self.mask = self._packed([prompt for part in parts for prompt in part.prompts])
        columns = [_columns(part, self._longest)[:, None, :, None] for part in parts]
        self.cache = DynamicCache(config=self._config)
        for number, layer in enumerate(self.cache.layers):
            joined = [
                torch.cat([_gather(each, index) for each, index in zip(pieces, columns, strict=True)])
                for pieces in zip(*(part.pop_layer(number) for part in parts), strict=True)
            ]
            put_states(layer, *joined)

    def _parts(self) -> list[list[int]]:
        """Rows that are read together: those with much to read apart from those with little, if it pays."""
        every = list(range(len(self._prompts)))
        if not any(self._found):
            return [every]
        news = [
            len(prompt) - (found.length if found is not None else 0)
            for prompt, found in zip(self._prompts, self._found, strict=True)
        ]
        every.sort(key=lambda row: news[row])
        num = len(every)

        def padded(cut: int) -> int:
            return cut * news[every[cut - 1]] + (num - cut) * news[every[-1]]

        best = min(range(1, num + 1), key=padded)
        return [every[:best], every[best:]] if 4 * padded(best) < 3 * padded(num) else [every]


class _Part:
    """Prompts that are read together: what was kept of them, then what is new, each padded on its left."""

    def __init__(
        self,
        prompts: list[tuple[int, ...]],
        found: list[Found | None],
        config: Any,
        device: torch.device,
    ):
        self.prompts = prompts
        starts = [each.length if each is not None else 0 for each in found]
        self.num_kept = max(starts)
        self.num_new = [len(prompt) - start for prompt, start in zip(prompts, starts, strict=True)]
        num_new = max(self.num_new)
        width = self.num_kept + num_new
        ids = torch.zeros(len(prompts), num_new, dtype=torch.int64)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            new = len(prompt) - start
            ids[row, num_new - new :] = torch.tensor(prompt[start:])
            mask[row, width - new :] = 1
            mask[row, self.num_kept - start : self.num_kept] = 1
        self.ids, self.mask = ids.to(device), mask.to(device)
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, self.num_kept :]
        self.cache = DynamicCache(config=config)
        if self.num_kept:
            for layer, *states in zip(self.cache.layers, *_padded(found, self.num_kept), strict=True):
                put_states(layer, *states)

    def pop_layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, which the part then no longer holds."""
        layer = self.cache.layers[number]
        keys, values = layer.keys, layer.values
        assert keys is not None and values is not None
        layer.keys = layer.values = None
        return keys, values


def _padded(found: list[Found | None], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values), each [layers, rows, heads, width, head width], padded on the left with zeros."""
    like = next(each.prefix.states for each in found if each is not None)
    keys, values = (
        states.new_zeros(len(states), len(found), states.shape[1], width, states.shape[3]) for states in like
    )
    del like
    for row, each in enumerate(found):
        if each is not None:
            for rows, states in zip((keys, values), each.prefix.states, strict=True):
                rows[:, row, :, width - each.length :] = states[:, :, : each.length]
        each = found[row] = (
            None  # an entry that nobody else has found, and that is not kept, is free from here on
        )
    return keys, values


def _columns(part: _Part, longest: int) -> torch.Tensor:
    """For each row of a part, where its last `longest` tokens are, in their order; [rows, longest]."""
    # Stable: padding first, then tokens. What a row has too few of reads anything: it is masked.
    order = part.mask.argsort(dim=1, stable=True)[:, -longest:]
    return torch.cat([order[:, :1].expand(-1, longest - order.shape[1]), order], 1)


def _gather(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return states.gather(2, columns.expand(-1, states.shape[1], -1, states.shape[3]))


def put_states(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Give an empty layer of a growing cache its keys and values."""
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
