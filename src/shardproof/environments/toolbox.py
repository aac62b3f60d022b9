"""What a tool is, and how its results and errors become text that the policy reads."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from shardproof.environments.protocol import Reply, Schema

_ERROR_CHARS = 1000
Result = str | Reply


class ToolError(Exception):
    """A call that did not work out; the policy is shown the message."""


class ToolTimeout(ToolError):
    """A call that took longer than it may. How much longer differs from run to run, so that the policy is not told."""


class Tool(ABC):
    """Something that the policy may call."""

    schema: Schema  # as chat templates take it

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.schema["function"].get("parameters") or {}

    @abstractmethod
    async def call(self, owner: object, arguments: dict[str, Any], seconds: float) -> Result:
        """The result of a call; ToolTimeout after `seconds`. `owner` is the environment, whose state methods work on."""


def as_text(value: object) -> str:
    """A result as text: strings as they are, other values as JSON. Raises ToolError for what has no such form."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            raise ToolError(f"the tool returned {len(bytes(value))} bytes that are not text") from None
    try:
        return well_formed(json.dumps(value, ensure_ascii=False, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"the tool's result cannot be shown: {describe(error)}") from error


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    if type(value).__repr__ is object.__repr__ and type(value).__str__ is object.__str__:
        raise TypeError(f"it holds a {type(value).__name__}, which is neither text nor JSON")
    return str(value)


def well_formed(text: str) -> str:
    """The text with halves of surrogate pairs joined, or replaced where they have no other half."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def bounded(text: str, limit: int) -> str:
    """At most about `limit` characters: the beginning and the end of what is longer, and how much is between them."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = limit - head
    left_out = len(text) - limit
    return f"{text[:head]}\n[{left_out} characters left out]\n{text[len(text) - tail :]}"


def describe(error: BaseException) -> str:
    """The error's type and message, bounded."""
    try:
        message = str(error)
    except Exception as another:  # a user's __str__
        message = f"its message cannot be read ({type(another).__name__})"
    name = type(error).__name__
    return well_formed(bounded(f"{name}: {message}" if message else name, _ERROR_CHARS))
