"""The agent program that plays tasksets of verifiers in this process: a chat with the task's own tools.

verifiers' programs of the same kind are started with uv and install what they need for each run. Imported only where
verifiers is installed.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from shardproof.environments.model_endpoint import is_over

__all__ = ["ChatHarness"]

ID = "shardproof_chat"
sys.modules.setdefault(ID, sys.modules[__name__])  # verifiers imports programs by their id, which has no dots


class ChatConfig(HarnessConfig):
    """No settings of its own."""


class ChatHarness(Harness[ChatConfig]):
    """Asks the model, runs the tools that it calls, and asks again until it calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message_to_wire(message) for message in prompt or ()]
        )
        async with AsyncExitStack() as stack:
            headers = {"Authorization": f"Bearer {secret}"}
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, headers=headers))
            specs = {
                name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
            }
            tools, dispatch, servers = await connect_mcp({"mcpServers": specs}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                response = await client.post(f"{endpoint}/chat/completions", json=body)
                if response.status_code != 200:
                    ended = trace.stop_condition is not None or is_over(response.text)
                    return ProgramResult(exit_code=0 if ended else 1, stdout="", stderr=response.text)
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    result = await self._gate(client, tool_interception_url, call)
                    if result is None:
                        content = await _run(call, dispatch, servers)
                        name = call["function"]["name"]
                        result = {
                            "role": "tool",
                            "tool_call_id": call["id"],
                            "name": name,
                            "content": content,
                        }
                    messages.append(result)

    async def _gate(
        self, client: httpx.AsyncClient, url: str | None, call: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The result that the task's own rules put in place of a call; None: the call may run."""
        if url is None:
            return None
        function = call["function"]
        asked = {
            "tool_call_id": call["id"],
            "name": function["name"],
            "arguments": json.loads(function["arguments"]),
        }
        decision = (await client.post(url, json=asked)).raise_for_status().json()
        if decision["action"] == "deny":
            return decision["message"]
        if decision["action"] == "stop":
            raise RuntimeError(decision["reason"])
        return None


async def _run(call: dict[str, Any], dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    name = call["function"]["name"]
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    return await call_mcp(servers, dispatch, name, json.loads(call["function"]["arguments"]))
