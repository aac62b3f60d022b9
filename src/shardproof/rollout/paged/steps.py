"""The decoding step of each size: captured when it is first needed, and compared with the model before it is used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from shardproof.model.compiling import can_compile
from shardproof.model.exact import is_exact
from shardproof.model.families import num_experts
from shardproof.rollout.engine import Sampling
from shardproof.rollout.fused import FusedStep, can_fuse
from shardproof.rollout.paged import graphs, progress
from shardproof.rollout.paged.memory import SIZES, Memory, padded_rows
from shardproof.rollout.paged.model_step import ModelStep, attend_plain
from shardproof.rollout.paged.proof import (
    Truth,
    compare_draws,
    compare_step,
    compare_threshold,
    find_truth,
)
from shardproof.rollout.paged.slots import Slots
from shardproof.rollout.recording import Recorder
from shardproof.rollout.shaping import Kind, Threshold, sorted_threshold

logger = logging.getLogger(__name__)

WORTH_CAPTURING = 64  # tokens that all rows together may still draw
_COMPARED_DRAWS = 32  # rows
_SAID = {"fused": "fused kernels", "attention": "our attention kernel", "graphs": "CUDA graphs"}


Key = tuple[int, int, float, Kind | None]  # rows, blocks of their tables or 0, temperature, settings of rows


class Step(Protocol):
    """A model that reads one token per slot and writes logits [rows, vocabulary]."""

    def __call__(self, slots: Slots, out: torch.Tensor) -> None: ...


@dataclass
class Ways:
    """What decoding may use. Whatever fails, or computes something else than the model, is given up for good."""

    fused: bool  # a step of our own kernels
    attention: bool  # our attention kernel, in the model's own forward
    draws: bool  # kernels that draw
    graphs: bool
    ranks: bool = False  # a kernel that finds what top_k and top_p keep

    @staticmethod
    def on(device: torch.device, model: PreTrainedModel) -> Ways:
        compiles = can_compile(device, model.dtype)
        fuses = can_fuse(model, device) and not is_exact(model)
        return Ways(fuses, compiles, compiles, compiles and graphs.can_capture(device), compiles)

    def go_plainer(self, error: Exception) -> bool:
        """Give up the fastest way that is left; False if there is no other."""
        said = f"{type(error).__name__}: {error}"
        if self.fused or self.draws:
            self.fused = self.draws = self.ranks = False
            logger.warning("decoding without fused kernels, which failed (%s)", said)
        elif self.attention:
            self.attention = False
            logger.warning("decoding without our attention kernel, which failed (%s)", said)
        elif self.graphs:
            self.graphs = False
            logger.warning("decoding without CUDA graphs, which failed (%s)", said)
        else:
            return False
        return True


class Steps:
    """Steps over a memory, by size, temperature and the kinds of settings that rows have."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        memory: Memory,
        ways: Ways,
        recorder: Recorder | None,
    ):
        self.seconds = 0.0  # that capturing and comparing took
        self._model = model
        self._device = device
        self._memory = memory
        self._ways = ways
        self._recorder = recorder
        self._has_experts = num_experts(model.config) is not None
        self._launches: dict[Key, Callable[[], None]] = {}
        self._call = 0
        self._last_size = 0  # of this call
        self._went_plain: dict[Key, int] = {}  # in which call, for few tokens
        self._version = -1  # of the memory that graphs work in
        self._proved: set[tuple[Any, ...]] = set()  # comparisons that were passed
        self.rehearsed: set[int] = set()  # sizes whose kernels were asked for
        self._waits: bool | None = None  # whether the host waits in the model's own step
        self._truth: Truth | None = None
        self._pool: Any = None
        self._step: Step | None = None
        self._kind: Kind | None = None  # of this call's settings of rows

    def begin(self, kind: Kind | None = None) -> None:
        """Start a call: weights may have changed, and the memory may be another. `kind` are settings that rows have."""
        self._call += 1
        self._kind = kind
        self._last_size = 0
        self._truth = None
        if self._version != self._memory.version:
            self.release()
            self._version = self._memory.version

    def release(self) -> None:
        """Free all graphs. Comparisons that were passed are remembered."""
        self._launches.clear()
        self._pool = self._step = self._truth = None

    def rehearsals(self, rows: int, temperature: float) -> list[Callable[[], object]]:
        """Functions that launch the kernels of steps of all sizes up to that of `rows` where it does no harm.

        Sizes for which they were asked before are left out.
        """
        if not (self._ways.fused or self._ways.attention):
            return []
        most = padded_rows(rows, self._memory.slots.rows)
        sizes = {*(size for size in SIZES if size < most), most} - self.rehearsed
        self.rehearsed |= sizes
        return [partial(self._rehearse, size, temperature) for size in sorted(sizes)]

    def _rehearse(self, size: int, temperature: float) -> None:
        slots, logits = self._memory.slots.scratch(size), torch.empty_like(self._memory.logits[:size])
        step = self._new_step()
        if isinstance(step, FusedStep):
            step.keep_one_of_each_kind()
        step(slots, logits)
        if self._ways.draws:
            from shardproof.rollout.paged.draw_kernels import record  # Triton may not be there

            record(slots, temperature or 1.0, logits)

    def draw(self, slots: Slots, sampling: Sampling, logits: torch.Tensor) -> None:
        """Draw a token for each of these slots, and note it."""
        kind, shaping = self._kind, self._memory.shaping
        if kind is None or shaping is None:
            self._draw_with(sampling, logits)(slots, logits)
            return
        before, lines = slots.steps.clone(), slots.outputs
        shaped = shaping.apply(logits, lines, before, sampling.temperature, kind, self._threshold(logits))
        self._draw_with(sampling, shaped)(slots, shaped)
        if kind.penalises:
            shaping.note(lines, slots.ids[:, 0], slots.steps > before)

    def _threshold(self, logits: torch.Tensor) -> Threshold | None:
        """A kernel that finds what top_k and top_p keep, if it was shown to be right; None: sort."""
        if not self._ways.ranks or self._kind is None or not self._kind.ranks:
            return None
        from shardproof.rollout.paged.truncation_kernels import threshold  # needs Triton

        how = ("ranks", logits.shape[1])
        if how not in self._proved:
            some = logits[:_COMPARED_DRAWS]
            problem = _failure_of(lambda: compare_threshold(threshold, some, sorted_threshold))
            if problem is not None:
                self._ways.ranks = False
                logger.warning("decoding without the kernel of top_k and top_p: %s", problem)
                return None
            self._proved.add(how)
        return threshold

    def advance(self, rows: int, count: int, sampling: Sampling, left: int, most_blocks: int) -> int:
        """Run `count` steps of the first slots, which may draw `left` more tokens in all; returns the rows of a step."""
        size = padded_rows(rows, self._memory.slots.rows)
        if left < WORTH_CAPTURING:  # stay with the size that ran last: it is there
            size = max(size, self._last_size)
        launch = self._launch_for(size, sampling, left, most_blocks)
        self._last_size = size
        if launch is None:
            step = ModelStep(self._model, self._memory.cache, attend_plain)
            slots = self._memory.slots.part(0, rows, most_blocks)
            launch = partial(self._run, step, slots, self._memory.logits[:rows], sampling)
        for _ in range(count):
            launch()
        return size

    def _launch_for(
        self, size: int, sampling: Sampling, left: int, most_blocks: int
    ) -> Callable[[], None] | None:
        """The captured step of a size; None to run the model's own as it is."""
        while self._ways.fused or self._ways.attention or self._ways.graphs:
            # Without a kernel attention gathers all blocks of the tables: as few as will do.
            by_kernel = self._ways.fused or self._ways.attention
            width = (
                0
                if by_kernel
                else min(1 << (most_blocks - 1).bit_length(), self._memory.slots.tables.shape[1])
            )
            key = (size, width, sampling.temperature, self._kind)
            if key in self._launches:
                return self._launches[key]
            larger = [k for k in self._launches if k[0] > size and k[1:] == key[1:]]
            # A few tokens are not worth it, unless every call asks for them, as a canary does.
            few = left < WORTH_CAPTURING and self._went_plain.setdefault(key, self._call) == self._call
            if few or self._memory.pool.num_free < 8:
                return self._launches[min(larger)] if larger else None
            began = time.perf_counter()
            launch = self._make(size, width or None, sampling)
            self.seconds += time.perf_counter() - began
            if launch is not None:
                self._launches[key] = launch
                return launch
        return None

    def _make(self, size: int, width: int | None, sampling: Sampling) -> Callable[[], None] | None:
        """The fastest step of a size, after its comparison; None if that failed, and its way was given up."""
        logger.info("preparing the decoding step for %d rows ...", size)
        slots, logits = self._memory.slots.part(0, size, width), self._memory.logits[:size]
        try:
            step = self._fastest()
            launch: Callable[[], None] = partial(self._run, step, slots, logits, sampling)
            if self._captures(step, sampling):
                scratch = self._memory.slots.scratch(size)
                warm = partial(self._run, step, scratch, torch.empty_like(logits), sampling)
                if self._pool is None:
                    self._pool = graphs.new_pool(self._device)
                launch = graphs.capture(warm, launch, self._device, self._pool)
            problem = self._compare(launch, size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a kernel's compiler and launcher, or a capture, raise
            problem = f"they failed ({type(error).__name__}: {error})"
        if problem is None:
            return launch
        self._launches.clear()
        self._step = self._pool = None
        way = "fused" if self._ways.fused else "attention" if self._ways.attention else "graphs"
        setattr(self._ways, way, False)
        logger.warning("decoding without %s: %s", _SAID[way], problem)
        return None

    def _compare(self, launch: Callable[[], None], size: int) -> str | None:
        """What is wrong with a step that has kernels of our own, compared once per size; None if nothing is."""
        how = (size, self._ways.fused, self._ways.graphs)
        if how in self._proved or not (self._ways.fused or self._ways.attention):
            return None
        if self._truth is None:
            self._truth = find_truth(self._model, self._device)
        problem = compare_step(launch, size, self._memory, self._truth, self._has_experts)
        if problem is None:
            self._proved.add(how)
        return problem

    def _fastest(self) -> Step:
        if self._step is None:
            self._step = self._new_step()
        return self._step

    def _new_step(self) -> Step:
        if self._ways.fused:
            return FusedStep(self._model, self._memory.cache, self._memory.slots.tables.shape[1])
        if not self._ways.attention:
            return ModelStep(self._model, self._memory.cache, attend_plain)
        from shardproof.rollout.paged.attention_kernels import attend_rotated as attend  # needs Triton

        return ModelStep(self._model, self._memory.cache, attend)

    def _captures(self, step: Step, sampling: Sampling) -> bool:
        """Whether this step can be captured: in the model's own forward the host may wait for the device."""
        if not self._ways.graphs or isinstance(step, FusedStep):
            return self._ways.graphs
        if self._waits is None:
            slots = self._memory.slots.scratch(2)
            logits = self._memory.logits.new_empty(2, self._memory.logits.shape[1])
            self._waits = graphs.host_waits(partial(self._run, step, slots, logits, sampling), self._device)
            if self._waits:
                logger.warning(
                    "decoding without CUDA graphs: this model synchronises with the host in each step"
                )
                self._ways.graphs = False
        return not self._waits

    def _run(self, step: Step, slots: Slots, logits: torch.Tensor, sampling: Sampling) -> None:
        """One step: the last token in, the next one out."""
        if self._recorder is None or self._memory.chosen is None:
            step(slots, logits)
        else:
            recorder = self._recorder
            recorder.watch(partial(_step_and_logits, step), slots, logits)
            self._memory.chosen.index_put_((slots.outputs, slots.steps), recorder.last())
        self.draw(slots, sampling, logits)

    def _draw_with(self, sampling: Sampling, logits: torch.Tensor) -> Callable[[Slots, torch.Tensor], None]:
        """Kernels that draw, if they were shown to be right for this temperature; else plain torch."""

        def plain(slots: Slots, logits: torch.Tensor) -> None:
            progress.record(slots, sampling, logits)

        if not self._ways.draws or sampling.temperature <= 0:
            return plain  # which gives exact log-probs where they are wanted
        from shardproof.rollout.paged.draw_kernels import record  # as above

        how = ("draws", sampling.temperature, len(self._memory.slots.stops), logits.dtype)
        if how not in self._proved:
            some, stops = logits[:_COMPARED_DRAWS], how[2]
            problem = _failure_of(lambda: compare_draws(record, some, sampling, stops, progress.record))
            if problem is not None:
                self._ways.draws = False
                logger.warning("decoding without kernels that draw: %s", problem)
                return plain
            self._proved.add(how)

        def drawn(slots: Slots, logits: torch.Tensor) -> None:
            before = slots.steps.clone() if sampling.exact else None
            record(slots, sampling.temperature, logits)
            if before is not None:
                progress.note_exactly(slots, sampling, logits, before)

        return drawn


def _step_and_logits(step: Step, slots: Slots, logits: torch.Tensor) -> torch.Tensor:
    step(slots, logits)
    return logits


def _failure_of(compare: Callable[[], str | None]) -> str | None:
    """What is wrong with kernels: what a comparison says, or that they fail."""
    try:
        return compare()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel's compiler and launcher raise
        return f"they failed ({type(error).__name__}: {error})"
