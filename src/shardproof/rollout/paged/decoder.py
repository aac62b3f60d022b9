"""Answers requests with one model and a paged cache: rows enter and leave while others go on.

The host looks at who has finished every few steps, and at what the device had found a look before: the device always has
steps to run. What is drawn for a request depends on its seed and on how many tokens it has drawn, never on the others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from shardproof.errors import ShardproofError
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.kept import KeptTurns
from shardproof.rollout.paged.compiling import Compiling
from shardproof.rollout.paged.endings import Endings
from shardproof.rollout.paged.lines import Fetched, Lines
from shardproof.rollout.paged.memory import Memory, Needs
from shardproof.rollout.paged.reading import CHUNK_TOKENS, PromptReader, Reading
from shardproof.rollout.paged.schedule import Piece, Prompt, Row, Schedule
from shardproof.rollout.paged.slots import upload
from shardproof.rollout.paged.steps import WORTH_CAPTURING, Steps, Ways
from shardproof.rollout.recording import Recorder
from shardproof.rollout.shaping import Kind
from shardproof.rollout.trajectory import Trajectory
from shardproof.shard.sleeping import SleepingMemory

logger = logging.getLogger(__name__)

_STEPS_PER_LOOK = 8
_TOKENS_BETWEEN = 4096  # of prompts, read between two looks while most slots are taken


class PagedDecoder:
    """Decodes with one model. The model's parameters may be written between calls, not moved.

    It takes the fastest way that a comparison has shown to be right, and falls back where one fails: our own kernels in
    graphs, the model's own forward in graphs, that forward without graphs. All draw the same tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        recorder: Recorder | None = None,
        most_rows: int = 256,
        kv_cache_gib: float | None = None,
        sleeping: SleepingMemory | None = None,
    ):
        self.ways = Ways.on(device, model)
        self.stats: dict[str, float] = {}  # of the last call
        self._compiling: Compiling | None = None
        self._model = model
        self._device = device
        self._recorder = recorder
        self._memory = Memory(model, device, most_rows, kv_cache_gib, recorder, sleeping)
        self._reader = PromptReader(model, recorder)
        self._steps = Steps(model, device, self._memory, self.ways, recorder)

    @torch.no_grad()
    def __call__(
        self, requests: Sequence[Request], sampling: Sampling, version: int, kept: KeptTurns | None = None
    ) -> list[Trajectory]:
        """Answer all requests. What `kept` has is not read again; it gets the rows that continue."""
        if not requests:
            return []
        needs = Needs.of(requests, sampling, self._memory.most_rows)
        settings = [request.settings(sampling) for request in requests]
        kind = Kind.of(settings)
        found: dict[int, Trajectory] = {}
        while True:
            try:
                self._memory.begin(needs, self._steps.release)
                if kind is not None:
                    stops = max(len(each.stop_ids) for each in settings)
                    self._memory.shape(kind, stops, self._steps.release)
                self._steps.begin(kind)
                self._compile(needs, sampling)
                run = _Run(self, requests, sampling, version, kept, found)
                run.to_the_end()
                self.stats = run.stats
                return [found[index] for index in range(len(requests))]
            except (torch.OutOfMemoryError, ShardproofError):
                raise
            except Exception as error:  # whatever compilers, launches, captures and replays raise
                self._steps.release()
                if not self.ways.go_plainer(error):
                    raise

    @torch.no_grad()
    def start_compiling(self) -> None:
        """Compile the kernels of reading and of steps of all sizes in threads; the first call waits for them."""
        if not (self.ways.fused or self.ways.attention):
            return
        memory = Memory(self._model, self._device, self._memory.most_rows)  # to be thrown away
        steps = Steps(self._model, self._device, memory, self.ways, None)
        try:
            memory.begin(Needs(memory.most_rows, longest=1, most_new=1, num_stops=0, blocks=0, num_tokens=0))
            rehearsals = [*self._reader.rehearsals(memory.cache), *steps.rehearsals(memory.most_rows, 1.0)]
        except (torch.OutOfMemoryError, ShardproofError) as error:  # there may be enough memory later
            logger.debug("kernels are compiled when they are needed (%s)", error)
            return
        self._compiling = Compiling(rehearsals, self._device)
        self._steps.rehearsed |= steps.rehearsed

    def _compile(self, needs: Needs, sampling: Sampling) -> None:
        """Compile side by side what a call needs and has not been compiled."""
        if self._compiling is not None:
            self._compiling.wait()
        rehearsals = [] if self._compiling is not None else self._reader.rehearsals(self._memory.cache)
        if needs.num_tokens >= WORTH_CAPTURING:
            rehearsals += self._steps.rehearsals(needs.rows, sampling.temperature)
        if rehearsals:
            self._compiling = Compiling(rehearsals, self._device)
            self._compiling.wait()

    def release(self) -> None:
        """Free all memory and graphs. Comparisons that were passed are remembered."""
        self._steps.release()
        self._memory.free()

    def wake(self) -> None:
        """Make the cache usable again, whose memory has slept."""
        self._memory.wake()

    @property
    def parts(self) -> tuple[Memory, PromptReader, Steps, Recorder | None]:
        """What one call works with."""
        return self._memory, self._reader, self._steps, self._recorder


