"""A judge over HTTP that does what the text it is asked about says, as good and bad servers do."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOLD = re.compile(r"<<(.*?)>>", re.DOTALL)


class JudgeServer(ThreadingHTTPServer):
    """Counts what it is asked; `most_at_once` is how many requests were there at the same time."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.paths: list[str] = []
        self.seen: Counter[str] = Counter()  # of each text, how often it was asked about
        self.now = self.most_at_once = 0
        self.lock, self.over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that have gone are no news."""


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["messages"][-1]["content"]
        told = TOLD.findall(text)[-1]
        with server.lock:
            server.asked.append(asked)
            server.headers.append(dict(self.headers))
            server.times.append(time.monotonic())
            server.paths.append(self.path)
            server.seen[told] += 1
            seen = server.seen[told]
            server.now += 1
            server.most_at_once = max(server.most_at_once, server.now)
        try:
            self._obey(told, seen)
        finally:
            with server.lock:
                server.now -= 1

    def _obey(self, told: str, seen: int) -> None:
        words = told.split()
        if words[0] == "wait":
            self.server.over.wait(float(words[1]))
        elif words[0] == "busy" and seen <= int(words[1]):
            return self._send(429, b"slow down", {"Retry-After": words[2]} if len(words) > 2 else {})
        elif words[0] == "down" and seen <= int(words[1]):
            return self._send(503, b"")
        elif words[0] == "hang":
            self.server.over.wait(1000)
            return None
        elif words[0] == "cut":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            self.close_connection = True
            return None
        elif words[0] == "noise":
            self.wfile.write(b"\x00\x01 not HTTP at all\r\n\r\n")
            self.close_connection = True
            return None
        elif words[0] == "moved":
            return self._send(307, b"gone", {"Location": "https://elsewhere/v1/chat/completions"})
        elif words[0] == "html":
            return self._send(200, b"<html>it works</html>")
        elif words[0] == "error":
            return self._send(200, b'{"error": "no credit"}')
        elif words[0] == "deep":
            return self._send(200, b"[" * 100_000)
        elif words[0] == "refuse":
            key = self.headers.get("Authorization", "")
            return self._send(401, f"{''.join(words[1:])}wrong key: {key}".encode())
        said: Any = told.partition("say ")[2] or "Fine. Score: 7"
        if words[0] == "parts":  # as services whose models think answer
            said = [{"type": "thinking", "thinking": []}, {"type": "text", "text": said}]
        elif words[0] == "limit":
            said = told.partition("say ")[2]
        elif words[0] == "silence":
            said = [{"type": "thinking", "thinking": []}]
        body: dict[str, Any] = {"choices": [{"message": {"content": said}}], "usage": {"total_tokens": 30}}
        if words[0] == "chunked":
            data = json.dumps(body).encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for part in (data[:10], data[10:]):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True
            return None
        if words[0] == "unsized":
            data = json.dumps(body).encode()
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + data[:10])
            self.server.over.wait(0.1)  # so that the rest comes by itself
            self.wfile.write(data[10:])
            self.close_connection = True
            return None
        if words[0] == "hints":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        if words[0] == "limit":  # as many tokens as it may, and maybe no text among them
            body["choices"][0] = {"message": {"content": said} if said else {}, "finish_reason": "length"}
        if words[0] == "usage":
            body["usage"] = json.loads(words[1])
        return self._send(200, json.dumps(body).encode())

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass
