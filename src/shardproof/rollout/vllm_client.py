"""A small HTTP client for a vLLM server: over TCP or a Unix socket, every call with a deadline."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from shardproof.dist.deadline import Deadline as Deadline  # what every call takes

GENERATE = "/inference/v1/generate"  # completions for token ids
_ERROR_CHARACTERS = 400


class Unreachable(Exception):
    """Nobody listens, the connection broke, or no answer came in time."""


class Refused(Exception):
    """The server answered with an error. `status` is HTTP's."""

    def __init__(self, status: int, text: str):
        self.status = status
        super().__init__(text)


class VllmClient:
    """Calls to one server. `url` is http://host:port or unix:/path; `key_variable` names what holds its API key.

    Behind a gateway, http://host/path may be where the server's own paths begin; of what clients of OpenAI's take, which
    ends with /v1, the rest counts.
    """

    def __init__(self, url: str, key_variable: str | None = None):
        self.url = url
        below = "" if url.startswith("unix:") else urlsplit(url).path
        self._below = below.rstrip("/").removesuffix("/v1").rstrip("/")
        self._headers: dict[str, str] = {}
        if key_variable is not None:
            self._headers["Authorization"] = f"Bearer {os.environ.get(key_variable, '')}"

    def get(self, path: str, deadline: Deadline) -> Any:
        return self._call("GET", path, None, deadline)

    def post(self, path: str, body: Any, deadline: Deadline) -> Any:
        return self._call("POST", path, body, deadline)

    def rpc(self, method: str, deadline: Deadline, *args: str) -> list[Any]:
        """The result of a worker's method, from every worker."""
        return self.post("/collective_rpc", {"method": method, "args": args}, deadline)["results"]

    def is_up(self, seconds: float = 1.0) -> bool:
        """Whether the server answers its health check in time."""
        try:
            self.get("/health", Deadline(seconds))
        except (Unreachable, Refused):
            return False
        return True

    def _call(self, method: str, path: str, body: Any, deadline: Deadline) -> Any:
        with self._connection(deadline) as connection:
            return _exchange(connection, method, self._below + path, body, deadline, self._headers)

    @contextlib.contextmanager
    def _connection(self, deadline: Deadline) -> Iterator[http.client.HTTPConnection]:
        """A connection for a few calls; whatever breaks it is one kind of error."""
        connection = self._connect()
        try:
            connection.timeout = deadline.left
            yield connection
        except TimeoutError as error:
            raise Unreachable(f"no answer from {self.url} within {deadline.seconds:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self.url.startswith("unix:"):
            return _UnixConnection(self.url.removeprefix("unix:"))
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str):
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any,
    deadline: Deadline,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """One request and its answer."""
    payload = None if body is None else json.dumps(body).encode()
    headers = {**(headers or {}), **({"Content-Type": "application/json"} if payload is not None else {})}
    if connection.sock is not None:
        connection.sock.settimeout(deadline.left)
    connection.request(method, path, payload, headers)
    response = connection.getresponse()
    raw = response.read()
    if response.status != 200:
        raise Refused(response.status, error_text(raw) or response.reason)
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return raw.decode(errors="replace")


def error_text(raw: bytes) -> str:
    """The message of vLLM's error object, or the beginning of whatever came."""
    try:
        data = json.loads(raw)
        found = data.get("error", data.get("detail", data))
        text = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        text = raw.decode(errors="replace")
    return str(text).strip()[:_ERROR_CHARACTERS]
