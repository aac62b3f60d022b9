"""Environments for tests: small games, and everything that can go wrong in one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shardproof.environments.protocol import Environment, Opening, Reply, Turn
from tests.rl.chat.templates import tool

HERE = "tests.rl.conversations.environments"


class AsksAgain(Environment):
    """Says "+1=" until the policy has had two turns, or three where the row's answer is odd. Rewards short turns."""

    def start(self, row: dict[str, Any], seed: int) -> None:
        self.num_turns = 2 + int(row["answer"]) % 2

    def step(self, turn: Turn) -> Reply:
        reward = 1.0 / (1 + len(turn.text))
        done = turn.number >= self.num_turns
        return Reply("" if done else "+1=", reward, done, facts={"characters": len(turn.text)})


class NeverEnds(Environment):
    def step(self, turn: Turn) -> Reply:
        return Reply("+1=", float(turn.last) + 10.0 * (not turn.finished))


class TalksALot(Environment):
    def step(self, turn: Turn) -> Reply:
        return Reply("1+" * 40, 0.5)


class Opens(Environment):
    """Brings prompts of its own, from rows that have none."""

    def __init__(self, first: int = 1):
        self.first = first

    def start(self, row: dict[str, Any], seed: int) -> Opening:
        return Opening(f"{self.first}+{row['second']}=")

    def step(self, turn: Turn) -> Reply:
        return Reply(reward=float(len(turn.text)), done=True)

    @classmethod
    def rows(cls, split: str, first: int = 1, **options: Any) -> Sequence[dict[str, Any]]:
        if split not in ("train", "test"):
            raise KeyError(f"no split {split!r}")
        return [{"second": n, "answer": str(first + n)} for n in range(6 if split == "train" else 3)]


class Forgets(Environment):
    """In its second turn the policy reads something else, and no longer what it said before."""

    def step(self, turn: Turn) -> Reply:
        if turn.number == 2:
            return Reply([{"role": "user", "content": "2+2="}], 1.0, fresh=True)
        return Reply("+1=", 1.0, done=turn.number == 3)


class ForgetsAndCounts(Environment):
    """Before its last turn the policy reads something else. Turns are rewarded by what they say."""

    def step(self, turn: Turn) -> Reply:
        said = [{"role": "user", "content": "2+2="}] if turn.number == 2 else "+1="
        reward = sum(map(ord, turn.text)) % 7 / turn.number
        return Reply(said, reward, done=turn.number == 3, fresh=turn.number == 2)


class BreaksInTurnThree(Environment):
    """Ends in the second turn where the row's answer is even, and raises in the third where it is not."""

    def start(self, row: dict[str, Any], seed: int) -> None:
        self.is_even = int(row["answer"]) % 2 == 0

    def step(self, turn: Turn) -> Reply:
        if turn.number == 3:
            raise LookupError("no such page")
        return Reply("+1=", 1.0, done=self.is_even and turn.number == 2)


class BreaksForSome(Environment):
    """Raises where the row's answer is odd; the others end after a turn."""

    def start(self, row: dict[str, Any], seed: int) -> None:
        self.page = int(row["answer"])

    def step(self, turn: Turn) -> Reply | None:
        if self.page % 2 == 1:
            raise LookupError(f"there is no page {self.page}")
        return Reply(reward=1.0, done=True)


class CannotStart(Environment):
    def start(self, row: dict[str, Any], seed: int) -> None:
        raise FileNotFoundError("the game's board is missing")

    def step(self, turn: Turn) -> None: ...


class CannotStartSome(Environment):
    def start(self, row: dict[str, Any], seed: int) -> None:
        if int(row["answer"]) % 2 == 1:
            raise FileNotFoundError("the game's board is missing")

    def step(self, turn: Turn) -> Reply:
        return Reply(reward=1.0, done=True)


class Hangs(Environment):
    def start(self, row: dict[str, Any], seed: int) -> None:
        self.hangs = int(row["answer"]) % 2 == 1

    def step(self, turn: Turn) -> Reply:
        while self.hangs:
            time.sleep(0.01)
        return Reply(reward=1.0, done=True)


class AnswersInParts(Environment):
    def step(self, turn: Turn) -> Any:
        return {"reward": "much"} if turn.number == 1 else None


class SaysNothing(Environment):
    def step(self, turn: Turn) -> str:
        assert not turn.text.endswith("</s>")
        return ""


class Scribbles(Environment):
    """Writes into the row that it is given, and ends the conversation."""

    def start(self, row: dict[str, Any], seed: int) -> None:
        row["answer"] = "nothing that the policy says"

    def step(self, turn: Turn) -> None:
        return None


class Flips(Environment):
    """Answers at random, from its seed, and without end."""

    def start(self, row: dict[str, Any], seed: int) -> None:
        import random

        self.random = random.Random(seed)

    def step(self, turn: Turn) -> Reply:
        return Reply(f"+{self.random.randrange(10)}=", self.random.random())


class Rolls(Environment):
    """Brings a prompt that depends on its seed; cannot where the row's answer is 0."""

    def start(self, row: dict[str, Any], seed: int) -> str:
        if not int(row["answer"]):
            raise FileNotFoundError("the dice are missing")
        return f"{seed % 1000}+{row['answer']}="

    def step(self, turn: Turn) -> None:
        return None


class Clock(Environment):
    """Answers what no two processes answer alike."""

    def step(self, turn: Turn) -> Reply:
        return Reply(f"+{time.perf_counter_ns() % 1000}=", 1.0, done=turn.number == 2)


class Mute:
    """No environment."""


class Chats(Environment):
    """Asks twice for more, in a chat."""

    def step(self, turn: Turn) -> Reply:
        return Reply("and then?", float(turn.number), done=turn.number == 3)


class Weather(Environment):
    """Has a tool, and answers every turn as if it had been called."""

    roles = ("tool", "user")
    tools = (tool(),)

    def step(self, turn: Turn) -> Reply:
        return Reply([{"role": "tool", "content": "rain"}], done=turn.number == 2)
