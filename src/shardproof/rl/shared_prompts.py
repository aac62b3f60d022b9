"""Prompts in memory that the ranks of one host share: one of them reads and tokenises the data, the others map the result.

A rank decodes a prompt when it needs it, so that the data take the memory of one rank per host.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from shardproof.dist.region import NotOurs, RegionAddress, create_region, map_bytes
from shardproof.rl.checks import Data
from shardproof.rl.data import Prompt

_HEAD = struct.Struct("<3q")  # numbers of prompts and of held-out ones, and whether some are lists
_PROMPT = struct.Struct("<3q")  # lengths: of text in bytes, of both lists of tokens
_PLAIN = (str, int, float, bool, type(None))


class SharedPrompts(Sequence[Prompt]):
    """Prompts that lie in shared memory."""

    def __init__(self, memory: memoryview, starts: np.ndarray):
        self._memory, self._starts = memory, starts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._decode(int(start)) for start in self._starts[index]]
        return self._decode(int(self._starts[index]))

    def _decode(self, start: int) -> Prompt:
        at = start + _PROMPT.size
        text_bytes, *lengths = _PROMPT.unpack_from(self._memory, start)
        row, text = json.loads(self._memory[at : at + text_bytes].tobytes())
        at += text_bytes
        tokens = []
        for length in lengths:
            tokens.append(tuple(np.frombuffer(self._memory, np.int32, length, at).tolist()))
            at += 4 * length
        return Prompt(row, text, *tokens)


def share_prompts(data: Data) -> tuple[int, RegionAddress] | None:
    """(descriptor, address) of memory that holds the data; None if some row holds what only Python's own memory can.

    Memory: the data once more, while they are copied.
    """
    every = [*data.prompts, *data.held_out]
    if not hasattr(os, "memfd_create") or not all(_is_plain(prompt.row) for prompt in every):
        return None
    starts = np.zeros(len(every), dtype=np.int64)
    at, parts = _HEAD.size + starts.nbytes, []
    for number, prompt in enumerate(every):
        starts[number] = at
        parts += list(_encode(prompt))
        at += sum(map(len, parts[-4:]))
    head = _HEAD.pack(len(data.prompts), len(data.held_out), data.has_messages)
    descriptor, address = create_region(at)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.writelines([head, starts.tobytes(), *parts])
    return descriptor, address


def open_prompts(address: Mapping[str, Any]) -> Data | None:
    """The data at an address; None if this process cannot map that memory."""
    try:
        memory = memoryview(map_bytes(RegionAddress.from_json(address)))
    except NotOurs:
        return None
    num_prompts, num_held_out, has_messages = _HEAD.unpack_from(memory)
    starts = np.frombuffer(memory, np.int64, num_prompts + num_held_out, _HEAD.size)
    prompts, held_out = (SharedPrompts(memory, part) for part in (starts[:num_prompts], starts[num_prompts:]))
    return Data(prompts, held_out, bool(has_messages))


def _encode(prompt: Prompt) -> Iterator[bytes]:
    text = json.dumps([prompt.row, prompt.text]).encode()
    yield _PROMPT.pack(len(text), len(prompt.tokens), len(prompt.completion))
    yield text
    for tokens in (prompt.tokens, prompt.completion):
        yield np.array(tokens, dtype=np.int32).tobytes()


def _is_plain(value: Any) -> bool:
    """Whether JSON brings back just this value. Rows of Parquet files may hold dates, those of the hub images."""
    if isinstance(value, dict) and type(value) is dict:
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
