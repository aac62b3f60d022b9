"""The tool `python`: runs code that the policy wrote, in a sandbox. Each call starts anew; nothing is kept between calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from shardproof.environments.protocol import Schema
from shardproof.environments.sandbox import Limits, Ran, Sandbox
from shardproof.environments.toolbox import Result, Tool, ToolTimeout, bounded

_SCHEMA: Schema = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code and see what it prints, and the value of its last line. "
        "Each call starts anew: variables and files of earlier calls are gone.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}


class PythonTool(Tool):
    """A Python interpreter under limits."""

    schema = _SCHEMA

    def __init__(self, limits: Mapping[str, Any]):
        self._sandbox = Sandbox(Limits(**limits))
        self._sandbox.check()

    async def call(self, owner: object, arguments: dict[str, Any], seconds: float) -> Result:
        try:
            ran = await asyncio.wait_for(self._sandbox.run(arguments["code"]), seconds)
        except asyncio.TimeoutError:  # noqa: UP041  # another class in Python 3.10
            raise ToolTimeout from None
        return _shown(ran, self._sandbox.limits.output_chars)


def _shown(ran: Ran, limit: int) -> str:
    """The output as the policy reads it."""
    head = ran.output[: ran.head].decode("utf-8", "replace")
    tail = ran.output[ran.head :].decode("utf-8", "replace")
    gap = f"\n[{ran.left_out} bytes left out]\n" if ran.left_out else ""
    text = head + tail if not gap else head[: (limit + 1) // 2] + gap + tail[len(tail) - limit // 2 :]
    text = bounded(text, limit + len(gap)).rstrip("\n")
    ended = f"[{ran.ended}]" if ran.ended else ""
    return "\n".join(each for each in (text, ended) if each) or "[no output]"
