"""The live page: a small server on this machine's loopback address that shows a run while it goes on."""

from __future__ import annotations

import errno
import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shardproof.errors import fail
from shardproof.report.page import data_of, page, policy
from shardproof.report.read import RunReader
from shardproof.report.summary import STALE_S

LOOPBACK = "127.0.0.1"
# A page of another site may make its own name lead to 127.0.0.1, and would then read what this server says: the browser
# still sends that name. Ports are not compared, so that a port forwarded by ssh may have another number.
_HOSTS = (LOOPBACK, "localhost")


class LiveRun:
    """A run folder and its newest data. A version names the state of the files."""

    def __init__(self, folder: Path):
        self._reader = RunReader(folder)
        self._lock = threading.Lock()
        self._version = ""
        self._data: dict[str, Any] = {}

    def current(self) -> tuple[str, dict[str, Any]]:
        """(the version, the data of the page); files are read only if they have changed."""
        with self._lock:
            state, now = self._reader.state(), time.time()
            run_is_late = self._is_late(now)
            version = hashlib.sha256(f"{state} {run_is_late}".encode()).hexdigest()[:16]
            if version != self._version:
                self._data = self._read(now)
                self._version = version
            return self._version, self._data

    def _read(self, now: float) -> dict[str, Any]:
        folder = self._reader.folder
        if self._data and not folder.is_dir():
            (run,) = self._data["runs"]
            note = f"{folder} was moved or removed; this page shows what it held."
            return {**self._data, "runs": [{**run, "notes": [note]}]}
        return data_of([self._reader.read(now)])

    def _is_late(self, now: float) -> bool:
        """Whether nothing was written for so long that the page says so."""
        age_s = self._reader.age_s(now)
        return age_s is not None and age_s > STALE_S


class WatchServer(ThreadingHTTPServer):
    """Serves the page of one run on the loopback address."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int):
        self.run = LiveRun(folder)
        self.title = folder.resolve().name
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE and error.errno != errno.EACCES:
                raise
            why = (
                "is in use" if error.errno == errno.EADDRINUSE else "cannot be opened without more privileges"
            )
            raise fail(
                "C001", "watch", f"--port={port}: this port {why}.", fix="leave --port out to get a free port"
            ) from error

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A tab that was closed while it was answered is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _host_of(header: str) -> str | None:
    """The host of a Host header, in lower case and without its port."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "shardproof", ""
    timeout = 30.0  # for a client that connects and says nothing

    def do_GET(self) -> None:
        if _host_of(self.headers.get("Host", "")) not in _HOSTS:
            return self._answer(403, "text/plain", b"This page answers requests to 127.0.0.1 only.\n")
        asked = urlsplit(self.path)
        if asked.path == "/":
            _, data = self.server.run.current()
            html = page(self.server.title, data, live=True)
            return self._answer(200, "text/html; charset=utf-8", html.encode("utf-8", "replace"))
        if asked.path == "/data.json":
            version, data = self.server.run.current()
            if parse_qs(asked.query).get("version") == [version]:
                return self._answer(304, "application/json", b"")
            answer = {"version": version, "data": data}
            text = json.dumps(answer, allow_nan=False, separators=(",", ":"))
            return self._answer(200, "application/json", text.encode())
        return self._answer(404, "text/plain", b"There is only one page here: /\n")

    def _refuse(self) -> None:
        self._answer(405, "text/plain", b"This page is for reading.\n")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A request per second is not worth a line."""
