"""Servers with vLLM's routes whose completions take the time that they are told to take, and no computation.

A server decodes `slots` completions side by side, one token each every `token_s`; others wait in line. Lengths come from
the requests' seeds. A pause ends everything with the tokens so far; what is asked again later, with those tokens at the end
of the prompt, gets the rest of its length. All servers of a process share this memory, as a completion may go on elsewhere.

    python benchmarks/slow_servers.py '{"num": 4, "slots": 8, "token_s": 0.05, ...}'

prints one address per server and runs until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web

_TOKENS = range(2, 14)  # of the tiny model: everything but padding and the end
_END = 1
_LOGPROB = -math.log(len(_TOKENS))


@dataclass(frozen=True)
class Timing:
    """How many servers there are, and how slow."""

    num: int = 1
    slots: int = 16
    token_s: float = 0.05
    start_s: float = 0.02  # before the first token, whenever a prompt is read
    usual: int = 24  # tokens
    longest: int = 24
    long_share: float = 0.0  # of completions; their lengths lie between the usual and the longest

    def length(self, seed: int) -> int:
        """How long a completion is: near the usual length, or, for a few, up to the longest."""
        draw = random.Random(seed)
        if draw.random() < self.long_share:
            return draw.randint((self.usual + self.longest) // 2, self.longest)
        return draw.randint(self.usual // 2, self.usual) if self.long_share else self.usual


@dataclass
class Running:
    """A request."""

    prompt: tuple[int, ...]
    left: int  # tokens until its end
    most: int  # tokens that it asks for
    draw: random.Random
    ended: asyncio.Future[tuple[list[int], str, str]]  # tokens, why it ended, the weights' label
    started: float = 0.0
    timer: asyncio.TimerHandle | None = None


# Tokens that are left of completions that were interrupted, by the tokens that they have.
Unfinished = defaultdict[tuple[int, ...], list[int]]


@dataclass
class Server:
    """One server."""

    timing: Timing
    unfinished: Unfinished
    label: str = "default"
    marks: int = 0
    version: int = -1
    paused: bool = False
    waiting: deque[Running] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    busy_s: float = 0.0  # summed over slots
    drawn: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        if request.path == "/inference/v1/generate":
            return web.json_response(await self._generate(body))
        return web.json_response(self._control(request.path, body))

    def _control(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/update_weight_version":
            self.label, self.marks = body["new_version"], self.marks + 1
        elif path == "/collective_rpc":
            return {"results": [self._rpc(body["method"])]}
        elif path == "/pause":
            self._pause()
        elif path == "/resume":
            self.paused = False
            self._fill()
        elif path == "/update_weights":
            self.version = body["update_info"]["address"]["version"]
        elif path == "/stats":
            return {"busy_s": self.busy_s, "drawn": self.drawn, "time": time.time()}
        return {"success": True}

    def _rpc(self, method: str) -> dict[str, Any]:
        if method == "shardproof_facts":
            kind = {"backend": "shardproof", "dtype": "float32", "logprobs_mode": "processed_logprobs"}
            return {"vllm": "0.32.0", "lora": False, "config": {}, "instance": str(id(self)), **kind}
        if method == "shardproof_report":
            return {"version": self.version, "problems": [], "seconds": {}, "applied": True}
        return {"label": self.label, "marks": self.marks}

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        params, prompt = body["sampling_params"], tuple(body["token_ids"])
        if "prompt_logprobs" in params:  # the canary; another value for each version
            value = -2.0 - 0.01 * self.version
            rows = [None, *({str(token): {"logprob": value}} for token in prompt[1:])]
            return {"choices": [], "prompt_logprobs": rows}
        interrupted = self.unfinished.get(prompt)
        left = interrupted.pop() if interrupted else self.timing.length(params["seed"])
        ended = asyncio.get_running_loop().create_future()
        running = Running(prompt, left, params["max_tokens"], random.Random(params["seed"]), ended)
        self.waiting.append(running)
        self._fill()
        tokens, reason, label = await ended
        content = [{"token_id": token, "logprob": _LOGPROB} for token in tokens]
        spans = [{"version": label, "start": 0, "end": len(tokens)}] if tokens else []
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "weight_versions": spans}
        return {"choices": [choice | {"logprobs": {"content": content}}]}

    def _fill(self) -> None:
        """Give free slots to those that wait."""
        loop = asyncio.get_running_loop()
        while self.waiting and len(self.running) < self.timing.slots and not self.paused:
            running = self.waiting.popleft()
            running.started = loop.time()
            seconds = self.timing.start_s + min(running.left, running.most) * self.timing.token_s
            running.timer = loop.call_later(seconds, self._finish, running)
            self.running.append(running)

    def _finish(self, running: Running) -> None:
        num, ends = min(running.left, running.most), running.left <= running.most
        self._end(running, num, "stop" if ends else "length")
        self._fill()

    def _pause(self) -> None:
        self.paused = True
        now = asyncio.get_running_loop().time()
        for running in list(self.running):
            assert running.timer is not None
            running.timer.cancel()
            num = int(max(now - running.started - self.timing.start_s, 0.0) / self.timing.token_s)
            self._end(running, min(num, running.left - 1, running.most - 1), "abort")
        for running in self.waiting:
            self.unfinished[running.prompt].append(running.left)
            running.ended.set_result(([], "abort", self.label))
        self.waiting.clear()

    def _end(self, running: Running, num: int, reason: str) -> None:
        self.running.remove(running)
        self.busy_s += asyncio.get_running_loop().time() - running.started
        self.drawn += num
        tokens = [running.draw.choice(_TOKENS) for _ in range(num)]
        if reason == "stop":
            tokens[-1] = _END
        if reason == "abort":
            self.unfinished[running.prompt + tuple(tokens)].append(running.left - num)
        if not running.ended.done():
            running.ended.set_result((tokens, reason, self.label))


async def serve(timing: Timing) -> None:
    """Run the servers until standard input is closed."""
    unfinished: Unfinished = defaultdict(list)
    runners = []
    for _ in range(timing.num):
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", Server(timing, unfinished).answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        runners.append(runner)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for runner in runners:
        await runner.cleanup()


def described(timing: Timing) -> str:
    """What a process of servers is started with."""
    return json.dumps(asdict(timing))


if __name__ == "__main__":
    asyncio.run(serve(Timing(**json.loads(sys.argv[1]))))
