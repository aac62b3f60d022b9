"""Prompts in memory that the ranks of one host share: one of them reads and tokenises the data, the others map the result.

A rank decodes a prompt when it needs it, so that the data take the memory of one rank per host.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, overload

import numpy as np

from shardproof.dist.region import NotOurs, RegionAddress, create_region, map_bytes
from shardproof.rl.checks import Data
from shardproof.rl.data import Prompt

_HEAD = struct.Struct("<q")  # length of the JSON that says how many prompts there are
_TOKENS = [each.name for each in fields(Prompt) if each.type == "tuple[int, ...]"]
_OTHERS = [each.name for each in fields(Prompt) if each.name not in _TOKENS]  # JSON brings them back
_PROMPT = struct.Struct(f"<{1 + len(_TOKENS)}q")  # lengths: of JSON in bytes, of each list of tokens
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
        found = dict(zip(_OTHERS, json.loads(self._memory[at : at + text_bytes].tobytes()), strict=True))
        at += text_bytes
        for name, length in zip(_TOKENS, lengths, strict=True):
            found[name] = tuple(np.frombuffer(self._memory, np.int32, length, at).tolist())
            at += 4 * length
        return Prompt(**found)


def share_prompts(data: Data) -> tuple[int, RegionAddress] | None:
    """(descriptor, address) of memory that holds the data; None if some row holds what only Python's own memory can.

    Memory: the data once more, while they are copied.
    """
    every = [*data.prompts, *(prompt for some in data.held_out.values() for prompt in some)]
    if not hasattr(os, "memfd_create") or not all(_is_plain(prompt.row) for prompt in every):
        return None
    starts = np.zeros(len(every), dtype=np.int64)
    about = {
        "prompts": len(data.prompts),
        "held_out": {name: len(some) for name, some in data.held_out.items()},
        "has_messages": data.has_messages,
        "sources": data.sources,
        "rates": list(data.rates),
        "dropped": data.dropped,
    }
    text = json.dumps(about).encode()
    text = text.ljust(len(text) + -len(text) % 8)  # what follows are numbers of 8 bytes
    at, parts = _HEAD.size + len(text) + starts.nbytes, []
    for number, prompt in enumerate(every):
        starts[number] = at
        encoded = list(_encode(prompt))
        parts += encoded
        at += sum(map(len, encoded))
    descriptor, address = create_region(at)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.writelines([_HEAD.pack(len(text)), text, starts.tobytes(), *parts])
    return descriptor, address


def open_prompts(address: Mapping[str, Any]) -> Data | None:
    """The data at an address; None if this process cannot map that memory."""
    try:
        memory = memoryview(map_bytes(RegionAddress.from_json(address)))
    except NotOurs:
        return None
    (length,) = _HEAD.unpack_from(memory)
    begin = _HEAD.size + length
    about = json.loads(memory[_HEAD.size : begin].tobytes())
    sizes = [about["prompts"], *about["held_out"].values()]
    ends = np.cumsum(sizes)
    starts = np.frombuffer(memory, np.int64, int(ends[-1]), begin)
    prompts, *held_out = (SharedPrompts(memory, part) for part in np.split(starts, ends[:-1]))
    rest = (about[name] for name in ("has_messages", "sources", "rates", "dropped"))
    return Data(prompts, dict(zip(about["held_out"], held_out, strict=True)), *rest)


def _encode(prompt: Prompt) -> Iterator[bytes]:
    text = json.dumps([getattr(prompt, name) for name in _OTHERS]).encode()
    lists = [getattr(prompt, name) for name in _TOKENS]
    yield _PROMPT.pack(len(text), *map(len, lists))
    yield text
    for tokens in lists:
        yield np.array(tokens, dtype=np.int32).tobytes()


def _is_plain(value: Any) -> bool:
    """Whether JSON brings back just this value. Rows of Parquet files may hold dates, those of the hub images."""
    if isinstance(value, dict) and type(value) is dict:
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
