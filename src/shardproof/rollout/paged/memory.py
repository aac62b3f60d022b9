"""The memory in which an engine decodes: cache, slots and logits. It grows when a call needs more, and else stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

import torch
from transformers import PreTrainedModel

from shardproof.errors import fail
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.kept import GIB
from shardproof.rollout.paged.blocks import BLOCK, BlockPool, blocks_for
from shardproof.rollout.paged.cache import CacheShape, PagedCache
from shardproof.rollout.paged.slots import Slots
from shardproof.rollout.recording import Recorder
from shardproof.rollout.shaping import Kind, Shaping
from shardproof.shard.sleeping import SleepingMemory

# Rows of the steps that are captured: a step of fewer rows is padded to the next of these.
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MORE = 128  # beyond the last, sizes are multiples of this
# Enough for the prompts with which steps are compared: blocks in all, and blocks of a row.
LEAST_BLOCKS, LEAST_TABLE = 48, 16
_MULTIPLE = 16  # of sizes for which Triton compiles other kernels than for odd ones


def padded_rows(rows: int, most: int) -> int:
    """The rows of the step that runs so many, of at most `most`."""
    found = next((size for size in SIZES if size >= rows), -(-rows // _MORE) * _MORE)
    return min(found, most)


@dataclass(frozen=True)
class Needs:
    """What a call needs at least (slots, tables, lines), and what it could use (blocks)."""

    rows: int
    longest: int  # tokens of a request, prompt and answer
    most_new: int
    num_stops: int
    blocks: int
    num_tokens: int  # to draw, in all

    @staticmethod
    def of(requests: Sequence[Request], sampling: Sampling, most_rows: int) -> Needs:
        rows = min(len(requests), most_rows)
        lengths = [len(request.tokens) + request.limit(sampling) for request in requests]
        longest = max(lengths)
        # Requests enter in their order: those that are answered together at a time are not the longest of all.
        blocks = sum(sorted(map(blocks_for, lengths), reverse=True)[:rows])
        limits = [request.limit(sampling) for request in requests]
        most_new = max(sampling.max_new_tokens, *limits)
        return Needs(rows, longest, most_new, len(sampling.stop_ids), blocks, sum(limits))


class Memory:
    """What steps work on. `version` counts how often it was made anew: graphs of another version are worthless."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        most_rows: int,
        kv_cache_gib: float | None = None,
        recorder: Recorder | None = None,
        sleeping: SleepingMemory | None = None,
    ):
        self.most_rows = most_rows
        self.version = 0
        self._model = model
        self._device = device
        self._gib = kv_cache_gib
        self._recorder = recorder
        self._sleeping = sleeping  # where the cache lies, if it sleeps in place
        self._cache: PagedCache | None = None
        self._slots: Slots | None = None
        self._logits: torch.Tensor | None = None
        self.chosen: torch.Tensor | None = None  # experts, [lines, most new tokens + 1, layers, chosen]
        self.shaping: Shaping | None = None  # of calls that do not draw from all that the model says
        self.pool = BlockPool(1)

    @property
    def cache(self) -> PagedCache:
        assert self._cache is not None
        return self._cache

    @property
    def slots(self) -> Slots:
        assert self._slots is not None
        return self._slots

    @property
    def logits(self) -> torch.Tensor:
        """[rows, vocabulary], to which each step writes: one memory for the steps of all sizes."""
        assert self._logits is not None
        return self._logits

    def begin(self, needs: Needs, let_go: Callable[[], None] = lambda: None) -> None:
        """Make room for a call, and start with nothing in it.

        `let_go` is called before memory is made anew: whoever works in the old one must hold it no longer.
        """
        self._make_cache(needs, let_go)
        self.pool = BlockPool(self.cache.num_blocks)
        self._make_slots(needs, let_go)
        self.slots.clear()

    def shape(self, kind: Kind, num_stops: int, let_go: Callable[[], None]) -> None:
        """Make room for the settings of a call's rows, after `begin`."""
        old, stops = self.shaping, 1 << max(num_stops - 1, 0).bit_length()
        if old is not None and old.most_stops >= stops and (old.penalises or not kind.penalises):
            return
        penalises = kind.penalises
        if old is not None:
            stops, penalises = max(stops, old.most_stops), penalises or old.penalises
        let_go()
        self.shaping = old = None
        self.shaping = Shaping(len(self.slots.done), self.logits.shape[1], stops, penalises, self._device)
        self.version += 1

    def free(self) -> None:
        """Give everything up."""
        self._cache = self._slots = self._logits = self.chosen = self.shaping = None
        self.version += 1

    def wake(self) -> None:
        """Clear the cache, whose memory comes back unwritten."""
        if self._cache is not None:
            self._cache.clear()

    def _make_cache(self, needs: Needs, let_go: Callable[[], None]) -> None:
        shape = CacheShape.of(self._model.config)
        size = shape.block_bytes(self._model.dtype)
        wanted = max(needs.blocks, LEAST_BLOCKS) + 1
        there = self._cache.num_blocks if self._cache is not None else 0
        if self._gib is not None:
            wanted = int(self._gib * GIB) // size
        elif wanted > there:
            wanted = max(wanted, 2 * there)  # conversations grow: few of their turns should need new graphs
            free = free_bytes(self._device)
            if free is not None:
                wanted = min(wanted, max(there, (free + there * size) // 2 // size))
        least = blocks_for(needs.longest) + 1
        if max(wanted, there) < least:
            raise _too_small(needs, wanted, least, size, self._gib)
        if wanted > there:
            let_go()
            self._cache = None  # before the new one is made
            self._cache = PagedCache(shape, wanted, self._model.dtype, self._device, self._sleeping)
            self.version += 1

    def _make_slots(self, needs: Needs, let_go: Callable[[], None]) -> None:
        rows, blocks = (
            padded_rows(needs.rows, self.most_rows),
            max(blocks_for(needs.longest) + 1, LEAST_TABLE),
        )
        new, stops = -(-needs.most_new // _MULTIPLE) * _MULTIPLE, max(needs.num_stops, _MULTIPLE)
        old = self._slots
        if old is not None:
            have = old.rows, old.tables.shape[1], old.most_new, len(old.stops)
            if all(one >= other for one, other in zip(have, (rows, blocks, new, stops), strict=True)):
                return
            rows, blocks, new, stops = map(max, have, (rows, blocks, new, stops))
        # Conversations grow: by powers of two, so that few of their turns need new memory, and new graphs.
        blocks, stops = (1 << (number - 1).bit_length() for number in (blocks, stops))
        let_go()
        self._slots = self._logits = self.chosen = self.shaping = old = (
            None  # also if there is no room for all of the new
        )
        slots = Slots.make(rows, blocks, new, stops, self._device)
        vocabulary = len(self._model.get_output_embeddings().get_parameter("weight"))
        self._logits = torch.zeros(rows, vocabulary, dtype=self._model.dtype, device=self._device)
        if self._recorder is not None:
            # A step notes the experts of the token that it reads, which was drawn in the step before.
            self.chosen = self._recorder.room(slots.tokens.new_empty(rows + 1, new + 1))
        self._slots = slots
        self.version += 1


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None if that is not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _too_small(needs: Needs, blocks: int, least: int, size: int, gib: float | None) -> Exception:
    there = max(blocks - 1, 0) * BLOCK
    message = f"a prompt and its answer may have {needs.longest} tokens, and the engine's cache has room for {there}."
    how = "raise" if gib is not None else "free memory on the GPU, or set"
    enough = least * size / GIB
    digit = 10.0 ** (floor(log10(enough)) - 2)
    enough = ceil(enough / digit) * digit  # never less than what is needed
    fix = f"{how} rollout.kv_cache_gib to at least {enough:.3g}, or lower rollout.max_new_tokens"
    return fail("R500", "generate", message, fix=fix)
