"""A stand-in for a vLLM server: the routes that a run uses, on real sockets, from a thread; and it fails as it is told.

Its "weights" are a number. A token depends on the weights, the seed and its place alone, and its log-prob tells the
weights, so that a test can recompute every answer. Nothing sleeps: with `hold_back`, completions grow only by `draw`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from aiohttp import web

VOCAB_SIZE = 1000
LIMIT_S = 20.0  # for whatever a test waits for; nothing comes near it unless something is broken
_CHANGED = threading.Condition()  # of all servers, so that a test can wait for what any of them does


def token_of(weights: int, seed: int, place: int) -> int:
    """The token that these weights draw at a place of a completion."""
    return (seed * 7919 + weights * 104729 + place * 15485863) % VOCAB_SIZE


def logprob_of(weights: int, token: int) -> float:
    """Tells the weights: -(weights + 1), less a part that tells the token."""
    return -(weights + 1) - token / (2 * VOCAB_SIZE)


def canary_logprobs(weights: int, tokens: Sequence[int]) -> list[float]:
    """What the server says about a prompt's tokens after the first."""
    return [logprob_of(weights, token) for token in tokens[1:]]


@dataclass
class Running:
    """A request that the server is at."""

    body: dict[str, Any]
    ended: asyncio.Future[str]  # with the reason
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    @property
    def params(self) -> dict[str, Any]:
        return self.body["sampling_params"]


class FakeVllm:
    """A server. `url` is its address; use it as a context manager, or call `close`."""

    def __init__(
        self,
        socket: Path | None = None,
        vllm: str = "0.32.0",
        facts: dict[str, Any] | None = None,
        host: str = "127.0.0.1",
    ):
        self.socket, self.vllm, self.host, self.port = socket, vllm, host, 0
        self.name = ""  # whatever a test calls it
        self.facts = {"vllm": vllm, "lora": False, "config": {}, **(facts or {})}
        self.calls: list[str] = []  # paths, in the order in which they came
        self.bodies: list[dict[str, Any]] = []  # of requests to generate
        self.most_at_once = 0  # requests to generate
        self.disconnected = 0  # requests that their sender gave up
        # How it fails. By path: (status, text) to answer with, and paths that get no answer.
        self.refuses: dict[str, tuple[int, str]] = {}
        self.refuses_seeds: dict[int, tuple[int, str]] = {}  # of requests to generate
        self.hangs: set[str] = set()
        self.dies_at: str | None = None  # a path
        # For the next requests to generate, one each: "die", "half", "garbage", "hang", or (status, text).
        self.next_faults: deque[Any] = deque()
        self.keeps_weights = False  # takes every update, and goes on with what it has
        self.held_back = False
        self._born()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-vllm", daemon=True)
        self._thread.start()
        self._do(self._listen)

    def _born(self) -> None:
        """As it is after a start."""
        self.label: str | None = "default" if self.says_versions else None
        self.marks = 0
        self.weights = -1
        self.incoming: int | None = None
        self.adapters: dict[str, int] = {}
        self.paused = False
        self.running: list[Running] = []

    @property
    def says_versions(self) -> bool:
        return tuple(map(int, self.vllm.split(".")[:2])) >= (0, 32)

    @property
    def url(self) -> str:
        return f"unix:{self.socket}" if self.socket is not None else f"http://{self.host}:{self.port}"

    # What a test does with it, from its own thread.

    def serve(self, run: str, version: int) -> None:
        """Have the weights of a version, and its label, as after a sync."""
        self._do(self._serve, run, version)

    def mark(self, label: str) -> None:
        """Have a label."""
        self._do(self._mark, label)

    def do(self, path: str, **body: Any) -> Any:
        """What a route other than the one for completions does and answers."""
        return self._do(self._control, path, body)

    def hold_back(self) -> None:
        """From now on, draw only what `draw` and `go_on` say."""
        self._do(self._hold_back, True)

    def go_on(self) -> None:
        """Answer everything at once, from now on."""
        self._do(self._hold_back, False)

    def draw(self, num: int = 1) -> None:
        """Draw so many tokens for each request that it is at."""
        self._do(self._draw_all, num)

    def finish(self, place: int = 0) -> None:
        """Draw the rest of one of the requests that it is at."""
        self._do(lambda: self._draw(self.running[place]))

    def kill(self) -> None:
        """Die: connections break, nobody listens, nothing is remembered."""
        self._do(self._die)

    def revive(self) -> None:
        """Start again at the same address, with the weights of the beginning."""
        self._do(self._listen)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true that changes with what servers are asked."""
        with _CHANGED:
            if not _CHANGED.wait_for(condition, LIMIT_S):
                raise AssertionError(f"not within {LIMIT_S:g} s; it was asked {self.calls[-10:]}")

    def until_at(self, num: int) -> None:
        """Wait until it is at so many requests."""
        self.until(lambda: len(self.running) == num)

    def close(self) -> None:
        if self._thread.is_alive():
            self._do(self._die)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def __enter__(self) -> FakeVllm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, action: Callable[..., Any], *args: Any) -> Any:
        """Call something in the server's thread, and wait for it."""
        done: Future[Any] = Future()

        async def run() -> None:
            try:
                found = action(*args)
                done.set_result(await found if asyncio.iscoroutine(found) else found)
            except BaseException as error:
                done.set_exception(error)
            self._tell()

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return done.result(LIMIT_S)

    def _tell(self) -> None:
        with _CHANGED:
            _CHANGED.notify_all()

    # The server.

    async def _listen(self) -> None:
        self._born()
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0, access_log=None)
        await self._runner.setup()
        if self.socket is not None:
            await web.UnixSite(self._runner, str(self.socket)).start()
        else:
            site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
            await site.start()
            self.port = self._runner.addresses[0][1]

    async def _die(self) -> None:
        if self._runner.server is None:
            return  # it is dead
        for site in list(self._runner.sites):
            await site.stop()
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        if self.socket is not None:
            self.socket.unlink(missing_ok=True)
        self._born()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(path)
        self._tell()
        if self.dies_at == path:
            self.dies_at = None
            self._loop.create_task(self._die())
            await asyncio.Event().wait()
        if path in self.hangs:
            await asyncio.Event().wait()
        if path in self.refuses:
            status, text = self.refuses[path]
            return web.json_response({"error": {"message": text}}, status=status)
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        if path == "/inference/v1/generate":
            return await self._generate(request, body)
        said = self._control(path, body)
        self._tell()
        if said is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(said)

    def _control(self, path: str, body: dict[str, Any]) -> Any:
        """What a route other than the one for completions answers; None if there is none."""
        if path == "/weight_info" and self.says_versions:
            return {"weight_version": self.label}
        if path == "/update_weight_version" and self.says_versions:
            self._mark(body["new_version"])
        elif path == "/collective_rpc":
            return {"results": [self._rpc(body["method"], *body.get("args", ()))]}
        elif path == "/pause":
            self.paused = True
            for running in list(self.running):
                self._end(running, "abort")
        elif path == "/resume":
            self.paused = False
            self._draw_all(None)
        elif path == "/update_weights":
            self.incoming = int(body["update_info"].get("version", self.weights + 1))
        elif path == "/finish_weight_update":
            if self.incoming is not None and not self.keeps_weights:
                self.weights = self.incoming
        elif path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = int(body["lora_path"].rpartition("-")[2])
        elif path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
        elif path not in ("/health", "/start_weight_update", "/reset_prefix_cache", "/sleep", "/wake_up"):
            return None
        return {"success": True}

    def _rpc(self, method: str, *args: str) -> Any:
        if method == "shardproof_facts":
            return self.facts
        if method == "shardproof_report":
            return {"version": self.incoming, "problems": [], "seconds": {}}
        if method == "shardproof_mark":
            self._mark(args[0])
        return {"label": self.label, "marks": self.marks}

    def _mark(self, label: str) -> None:
        self.label, self.marks = label, self.marks + 1

    def _serve(self, run: str, version: int) -> None:
        self.weights, self.incoming = version, version
        self._mark(f"{run}/{version}")

    # Completions.

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "prompt_logprobs" in body["sampling_params"]:
            return web.json_response(self._canary(body))
        self.bodies.append(body)
        fault = self.refuses_seeds.get(body["sampling_params"]["seed"])
        if fault is None and self.next_faults:
            fault = self.next_faults.popleft()
        if isinstance(fault, tuple):
            return web.json_response({"error": {"message": fault[1]}}, status=fault[0])
        if fault == "garbage":
            return web.Response(text="<html>", content_type="text/html")
        if "model" in body and body["model"] not in self.adapters:
            return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
        running = Running(body, self._loop.create_future())
        self.running.append(running)
        self.most_at_once = max(self.most_at_once, len(self.running))
        self._tell()
        if fault == "die":
            await self._die()
        if not self.held_back and not self.paused and fault != "hang":
            self._draw(running)
        try:
            reason = await running.ended
        except asyncio.CancelledError:
            self.disconnected += 1
            if running in self.running:
                self.running.remove(running)
            self._tell()
            raise
        return await self._send(request, self._choice(running, reason), half=fault == "half")

    async def _send(self, request: web.Request, choice: dict[str, Any], half: bool) -> web.StreamResponse:
        raw = json.dumps({"request_id": "x", "choices": [choice]}).encode()
        if not half:
            return web.Response(body=raw, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Length": str(len(raw))})
        await response.prepare(request)
        await response.write(raw[: len(raw) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    def _choice(self, running: Running, reason: str) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": logprob}
            for token, logprob in zip(running.tokens, running.logprobs, strict=True)
        ]
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "token_ids": running.tokens}
        choice["logprobs"] = {"content": content}
        if self.says_versions:
            spans, start = [], 0
            for label, group in groupby(running.labels):
                end = start + len(list(group))
                spans.append({"version": label, "start": start, "end": end})
                start = end
            choice["weight_versions"] = spans
        return choice

    def _canary(self, body: dict[str, Any]) -> dict[str, Any]:
        weights = self.adapters.get(body.get("model", ""), self.weights)
        tokens = body["token_ids"]
        rows = [None] + [
            {str(token): {"logprob": value}}
            for token, value in zip(tokens[1:], canary_logprobs(weights, tokens), strict=True)
        ]
        return {"choices": [], "prompt_logprobs": rows}

    def _hold_back(self, held: bool) -> None:
        self.held_back = held
        self._draw_all(None)

    def _draw_all(self, num: int | None) -> None:
        """Draw for all requests: `num` tokens, or with None all that are left, unless they are held back."""
        if num is None and self.held_back:
            return
        for running in list(self.running):
            self._draw(running, num)

    def _draw(self, running: Running, num: int | None = None) -> None:
        """Draw `num` tokens, or all that are left, unless the server is paused; with the last, the answer is sent."""
        params = running.params
        weights = self.adapters.get(running.body.get("model", ""), self.weights)
        left = params["max_tokens"] - len(running.tokens)
        for _ in range(left if num is None else min(num, left)):
            if self.paused or running.ended.done():
                return
            token = token_of(weights, params["seed"], len(running.tokens))
            running.tokens.append(token)
            running.logprobs.append(logprob_of(weights, token))
            running.labels.append(self.label or "")
            if token in params["stop_token_ids"]:
                self._end(running, "stop")
        if len(running.tokens) == params["max_tokens"]:
            self._end(running, "length")

    def _end(self, running: Running, reason: str) -> None:
        if not running.ended.done():
            self.running.remove(running)
            running.ended.set_result(reason)
