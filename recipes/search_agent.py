"""The search agent's environment, for search_agent.toml: an index of passages, and what an answer is worth."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from typing import Any

import shardproof as sp


class Search(sp.ToolEnvironment):
    """Answers searches from a file of passages, and rewards the last turn by the words it shares with the answer."""

    def __init__(self, passages: str, results: int = 3):
        self.index = _load(passages)
        self.results = results

    def start(self, row: dict[str, Any], seed: int) -> None:
        self.answer = str(row["answer"])

    @sp.tool
    def search(self, query: str) -> str:
        """Search the passages.

        Args:
            query: Words to look for.
        """
        found = self.index.search(query, self.results)
        return "\n\n".join(f"{title}: {text}" for title, text in found) or "Nothing was found."

    def finish(self, turn: sp.Turn) -> float:
        return shared_words(turn.content, self.answer)


class Index:
    """Passages by their words, ranked with BM25."""

    def __init__(self, passages: list[tuple[str, str]]):
        self.passages = passages
        self.counts = [Counter(_words(f"{title} {text}")) for title, text in passages]
        self.lengths = [sum(count.values()) for count in self.counts]
        self.mean_length = sum(self.lengths) / max(len(self.lengths), 1)
        self.places: dict[str, list[int]] = {}
        for place, count in enumerate(self.counts):
            for word in count:
                self.places.setdefault(word, []).append(place)

    def search(self, query: str, number: int) -> list[tuple[str, str]]:
        """The best passages for the words of a query, best first."""
        scores: Counter[int] = Counter()
        for word in set(_words(query)):
            holding = self.places.get(word, [])
            rarity = math.log(1 + (len(self.passages) - len(holding) + 0.5) / (len(holding) + 0.5))
            for place in holding:
                times = self.counts[place][word]
                length = self.lengths[place] / self.mean_length
                scores[place] += rarity * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * length))
        return [self.passages[place] for place, _ in scores.most_common(number)]


@functools.lru_cache(maxsize=1)  # one index per worker, for all its conversations
def _load(path: str) -> Index:
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return Index([(row["title"], row["text"]) for row in rows])


def shared_words(answer: str, expected: str) -> float:
    """The F1 score of the answer's words, as question answering is measured."""
    given, wanted = Counter(_words(answer)), Counter(_words(expected))
    shared = sum((given & wanted).values())
    return 2 * shared / (sum(given.values()) + sum(wanted.values())) if shared else 0.0


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
