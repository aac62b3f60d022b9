"""Which requests are read, decoded, put back and done: the host's side of decoding with a paged cache.

Requests with the same prompt share it: it is read once, and its full blocks are held by all of their rows. Rows enter in
the order of their requests. A row that finds no block makes the row that entered last go back: its blocks are free, and it
is read again later, with what it has drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardproof.rollout.paged.blocks import BLOCK, BlockPool, blocks_for


@dataclass(eq=False)
class Row:
    """A request that is being answered."""

    index: int  # of the request
    num_prompt: int
    limit: int  # of tokens to draw
    launched: int = (
        0  # tokens that it has drawn when everything that was launched is done, unless it ends before
    )
    blocks: list[int] = field(default_factory=list)
    line: int = -1  # of the outputs
    slot: int = -1
    # What it had drawn when it was put back.
    drawn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: Any = None  # of what it has read, where they are recorded

    @property
    def position(self) -> int:
        """Of the token that the next step reads, at most."""
        return self.num_prompt + self.launched - 1

    @property
    def left(self) -> int:
        """Tokens that it may still draw."""
        return self.limit - self.launched


@dataclass(eq=False)
class Prompt:
    """Tokens to read, and the rows that begin after them."""

    tokens: Sequence[int]
    rows: deque[Row]
    blocks: list[int] = field(default_factory=list)
    num_read: int = 0  # or on their way
    logits: Any = None  # after the last token, once it was read
    experts: Any = None  # of its tokens, where they are recorded

    @property
    def is_read(self) -> bool:
        return self.num_read == len(self.tokens)


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that are read together."""

    prompt: Prompt
    start: int
    stop: int


class Schedule:
    """The requests of one call, and who holds which blocks and slots."""

    def __init__(
        self,
        prompts: Iterable[Prompt],
        pool: BlockPool,
        most_rows: int,
        reuse: Callable[[Prompt], int] = lambda prompt: 0,
    ):
        """`reuse` fills a prompt's blocks with what is known of it; returns for how many of its tokens."""
        self.pool = pool
        self._reuse = reuse
        self.rows: list[Row] = []  # by slot
        self._waiting = deque(prompts)
        self._ready: deque[Prompt] = deque()  # begun to be read; their rows enter in this order
        self._most_rows = most_rows
        self._order: dict[Row, None] = {}  # rows in the order in which they entered
        self.num_put_back = 0

    @property
    def is_over(self) -> bool:
        return not (self.rows or self._ready or self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests that are not answered yet."""
        return len(self.rows) + sum(
            len(prompt.rows) for each in (self._ready, self._waiting) for prompt in each
        )

    @property
    def num_free(self) -> int:
        """Slots for more rows."""
        return self._most_rows - len(self.rows)

    def next_pieces(self, budget: int) -> list[Piece]:
        """What to read now, up to `budget` tokens; blocks are taken."""
        found: list[Piece] = []
        places = self.num_free - sum(len(prompt.rows) for prompt in self._ready)
        while budget > 0:
            if not self._ready or self._ready[-1].is_read:
                if places <= 0 or not self._begin(places):
                    break
                places -= len(self._ready[-1].rows)
            prompt = self._ready[-1]
            start = prompt.num_read
            prompt.num_read = min(len(prompt.tokens), start + budget)
            found.append(Piece(prompt, start, prompt.num_read))
            budget -= prompt.num_read - start
        return found

    def _begin(self, places: int) -> bool:
        """Take the blocks of the next prompt; False if none waits, or if it would take what rows will need soon."""
        if not self._waiting:
            return False
        prompt = self._waiting[0]
        needed = blocks_for(len(prompt.tokens))
        copies = min(places, len(prompt.rows)) if self._order or self._ready else 0
        if needed + copies + len(self._order) > self.pool.num_free:
            return False
        self._ready.append(self._waiting.popleft())
        prompt.blocks = self.pool.take(needed) or []
        prompt.num_read = self._reuse(prompt)
        return True

    def enter(self) -> tuple[list[tuple[Row, Prompt]], list[tuple[int, int]]]:
        """Rows that get slots now, each with its prompt, and (source, target) of blocks to copy for them."""
        entered: list[tuple[Row, Prompt]] = []
        copies: list[tuple[int, int]] = []
        while self._ready and self.num_free and self._ready[0].is_read:
            prompt = self._ready[0]
            row = prompt.rows[0]
            if len(prompt.rows) == 1:
                self._ready.popleft()
                row.blocks, prompt.blocks = prompt.blocks, []
            elif not self._share(prompt, row, copies):
                if self.rows:
                    break
                # Nothing else will free a block: the others read the prompt again later.
                self._ready.popleft()
                row.blocks, prompt.blocks = prompt.blocks, []
                self._waiting.appendleft(Prompt(prompt.tokens, deque(list(prompt.rows)[1:])))
            prompt.rows.popleft()
            row.slot = len(self.rows)
            self.rows.append(row)
            self._order[row] = None
            row.launched = len(row.drawn) + 1  # the draw from the prompt's logits
            entered.append((row, prompt))
        return entered, copies

    def _share(self, prompt: Prompt, row: Row, copies: list[tuple[int, int]]) -> bool:
        """Give a row the prompt's full blocks and a copy of the last one, which it will write to; False for no room."""
        full, rest = divmod(len(prompt.tokens), BLOCK)
        own = self.pool.take(1 if rest else 0)
        if own is None:
            return False
        self.pool.share(prompt.blocks[:full])
        row.blocks = [*prompt.blocks[:full], *own]
        copies += [(prompt.blocks[full], block) for block in own]
        return True

    def provide(self, steps: int) -> list[Row]:
        """Take the blocks that so many steps will write to; returns rows that must be put back: they have left."""
        back: list[Row] = []
        for row in list(self._order):
            if row not in self._order:
                continue
            missing = blocks_for(row.position + min(steps, row.left)) - len(row.blocks)
            while missing > 0:
                taken = self.pool.take(missing)
                if taken is not None:
                    row.blocks += taken
                    break
                if self._drop_prompt():
                    continue
                last = next(reversed(self._order))
                back.append(last)
                self.leave([last])
                self.give_back(last)
                if last is row:
                    break
        return back

    def _drop_prompt(self) -> bool:
        """Give up the blocks of the prompt that was read last and whose rows have not entered; False if there is none."""
        if not self._ready:
            return False
        prompt = self._ready.pop()
        self.pool.give_back(prompt.blocks)
        self._waiting.appendleft(Prompt(prompt.tokens, prompt.rows))
        return True

    def put_back(self, row: Row, tokens: Sequence[int]) -> None:
        """Let a row that has left wait to be read again: its prompt and what it has drawn."""
        self.num_put_back += 1
        self._waiting.appendleft(Prompt(tokens, deque([row])))

    def leave(self, rows: Iterable[Row]) -> None:
        """Take rows out of their slots; the last rows move into these."""
        for row in sorted(rows, key=lambda row: -row.slot):
            last = self.rows.pop()
            if last is not row:
                last.slot = row.slot
                self.rows[row.slot] = last
            row.slot = -1
            del self._order[row]

    def give_back(self, row: Row) -> None:
        """Free a row's blocks."""
        self.pool.give_back(row.blocks)
        row.blocks = []
