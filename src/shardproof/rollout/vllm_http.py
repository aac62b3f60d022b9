"""Asynchronous calls to one vLLM server, over TCP or a Unix socket. aiohttp is imported when they are first needed."""

from __future__ import annotations

import json
from typing import Any

from shardproof.errors import fail
from shardproof.rollout.vllm_client import Refused, Unreachable, error_text

# Servers close connections that were idle for 5 s (vLLM's default). Ours must be gone before, or a request meets a
# connection that is just being closed.
_KEEP_ALIVE_S = 2.0
_CONNECT_S = 10.0


def import_aiohttp() -> Any:
    """The package; C001 if it is not installed."""
    try:
        import aiohttp
    except ImportError as error:
        message = "rollout.engine=vllm needs the package aiohttp, which is not installed."
        raise fail(
            "C001", "rollout", message, fix="pip install 'shardproof[vllm]', or aiohttp alone"
        ) from error
    return aiohttp


class AsyncClient:
    """Calls to one server, to be made and used in one event loop. `url` is http://host:port or unix:/path."""

    def __init__(self, url: str):
        self.url = url
        self._aiohttp = aiohttp = import_aiohttp()
        # Who calls bounds the number of connections.
        options: dict[str, Any] = {"limit": 0, "keepalive_timeout": _KEEP_ALIVE_S}
        if url.startswith("unix:"):
            connector = aiohttp.UnixConnector(url.removeprefix("unix:"), **options)
            self._base = "http://localhost"
        else:
            connector = aiohttp.TCPConnector(**options)
            self._base = url.rstrip("/")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Any) -> Any:
        return await self._call("POST", path, body)

    async def close(self) -> None:
        await self._session.close()

    async def _call(self, method: str, path: str, body: Any) -> Any:
        """The server's JSON; raises `Unreachable` or `Refused`. It is the caller who limits the time."""
        payload = None if body is None else json.dumps(body).encode()
        headers = {} if payload is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self._base + path, data=payload, headers=headers
            ) as response:
                raw = await response.read()
                status, reason = response.status, response.reason
        except (self._aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{self.url}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise Refused(status, error_text(raw) or reason or f"status {status}")
        try:
            return json.loads(raw)
        except ValueError as error:
            raise Unreachable(f"{self.url} answered with something that is not JSON") from error
