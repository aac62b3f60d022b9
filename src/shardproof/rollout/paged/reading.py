"""Reading prompts into a paged cache at the speed of the matrix units: packed, in chunks, each token once.

Models that are built as most are go through kernels of our own around cuBLAS's matmuls. All others go through their own
forward, with attention to the cache plugged in. A way with kernels is compared with plain torch before it is relied upon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from shardproof.model.exact import is_exact
from shardproof.model.families import max_positions, num_experts
from shardproof.rollout.fused import can_fuse
from shardproof.rollout.paged.blocks import blocks_for
from shardproof.rollout.paged.cache import PagedCache
from shardproof.rollout.paged.proof import distance, judge
from shardproof.rollout.paged.reading_chunks import Chunk, Reading, pack
from shardproof.rollout.paged.reading_ways import FusedForward, OwnForward
from shardproof.rollout.recording import Recorder

__all__ = ["CHUNK_TOKENS", "PromptReader", "Read", "Reading"]

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 16384
PLAIN = "plain torch"
# Lengths of the prompts that ways are compared with: blocks that are just full and just begun, several programs of
# attention per prompt.
_LENGTHS = (1, 5, 63, 64, 65, 129, 200, 300)
_SAME = 3  # tokens that come behind each of them
_REHEARSED = (128, 77)  # Triton compiles other kernels for multiples of 16 than for other numbers

# (chunk, cache) -> logits after the last tokens of readings that end in the chunk
Way = Callable[[Chunk, PagedCache], torch.Tensor]


@dataclass(frozen=True)
class Read:
    """What came of readings: logits [readings, vocabulary] after the last token of each.

    `experts`, where they are recorded: those of each reading's tokens, [tokens, layers, chosen], on the device.
    """

    logits: torch.Tensor
    experts: list[torch.Tensor] | None = None


class PromptReader:
    """Reads prompts with one model. Its parameters may be written between calls, not moved.

    `chunk_tokens`: the most tokens that one forward takes, unless a call says otherwise.
    """

    def __init__(
        self, model: PreTrainedModel, recorder: Recorder | None = None, chunk_tokens: int = CHUNK_TOKENS
    ):
        self._model = model
        self._recorder = recorder
        self._chunk_tokens = chunk_tokens
        self._plain = OwnForward(model, by_kernel=False)
        self._ways: list[tuple[str, Way]] | None = None  # the fastest first, but for the plain one
        self._proved = False

    @torch.no_grad()
    def read(self, readings: Sequence[Reading], cache: PagedCache, chunk_tokens: int | None = None) -> Read:
        """Read all tokens, write their keys and values into the blocks, and return the logits after each reading.

        The host does not wait for the device, except for the comparison in the first call. Every block that is
        written must belong to one reading alone.
        """
        logits: list[torch.Tensor] = []
        experts: list[list[torch.Tensor]] = [[] for _ in readings]
        for pieces in pack(readings, chunk_tokens or self._chunk_tokens):
            chunk = Chunk(pieces, cache.device, cache.shape.width)
            found = self._forward(chunk, cache)
            if len(chunk.last):
                logits.append(found)
            if self._recorder is not None:
                parts = self._recorder.last().split([piece.length for piece in pieces])
                for piece, part in zip(pieces, parts, strict=True):
                    experts[piece.number].append(part)
        joined = (
            [part[0] if len(part) == 1 else torch.cat(part) for part in experts] if self._recorder else None
        )
        return Read(logits[0] if len(logits) == 1 else torch.cat(logits), joined)

    @property
    def way(self) -> str:
        """What reads prompts now; known after the first call of `read`."""
        return self._ways[0][0] if self._ways else PLAIN

    def rehearsals(self, cache: PagedCache) -> list[Callable[[], object]]:
        """Functions that launch the kernels of the fastest way, to compile these ahead; they write to block 0 alone."""
        if self._ways is None:
            self._ways = self._candidates(cache)
        if self._proved or not self._ways:
            return []
        readings = [Reading([0] * num, 0, [0] * blocks_for(num)) for num in _REHEARSED]
        chunks = [
            Chunk(pieces, cache.device, cache.shape.width)
            for each in readings
            for pieces in pack([each], CHUNK_TOKENS)
        ]
        return [partial(self._ways[0][1], chunk, cache) for chunk in chunks]

    def _forward(self, chunk: Chunk, cache: PagedCache) -> torch.Tensor:
        while True:
            name, way = self._way(cache)
            try:
                if self._recorder is not None:
                    return self._recorder.watch(way, chunk, cache)
                return way(chunk, cache)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a kernel's compiler and launcher raise
                if way is self._plain:
                    raise
                self._give_up(name, f"{type(error).__name__}: {error}")

    def _way(self, cache: PagedCache) -> tuple[str, Way]:
        """The fastest way that is left and that a comparison has shown to be right."""
        if self._ways is None:
            self._ways = self._candidates(cache)
        while self._ways and not self._proved:
            name, way = self._ways[0]
            try:
                problem = compare(way, self._plain, self._model, cache)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a kernel's compiler and launcher raise
                problem = f"they failed ({type(error).__name__}: {error})"
            if problem is None:
                self._proved = True
            else:
                self._give_up(name, problem)
        return self._ways[0] if self._ways else (PLAIN, self._plain)

    def _candidates(self, cache: PagedCache) -> list[tuple[str, Way]]:
        found: list[tuple[str, Way]] = []
        if OwnForward.fits(self._model, cache) and not is_exact(self._model):
            if can_fuse(self._model, cache.device):
                if FusedForward.has_hopper(cache):
                    found.append(("attention for Hopper GPUs", FusedForward(self._model, hopper=True)))
                found.append(("fused kernels", FusedForward(self._model, hopper=False)))
            found.append(("the attention kernel", OwnForward(self._model, by_kernel=True)))
        return found

    def _give_up(self, name: str, why: str) -> None:
        assert self._ways is not None
        self._ways.pop(0)
        self._proved = False
        logger.warning("reading prompts without %s: %s", name, why)


def compare(way: Way, plain: Way, model: PreTrainedModel, cache: PagedCache) -> str | None:
    """What is wrong with a way of reading, compared with the plain one over prompts of several lengths; None if nothing is.

    Prompts are read first, and then, in another chunk, the same few tokens behind each of them.
    """
    vocabulary = len(model.get_input_embeddings().get_parameter("weight"))
    most = (max_positions(model.config) or _LENGTHS[-1] + _SAME) - _SAME
    prompts = [
        [(31 * at * at + 17 * at + 41 * number + 3) % vocabulary for at in range(min(length, most))]
        for number, length in enumerate(_LENGTHS)
    ]
    behind = [(37 * at + 5) % vocabulary for at in range(_SAME)]
    found = []
    for each in (plain, way):
        num_blocks = 1 + sum(blocks_for(length + _SAME) for length in _LENGTHS)
        small, at = PagedCache(cache.shape, num_blocks, cache.dtype, cache.device), 1
        first, second = [], []
        for prompt in prompts:
            num = blocks_for(len(prompt) + _SAME)
            blocks = range(at, at + num)
            first.append(Reading(prompt, 0, blocks))
            second.append(Reading(behind, len(prompt), blocks))
            at += num
        logits = []
        for readings in (first, second):
            (pieces,) = pack(readings, sum(len(reading.tokens) for reading in readings))
            logits.append(each(Chunk(pieces, cache.device, cache.shape.width), small))
        found.append([torch.log_softmax(part.float(), -1) for part in logits])
    truth, guess = found
    distances = [distance(a, b) for a, b in zip(truth, guess, strict=True)]
    worth = float(distance(truth[1], truth[1].roll(1, 0)).mean())
    return judge(distances, worth, num_experts(model.config) is not None)
