"""What the tiny agent meets: a tool that multiplies, for tiny-tools.toml, and an opponent, for tiny-game.toml."""

from __future__ import annotations

import random
from typing import Any

from shardproof import Environment, Reply, Turn


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class TakeAway(Environment):
    """A game for two: whoever takes the last stick wins, and each move takes 1 to `most` sticks.

    The policy moves first. The opponent makes the best move as often as `skill` says, and any legal move otherwise.
    """

    def __init__(self, skill: float = 0.5):
        self.skill = skill

    def start(self, row: dict[str, Any], seed: int) -> str:
        self.left, self.most = int(row["sticks"]), int(row["most"])
        self.random = random.Random(seed)
        return self._position()

    def step(self, turn: Turn) -> Reply:
        move = turn.text.strip()
        if not move.isdecimal() or not 1 <= int(move) <= min(self.most, self.left):
            return Reply(reward=0.0, done=True, facts={"illegal": 1.0})
        self.left -= int(move)
        if not self.left:
            return Reply(reward=1.0, done=True, facts={"illegal": 0.0})
        self.left -= self._answer()
        if not self.left:
            return Reply(reward=0.0, done=True, facts={"illegal": 0.0})
        return Reply(self._position(), facts={"illegal": 0.0})

    def _answer(self) -> int:
        best = self.left % (self.most + 1)  # leaves a multiple of most + 1, from which nobody can win
        if best and self.random.random() < self.skill:
            return best
        return self.random.randint(1, min(self.most, self.left))

    def _position(self) -> str:
        return f"{self.left} left, take 1-{self.most}"
