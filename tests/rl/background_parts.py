"""What rollouts in the background are made of in tests: users' code, prompts, rules, and all of it put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof.environments.pool import EnvironmentPool, EnvironmentSpec
from shardproof.rl.background import BackgroundBatch, BackgroundRollouts
from shardproof.rl.chat.format import PlainFormat
from shardproof.rl.conversations.conversation import Rules
from shardproof.rl.conversations.steps import Start, starts_of
from shardproof.rl.conversations.waves import Conversations
from shardproof.rl.data import Prompt
from shardproof.rl.rewards.runner import RewardRunner, RewardSpec
from shardproof.rollout.engine import Sampling
from shardproof.rollout.token_ledger import TokenLedger
from tests.rl.background_engine import LONG_S, FakeEngine

STOP = 1
SAMPLING = Sampling(max_new_tokens=8, stop_ids=(STOP,))

USERS = '''
import asyncio, os, pathlib, signal, time
from shardproof import Environment, Reply

async def meet(row, at):
    """Leaves one file and waits for another, as the row says."""
    if row.get("where") == at:
        pathlib.Path(row["leave"]).touch()
        while not os.path.exists(row["wait"]):
            await asyncio.sleep(0.005)

class Talks(Environment):
    def __init__(self, closed=None):
        self.closed = closed

    async def start(self, row, seed):
        self.row = row
        await meet(row, "start")

    async def step(self, turn):
        await meet(self.row, "step")
        what = self.row.get("do")
        if what == "raise":
            raise LookupError("no such page")
        if what == "die":
            os._exit(7)
        if what == "hang":
            time.sleep(1000)
        return Reply("+1=", float(len(turn.text)), turn.number >= self.row.get("turns", 2), facts={"turn": turn.number})

    def close(self):
        if self.closed and hasattr(self, "row"):
            with open(self.closed, "a") as file:
                file.write("closed\\n")

def score(prompt, completion, row):
    if row.get("where") == "reward":
        pathlib.Path(row["leave"]).touch()
        while not os.path.exists(row["wait"]):
            time.sleep(0.005)
    if row.get("score") == "raise":
        raise KeyError("no such score")
    return float(len(completion))
'''


class Letters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in tokens if token != STOP)


def make_rules(**settings: Any) -> Rules:
    tokenizer = Letters()
    rules = Rules(
        PlainFormat(tokenizer),
        is_templated=False,
        decode=lambda tokens, without: tokenizer.decode(tokens),
        prompt_column="prompt",
        roles=("user",),
        tools=(),
        max_turns=4,
        max_tokens=None,
        max_seconds=None,
        splits=False,
        masks=False,
        filler=(STOP, STOP),
    )
    return replace(rules, **settings)


def starts_from(rows: Sequence[dict[str, Any]], size: int = 1, step: int = 3) -> list[Start]:
    """`size` starts for each row."""
    asked = []
    for group, row in enumerate(rows):
        text = f"{group}+{group}="
        asked.append((group, Prompt({"prompt": text, **row}, text, tuple(map(ord, text)))))
    return starts_of(17, asked, size, step)


class Parts:
    """What rollouts in the background are made of."""

    def __init__(self, engine: FakeEngine, rewards: RewardRunner, conversations: Conversations | None):
        self.engine, self.rewards, self.conversations = engine, rewards, conversations
        self.background = BackgroundRollouts(engine, Letters(), rewards, conversations)

    def begin(
        self, rows: Sequence[dict[str, Any]], size: int = 1, ledger: TokenLedger | None = None
    ) -> BackgroundBatch:
        return self.background.begin(starts_from(rows, size), SAMPLING, ledger)


def make_engine(**settings: Any) -> FakeEngine:
    return FakeEngine(low=ord("a"), high=ord("k"), **settings)


@contextmanager
def making(
    environment: bool = False,
    rewards: Sequence[str] = (),
    stops: bool = False,
    closed: Path | None = None,
    timeout_s: float = LONG_S,
    rules: Rules | None = None,
    **settings: Any,
) -> Iterator[Parts]:
    specs = [RewardSpec(name) for name in rewards]
    on_error = "stop" if stops else "zero"
    pool = None
    with RewardRunner(specs, timeout_s=timeout_s, num_workers=1, on_error=on_error) as runner:
        try:
            conversations = None
            if environment:
                options = {} if closed is None else {"closed": str(closed)}
                spec = EnvironmentSpec("talking_users:Talks", options, timeout_s, num_workers=1)
                pool = EnvironmentPool(spec)
                conversations = Conversations(pool, rules or make_rules(), stops)
            parts = Parts(make_engine(**settings), runner, conversations)
            with parts.background:
                yield parts
        finally:
            if pool is not None:
                pool.close()
