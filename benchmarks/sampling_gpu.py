"""What settings of sampling cost on one GPU: milliseconds of a decoding step of the embedded engine, by setting and rows.

    python benchmarks/sampling_gpu.py --json sampling.json

The shape of Qwen3-1.7B in bfloat16, prompts of 128 tokens, completions of equal lengths. Each setting is run twice on the
same engine and the second run counts: graphs are there then. What one token takes, prompts included, is subtracted. `mixed` gives each row another of the settings. The stop string
is one that is never completed, with a last letter that many tokens have.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import shardproof as sp
from benchmarks.gpu_cases import make_prompts
from benchmarks.gpu_ours import join_group
from benchmarks.gpu_timing import synchronize
from benchmarks.gpu_workload import dense_config, make_tokenizer
from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.stop_strings import StopStrings
from shardproof.rollout.trajectory import Trajectory

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.95": {"top_p": 0.95},
    "top_k=50, top_p=0.95": {"top_k": 50, "top_p": 0.95},
    "min_p=0.05": {"min_p": 0.05},
    "repetition_penalty=1.1": {"repetition_penalty": 1.1},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "min_new_tokens": {"stop_ids": (3, 5), "min_new_tokens": 10**9},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "stop string": {"stop": "t1 is never followed by 7"},
}
SORTED = "top_k=50, top_p=0.95, sorted"


def sampling_of(tokens: int, tokenizer: Any, given: dict[str, Any]) -> Sampling:
    settings = dict(given)
    if "stop" in settings:
        settings["stop"] = StopStrings([settings["stop"]], tokenizer)
    if "min_new_tokens" in settings:
        settings["min_new_tokens"] = tokens
    return Sampling(tokens, **settings)


def step_ms(engine: Any, requests: list[Request], sampling: Sampling, device: str) -> float:
    tokens, seconds = sampling.max_new_tokens, dict[int, float]()
    for num in (tokens, 1, tokens, 1):
        limited = [replace(each, max_new_tokens=num) for each in requests]
        synchronize(device)
        started = time.perf_counter()
        found = generate(engine, limited, sampling)
        synchronize(device)
        seconds[num] = time.perf_counter() - started
        assert all(each.num_sampled == num for each in found)
    return 1e3 * (seconds[tokens] - seconds[1]) / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument(
        "--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="SETTING"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this out")
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)
    join_group()
    config = dense_config(options.tiny)
    tokenizer = make_tokenizer(config.vocab_size)
    policy = sp.load(sp.RandomInit(config), param_dtype=torch.bfloat16, device=options.device, progress=False)
    found: dict[str, dict[str, float]] = {}
    for rows in options.rows:
        engine = EmbeddedEngine(policy, rows)
        engine.load_weights(sp.WeightStream(policy, torch.bfloat16, digests=False))
        prompts = make_prompts(rows, options.prompt, config.vocab_size)
        requests = [Request(Trajectory.of_prompt(tuple(p)), row) for row, p in enumerate(prompts)]
        several = {
            name: sampling_of(options.steps, tokenizer, given)
            for name, given in SETTINGS.items()
            if name in options.only
        }
        for name, sampling in several.items():
            found.setdefault(name, {})[str(rows)] = step_ms(engine, requests, sampling, options.device)
            print(f"{rows} rows, {name}: {found[name][str(rows)]:.3f} ms", flush=True)
        if len(several) < len(SETTINGS):
            continue
        own = [replace(each, stop=None, stop_ids=(), min_new_tokens=0) for each in several.values()]
        mixed = [replace(r, sampling=own[row % len(own)]) for row, r in enumerate(requests)]
        found.setdefault("mixed", {})[str(rows)] = step_ms(engine, mixed, several["none"], options.device)
        if engine.decoder is not None:
            engine.decoder.release()
            engine.decoder.ways.ranks = False
            sampling = several["top_k=50, top_p=0.95"]
            found.setdefault(SORTED, {})[str(rows)] = step_ms(engine, requests, sampling, options.device)
            engine.decoder.release()
    header = ["setting", *(f"{rows} rows, ms" for rows in options.rows)]
    print_table(
        "milliseconds of a step",
        header,
        [[name, *(f"{row[str(r)]:.3f}" for r in options.rows)] for name, row in found.items()],
    )
    settings = {"rows": options.rows, "steps": options.steps, "prompt": options.prompt}
    if options.json is not None:
        write_json(options.json, environment, {"settings": settings, "step_ms": found})


if __name__ == "__main__":
    main()