class _Run:
    """One call: the requests that `found` has no answer for yet."""

    def __init__(
        self,
        decoder: PagedDecoder,
        requests: Sequence[Request],
        sampling: Sampling,
        version: int,
        kept: KeptTurns | None,
        found: dict[int, Trajectory],
    ):
        self._memory, self._reader, self._steps, self._recorder = decoder.parts
        self._requests, self._sampling, self._version = requests, sampling, version
        self._kept, self._found = kept, found
        self._slots = self._memory.slots
        self._lines = Lines(self._memory, self._recorder)
        self._endings = Endings(requests, sampling, self._slots)
        reuse = partial(_reuse, self._memory, kept)
        self._schedule = Schedule(self._prompts(), self._memory.pool, self._slots.rows, reuse)
        self._fetched: deque[Fetched] = deque()
        self._tables = np.zeros(tuple(self._slots.tables.shape), np.int32)  # as on the device
        self._placed: list[tuple[Row, int] | None] = [None] * self._slots.rows  # rows in slots, their blocks
        self._endings.note(())
        self.stats: dict[str, float] = {"looks": 0, "steps": 0, "rows": 0, "slots": 0, "tokens_read": 0}

    def _prompts(self) -> list[Prompt]:
        """One for all requests that read the same, in the order of their first."""
        found: dict[tuple[int, ...], Prompt] = {}
        for index, request in enumerate(self._requests):
            if index not in self._found:
                prompt = found.setdefault(request.tokens, Prompt(request.tokens, deque()))
                prompt.rows.append(Row(index, len(request.tokens), request.limit(self._sampling)))
        return list(found.values())

    def to_the_end(self) -> None:
        """Answer everything."""
        schedule = self._schedule
        while not schedule.is_over:
            self._take_out_finished()
            self._read_and_enter()
            self._put_back(schedule.provide(_STEPS_PER_LOOK))
            self._place()
            self._endings.note(schedule.rows)
            if schedule.rows:
                self._advance()
            while self._fetched and self._fetched[0].is_there:
                self._settle(self._fetched.popleft())
        while self._fetched:
            self._settle(self._fetched.popleft())
        self.stats["put_back"] = schedule.num_put_back

    def _advance(self) -> None:
        rows = self._schedule.rows
        count = min(_STEPS_PER_LOOK, max(row.left for row in rows))
        if count <= 0:
            return
        most_blocks = max(len(row.blocks) for row in rows) + 1
        left = sum(row.left for row in rows)
        size = self._steps.advance(len(rows), count, self._sampling, left, most_blocks)
        for row in rows:
            row.launched = min(row.launched + count, row.limit)
        self.stats["looks"] += 1
        self.stats["steps"] += count
        self.stats["rows"] += count * len(rows)
        self.stats["slots"] += count * size

    def _take_out_finished(self) -> None:
        """Rows that had finished at the last look, and those that reach their limit with what was launched since."""
        over = self._endings.over(self._schedule.rows)
        if not over:
            return
        self._schedule.leave(over)
        self._fetched.append(self._lines.fetch(over))
        for row in over:
            if not self._keeps(row):
                self._schedule.give_back(row)

    def _keeps(self, row: Row) -> bool:
        return self._kept is not None and self._requests[row.index].continues

    def _settle(self, fetched: Fetched) -> None:
        """Make the answers of rows that are on the host, and keep what goes on."""
        for row, tokens, logprobs, experts in fetched.results():
            self._finish(row, tokens, logprobs, experts)

    def _finish(self, row: Row, tokens: list[int], logprobs: list[float], experts: np.ndarray | None) -> None:
        request, ends = self._requests[row.index], self._endings.find(row, tokens)
        end = ends.num or len(tokens)
        trajectory = request.answered(
            tokens[:end], logprobs[:end], ends.num is not None, self._version, stop_string=ends.stop_string
        )
        num_read = len(trajectory.tokens) - 1  # nothing has read the last token
        chosen = None
        if experts is not None:
            chosen = np.concatenate([row.experts, experts])[:num_read]
            assert self._recorder is not None
            (trajectory,) = self._recorder.with_records([trajectory], [chosen])
        self._found[row.index] = trajectory
        if self._keeps(row):
            assert self._kept is not None
            states = self._memory.cache.states(row.blocks, num_read)
            self._kept.keep(trajectory.tokens[:-1], len(request.tokens), states, chosen)
            self._schedule.give_back(row)

    def _read_and_enter(self) -> None:
        """Read prompts for free slots, and let their rows enter: all at once while many slots are free."""
        schedule = self._schedule
        while schedule.num_free:
            # Alone a short prompt costs as much as many: wait for a few more slots, unless they are the last.
            few = schedule.num_free < self._slots.rows // 16
            if few and schedule.num_unfinished > len(schedule.rows):
                self._enter()
                return
            aim = min(self._slots.rows, schedule.num_unfinished)
            many = 4 * len(schedule.rows) < 3 * aim
            before = len(schedule.rows)
            pieces = schedule.next_pieces(CHUNK_TOKENS if many else _TOKENS_BETWEEN)
            if pieces:
                self._read(pieces)
            self._enter()
            if not many or (not pieces and len(schedule.rows) == before):
                return

    def _read(self, pieces: list[Piece]) -> None:
        readings = [
            Reading(piece.prompt.tokens[piece.start : piece.stop], piece.start, piece.prompt.blocks)
            for piece in pieces
        ]
        found = self._reader.read(readings, self._memory.cache)
        for number, piece in enumerate(pieces):
            prompt = piece.prompt
            if found.experts is not None:
                assert self._recorder is not None
                read = self._recorder.on_host(found.experts[number])
                prompt.experts = read if prompt.experts is None else np.concatenate([prompt.experts, read])
            if piece.stop == len(prompt.tokens):
                prompt.logits = found.logits[number]
            self.stats["tokens_read"] += piece.stop - piece.start

    def _enter(self) -> None:
        """Give slots to rows whose prompts were read, and draw their first tokens."""
        entered, copies = self._schedule.enter()
        if not entered:
            return
        self._memory.cache.copy_blocks([one for one, _ in copies], [other for _, other in copies])
        rows = [row for row, _ in entered]
        self._begin(rows)
        for row, prompt in entered:
            if prompt.experts is not None:
                # What it had drawn before it was put back keeps the experts that drew it.
                known = 0 if row.experts is None else len(row.experts)
                row.experts = (
                    prompt.experts if not known else np.concatenate([row.experts, prompt.experts[known:]])
                )
        entering = self._slots.scratch(len(rows))
        begun = [len(row.drawn) for row in rows]
        positions = [row.num_prompt + num - 1 for row, num in zip(rows, begun, strict=True)]
        entering.begin(positions, [row.line for row in rows], begun)
        self._steps.draw(entering, self._sampling, _stacked([prompt for _, prompt in entered]))
        self._place(rows)
        self._slots.state[:, rows[0].slot : rows[-1].slot + 1].copy_(entering.state)

    def _begin(self, rows: list[Row]) -> None:
        """Give rows their lines, with what decides their draws."""
        requests = [self._requests[row.index] for row in rows]
        self._lines.begin(rows, [request.seed for request in requests])
        self._endings.enter(rows)
        if self._memory.shaping is not None:
            self._memory.shaping.begin(
                [row.line for row in rows],
                [request.settings(self._sampling) for request in requests],
                [request.tokens for request in requests],
                [row.drawn for row in rows],
            )

    def _put_back(self, rows: list[Row]) -> None:
        """Bring what rows have drawn to the host, and let them wait to be read again. Waits for the device."""
        if not rows:
            return
        done = self._slots.done.tolist()  # now, not at the last look
        over = [done[row.line] for row in rows]
        results = self._lines.fetch(rows).results()
        for is_over, (row, tokens, logprobs, experts) in zip(over, results, strict=True):
            if is_over or row.left <= 0 or self._endings.find(row, tokens).num is not None:
                # Its blocks are given up: what it was to keep is read again in its next turn.
                self._finish_without_keeping(row, tokens, logprobs, experts)
                continue
            if experts is not None:
                row.experts = np.concatenate([row.experts, experts])
            row.drawn, row.logprobs = tokens, logprobs
            self._schedule.put_back(row, (*self._requests[row.index].tokens, *tokens))

    def _finish_without_keeping(self, row: Row, *found: Any) -> None:
        kept, self._kept = self._kept, None
        try:
            self._finish(row, *found)
        finally:
            self._kept = kept

    def _place(self, entered: Sequence[Row] = ()) -> None:
        """Make slots and tables on the device those of the schedule, but for the state of rows that have just entered."""
        rows, slots = self._schedule.rows, self._slots
        before = {each[0]: slot for slot, each in enumerate(self._placed) if each is not None}
        # Where each slot's row was; slots without a row take the state of a slot that never has one.
        sources = [before.get(row, slots.rows) for row in rows] + [slots.rows] * (slots.rows - len(rows))
        moved = any(source != slot for slot, source in enumerate(sources[: len(rows)])) or len(before) > len(
            rows
        )
        changed = False
        for slot in range(slots.rows):
            now = (rows[slot], len(rows[slot].blocks)) if slot < len(rows) else None
            if self._placed[slot] != now:
                self._placed[slot] = now
                self._tables[slot] = 0
                if now is not None:
                    self._tables[slot, : now[1]] = now[0].blocks
                changed = True
        if moved or entered:
            given = upload(np.array(sources), slots.state.device)
            blank = slots.scratch(1).state
            slots.state.copy_(torch.cat([slots.state, blank], 1).index_select(1, given))
        if changed:
            slots.tables.copy_(upload(self._tables, slots.tables.device), non_blocking=True)


def _reuse(memory: Memory, kept: KeptTurns | None, prompt: Prompt) -> int:
    """Put what is kept of a prompt into its blocks; returns where reading starts."""
    known = kept.take(tuple(prompt.tokens)) if kept is not None else None
    if known is None:
        return 0
    keys, values = (each[:, :, : known.length] for each in known.prefix.states)
    memory.cache.put(prompt.blocks, 0, (keys, values))
    prompt.experts = known.experts
    return known.length


def _stacked(prompts: list[Prompt]) -> torch.Tensor:
    """The logits after each prompt, [rows, vocabulary]."""
    different = list(dict.fromkeys(prompts))
    place = {prompt: number for number, prompt in enumerate(different)}
    logits = torch.stack([prompt.logits for prompt in different])
    if len(different) == len(prompts):
        return logits
    chosen = upload(np.array([place[prompt] for prompt in prompts]), logits.device)
    return logits.index_select(0, chosen)
