"""Tools of MCP servers, through the `mcp` package.

A worker connects to each server once, and all of its conversations share the connection. Connections live in a thread
with an event loop of its own: they are made before the worker's loop runs, and outlast every conversation. A server that
dies is started again for the next call. Its calls are answered with an error until then.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from shardproof.environments.toolbox import Result, Tool, ToolError, ToolTimeout, as_text, describe
from shardproof.errors import ShardproofError, fail
from shardproof.text import printable, without_secrets

_T = TypeVar("_T")
_START_S = 60.0  # for a server to start and to list its tools
_PAGES = 100  # of a list of tools
_ATTEMPTS, _FIRST_WAIT_S, _LONGEST_WAIT_S = 8, 0.5, 30.0  # to connect again, and how long calls wait between
_GONE = "the tool's server is gone"
_UNANSWERED = 3  # calls in a row after which a server counts as dead
_LEAVE_S = 0.5  # for a server to end by itself when its worker does
_TAIL_BYTES = 2000  # of what a server wrote to its stderr
# Starts a server that is killed with its worker: the kernel sees to it, however the worker ends.
_STARTER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
)


class McpTool(Tool):
    """A tool of a server."""

    def __init__(self, server: Server, listed: Any, name: str):
        parameters = {key: value for key, value in listed.input_schema.items() if key != "$schema"}
        described = {"name": name, "description": listed.description or "", "parameters": parameters}
        self.schema = {"type": "function", "function": described}
        self._server, self._listed_as = server, listed.name

    async def call(self, owner: object, arguments: dict[str, Any], seconds: float) -> Result:
        work = _in_background(self._server.call(self._listed_as, arguments, seconds))
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(work), seconds + 1.0)
        except asyncio.TimeoutError:  # noqa: UP041  # another class in Python 3.10
            raise ToolTimeout from None
        text = _shown(result)
        if result.is_error:
            raise ToolError(text)
        return text


def mcp_tools(servers: Sequence[str], taken: Collection[str] = ()) -> list[Tool]:
    """The tools of all servers, which are started. Names that two have, or that are `taken`, begin with the server's."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise fail(
            "C001",
            "tools",
            f"environment.tools.mcp needs the package mcp: {error}.",
            fix="pip install 'mcp>=2'",
        ) from error
    made = [Server(each) for each in servers]
    started = [_in_background(each.start()) for each in made]
    atexit.register(_leave, made)
    for work in started:
        work.result()
    listed = [(server, each) for server in made for each in server.listed]
    count = Counter([*taken, *(each.name for _, each in listed)])
    names = Counter(server.name for server in made)
    tools: list[Tool] = []
    for server, each in listed:
        prefix = f"{server.name}{made.index(server) + 1 if names[server.name] > 1 else ''}_"
        tools.append(McpTool(server, each, each.name if count[each.name] == 1 else prefix + each.name))
    return tools


def _leave(servers: Sequence[Server]) -> None:
    """Let servers end by themselves when the worker ends, for a moment. Those that do not are killed with it."""
    for work in [_in_background(each.stop()) for each in servers]:
        with contextlib.suppress(Exception):
            work.result(_LEAVE_S)


