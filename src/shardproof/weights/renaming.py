"""transformers' renaming of checkpoint names, done once for names that differ in their numbers alone."""

from __future__ import annotations

import re

import torch

from shardproof.model import hf_private

_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")
# Stands for the n-th number of a name while the name's pattern is renamed.
_STAND_IN = 900_000_000


# (the model's name, the pattern of the conversion that the tensor goes through, the checkpoint's name without its
# numbers, the numbers): a plain tuple, made by the ten thousand.
Renamed = tuple[str, str | None, str, list[str]]


class Renamer:
    """From a checkpoint name to the model's.

    A checkpoint has tens of thousands of names and a few dozen patterns. Rules that look at numbers, and names whose
    pattern does not lead into the model, go through transformers one by one.
    """

    def __init__(self, renamings: list, converters: list, prefix: str, state: dict[str, torch.Tensor]):
        self._arguments = (renamings, converters, prefix, state)
        sources = [pattern for rule in [*renamings, *converters] for pattern in rule.source_patterns]
        # A digit beside a letter, as in w1, is part of a word.
        self._by_pattern = not any(re.search(r"\\d|(?<![A-Za-z_0-9])\d", pattern) for pattern in sources)
        self._known: dict[str, tuple[str, str | None]] = {}  # words -> (target with numbered gaps, pattern)

    def __call__(self, name: str) -> Renamed:
        renamings, converters, prefix, state = self._arguments
        parts = _NUMBER.split(name)
        numbers = parts[1::2]
        words = "\0".join(parts[::2])
        if self._by_pattern:
            known = self._known.get(words)
            if known is None:
                known = self._known[words] = self._rename_words(parts[::2])
            target = known[0].format(*numbers)
            if target in state:
                return target, known[1], words, numbers
        target, pattern = hf_private.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = hf_private.rename_source_key(name, [], [], prefix, state)
        return target, pattern, words, numbers

    def _rename_words(self, words: list[str]) -> tuple[str, str | None]:
        """What becomes of a name whatever its numbers are, which stand as {0}, {1} and so on in the result."""
        numbered = (f"{_STAND_IN + index}{word}" for index, word in enumerate(words[1:]))
        stand_in = "".join([words[0], *numbered])
        renamed, pattern = hf_private.rename_source_key(stand_in, *self._arguments[:2])
        gaps = range(len(words) - 1)
        renamed = renamed.replace("{", "{{").replace("}", "}}")
        for index in gaps:
            renamed = renamed.replace(str(_STAND_IN + index), f"{{{index}}}")
        return renamed, pattern


def in_order(names: list[tuple[str, str, list[str]]]) -> list[str]:
    """The checkpoint names that one conversion collects, each with its words and numbers, sorted by the numbers."""
    if len({words for _, words, _ in names}) == 1:
        return [name for name, _, _ in sorted(names, key=lambda item: [*map(int, item[2])])]
    return sorted((name for name, _, _ in names), key=hf_private.dot_natural_key)
