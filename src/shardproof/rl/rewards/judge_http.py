"""One HTTP request with JSON, in an event loop and without other packages: all of it can be given up at any time."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_MOST_HEADERS, _MOST_BODY = 2**16, 2**22


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


async def post(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
    """Send the body as JSON and read the answer. OSError or ValueError if there is none that can be read."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if is_tls else 80)
    reader, writer = await asyncio.open_connection(
        host, port, ssl=_trusted() if is_tls else None, limit=_MOST_HEADERS
    )
    try:
        data = json.dumps(body).encode()
        target = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
        lines = {
            "Host": parts.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Content-Length": str(len(data)),
            "Connection": "close",
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data)
        await writer.drain()
        return await _read(reader)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ValueError("the server's answer ended too early, or is too long") from error
    finally:
        # Not close(), which sends the rest of the request first: a server that reads nothing would never let it end.
        writer.transport.abort()


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The machine's certificates; to read them takes long enough to hold up all other requests."""
    return ssl.create_default_context()


async def _read(reader: asyncio.StreamReader) -> Answer:
    status, headers = await _head(reader)
    while 100 <= status < 200:  # the answer is still to come
        status, headers = await _head(reader)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _chunks(reader)
    elif headers.get("content-length", "").isdigit():
        length = int(headers["content-length"])
        if length > _MOST_BODY:
            raise ValueError("the server's answer is too long")
        body = await reader.readexactly(length)
    else:
        body = await _until_closed(reader)
    return Answer(status, headers, body)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The next status, and the headers that follow it."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = head[0].split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
        raise ValueError("the server did not answer in HTTP")
    headers = {}
    for line in head[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return int(words[1]), headers


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while piece := await reader.read(2**16):
        body += piece
        if len(body) > _MOST_BODY:
            raise ValueError("the server's answer is too long")
    return bytes(body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        if size == 0:
            return bytes(body)
        if len(body) + size > _MOST_BODY:
            raise ValueError("the server's answer is too long")
        body += await reader.readexactly(size)
        await reader.readexactly(2)