class Server:
    """A server, connected to as long as it is there. All methods run in the background loop."""

    def __init__(self, given: str):
        self._given, self._said = given, bytearray()
        self.listed: list[Any] = []  # its tools
        self.name = "server"
        self._connection: _Connection | None = None
        self._attempt: asyncio.Task[None] | None = None  # to connect again
        self._failures, self._again_at = 0, 0.0
        self._unanswered = 0

    async def start(self) -> None:
        """Connect and list the tools; C001 by name if that fails."""
        try:
            self._connection = _Connection(self._transport())
            await asyncio.wait_for(self._connection.opened, _START_S)
            self.listed = await asyncio.wait_for(self._list(), _START_S)
        except BaseException as error:
            if self._connection is not None:
                self._connection.close()
            if not isinstance(error, Exception):
                raise
            raise self._refused(error) from error
        if not self.listed:
            raise self._refused(ValueError("it has no tools"))
        info = self._connection.client.server_info
        self.name = re.sub(r"\W+", "_", info.name if info is not None else "").strip("_") or "server"

    async def stop(self) -> None:
        """Let go of the server, and wait until it is gone."""
        if self._connection is not None:
            await self._connection.left()

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        """The result of a call. ToolError if the server is gone, which the next call tries to repair."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, REQUEST_TIMEOUT

        until = time.monotonic() + seconds
        connection = await self._connected(seconds)
        try:
            left_s = max(0.001, until - time.monotonic())
            result = await connection.client.call_tool(name, arguments, read_timeout_seconds=left_s)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                self._unanswered += 1
                if self._unanswered >= _UNANSWERED:
                    self._lost(connection)
                raise ToolTimeout from None
            if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):  # the latter: its session is over
                self._lost(connection)
                raise ToolError(_GONE) from error
            raise ToolError(describe(error)) from error
        except Exception as error:  # of the transport, or a result that is not as announced
            if connection.ended:
                self._lost(connection)
            raise ToolError(describe(error)) from error
        self._unanswered = 0
        return result

    async def _connected(self, seconds: float) -> _Connection:
        """The connection, made again if it was lost; ToolError if that fails, takes longer, or is not tried yet."""
        if self._connection is not None and self._connection.ended:
            self._lost(self._connection)
        if self._connection is not None:
            return self._connection
        if self._attempt is None or self._attempt.done():
            if self._failures >= _ATTEMPTS or time.monotonic() < self._again_at:
                raise ToolError(_GONE)
            self._attempt = asyncio.ensure_future(self._connect())
        # One attempt for all calls that wait. It goes on when a call has no more time for it.
        done, _ = await asyncio.wait([self._attempt], timeout=seconds)
        if not done or self._connection is None:
            raise ToolError(_GONE)
        return self._connection

    async def _connect(self) -> None:
        connection = _Connection(self._transport())
        try:
            await asyncio.wait_for(asyncio.shield(connection.opened), _START_S)
        except Exception:
            connection.close()
            self._failures += 1
            self._again_at = time.monotonic() + min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**self._failures)
        else:
            self._connection, self._failures, self._unanswered = connection, 0, 0

    def _lost(self, connection: _Connection) -> None:
        if self._connection is connection:
            self._connection = None
        connection.close()

    async def _list(self) -> list[Any]:
        assert self._connection is not None
        listed: list[Any] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self._connection.client.list_tools(cursor=cursor)
            listed += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return listed

    def _transport(self) -> Any:
        from mcp.client.streamable_http import streamable_http_client

        if re.match(r"https?://", self._given):
            return streamable_http_client(self._given)
        return self._started()

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[Any]:
        """A server's process, as a transport of the mcp package."""
        from mcp import StdioServerParameters, stdio_client

        command = shlex.split(self._given)
        if not command or shutil.which(command[0]) is None:
            raise FileNotFoundError(f"there is no program {''.join(command[:1])!r}")
        starter = ["-I", "-S", "-c", _STARTER, str(os.getpid()), *command]
        # The user's own program has the user's variables, where keys of services are.
        parameters = StdioServerParameters(command=sys.executable, args=starter, env=dict(os.environ))
        read, write = os.pipe()
        self._said.clear()
        threading.Thread(target=_keep_tail, args=(read, self._said), daemon=True).start()
        with open(write, "w") as errors:
            async with stdio_client(parameters, errlog=errors) as streams:
                yield streams

    def _refused(self, error: Exception) -> ShardproofError:
        said = printable(bytes(self._said).decode(errors="replace").strip().rpartition("\n")[2], 300)
        why = describe(_cause(error)) + (f" (it said: {said})" if said else "")
        shown = without_secrets(self._given)
        return fail(
            "C001",
            "tools",
            f"environment.tools.mcp: server {shown!r} cannot be used: {why}.",
            fix="check that the command starts an MCP server on its stdin and stdout, or that the URL is that of a "
            "server's streamable HTTP endpoint, such as http://127.0.0.1:8000/mcp",
        )


class _Connection:
    """A client of the mcp package, entered and left by one task, as it demands."""

    def __init__(self, transport: Any):
        from mcp import Client

        self.client = Client(transport, read_timeout_seconds=_START_S)
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._task = asyncio.ensure_future(self._hold())

    @property
    def ended(self) -> bool:
        return self._task.done()

    def close(self) -> None:
        """Let go of the server; a process that was started for it is ended."""
        self._over.set()
        if not self.opened.done() or self.opened.exception() is not None:
            self._task.cancel()

    async def left(self) -> None:
        """Close, and wait for the end."""
        self.close()
        await asyncio.wait([self._task])

    async def _hold(self) -> None:
        try:
            async with self.client:
                self.opened.set_result(None)
                await self._over.wait()
        except BaseException as error:
            if not self.opened.done():
                problem = error if isinstance(error, Exception) else ConnectionError("it was given up")
                self.opened.set_exception(problem)
                self.opened.exception()  # so that nobody is told of an error that nobody waits for


def _cause(error: BaseException) -> BaseException:
    """The first error inside of groups of errors, which say nothing themselves."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return error


def _keep_tail(read: int, tail: bytearray) -> None:
    with open(read, "rb", buffering=0) as stream:
        while data := stream.read(2**12):
            tail += data
            del tail[:-_TAIL_BYTES]


def _shown(result: Any) -> str:
    """A result as text. Images and sounds are named, not shown."""
    parts = []
    for each in result.content:
        if each.type == "text":
            parts.append(as_text(each.text))
        elif each.type == "resource" and hasattr(each.resource, "text"):
            parts.append(as_text(each.resource.text))
        elif each.type in ("resource", "resource_link"):
            uri = each.resource.uri if each.type == "resource" else each.uri
            parts.append(f"[not shown: {as_text(str(uri))}]")
        else:
            parts.append(f"[not shown: {each.type} of type {as_text(each.mime_type)}]")
    if not parts and result.structured_content is not None:
        parts.append(as_text(result.structured_content))
    return "\n".join(parts)


def _in_background(work: Coroutine[Any, Any, _T]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, _loop())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop
