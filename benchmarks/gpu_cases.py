"""What benchmarks/gpu.py asks of engines: equal lengths, long tails, prompts; and how each is timed.

Every engine is measured by the same code. It is reached through a function that takes prompts and the number of tokens
that each completion must have, and returns how many it has.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

from benchmarks.gpu_timing import Row, Save, seconds_of
from benchmarks.gpu_workload import PROMPTS, ROWS, TAILS, dense_config

ENGINE_PARTS = (ROWS, TAILS, PROMPTS)
_WARM_STEPS = 4
_WARM_SHARE = 16  # long tails are shortened by this to warm up: an engine then meets every number of rows
Generate = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[int]]


def make_prompts(num: int, length: int, vocabulary: int) -> list[list[int]]:
    """Prompts of random tokens, all different, the same in every process."""
    draw = random.Random(length)
    return [[draw.randrange(1, vocabulary) for _ in range(length)] for _ in range(num)]


def tail_lengths(num: int, mean: int, longest: int) -> list[int]:
    """Geometric lengths, cut at the longest; one of them has it. The same in every process."""
    draw = random.Random(num)
    lengths = [min(longest, 1 + int(draw.expovariate(1 / (mean - 0.5)))) for _ in range(num)]
    lengths[lengths.index(max(lengths))] = longest
    return lengths


def most_rows(options: argparse.Namespace) -> int:
    """Completions that are drawn at a time in the largest of the cases."""
    return max(*options.row_counts, *options.tails, *(num for num, _ in options.prompt_cases))


def longest_sequence(options: argparse.Namespace) -> int:
    """Tokens of the longest prompt with its completion."""
    lengths = [options.prompt + options.row_steps, options.prompt + options.tail_longest]
    return max(*lengths, *(length + 1 for _, length in options.prompt_cases))


def measure_engine(
    generate: Generate, name: str, parts: Sequence[str], options: argparse.Namespace, save: Save
) -> None:
    """Save the rows of an engine's parts, one per case."""
    vocabulary = dense_config(options.tiny).vocab_size

    def run(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        lengths = generate(prompts, limits)
        assert list(lengths) == list(limits), (list(lengths)[:9], list(limits)[:9])

    for part in parts:
        if part == ROWS:
            for num in options.row_counts:
                prompts = make_prompts(num, options.prompt, vocabulary)
                save(ROWS, name, _rows(run, prompts, options), str(num))
        elif part == TAILS:
            for num in options.tails:
                prompts = make_prompts(num, options.prompt, vocabulary)
                lengths = tail_lengths(num, options.tail_mean, options.tail_longest)
                save(TAILS, name, _tails(run, prompts, lengths, options), str(num))
        elif part == PROMPTS:
            for num, length in options.prompt_cases:
                prompts = make_prompts(num, length, vocabulary)
                save(PROMPTS, name, _prompts(run, prompts, options), f"{num} x {length}")


Run = Callable[[Sequence[Sequence[int]], Sequence[int]], None]


def _rows(run: Run, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> Row:
    """Seconds of a step in which every row draws a token: without what the prompts and the first token take."""
    num, steps = len(prompts), options.row_steps
    run(prompts, [_WARM_STEPS] * num)
    run(prompts, [1] * num)
    whole = seconds_of(lambda: run(prompts, [steps] * num), options.engine_repeats, options.device, warm=True)
    first = seconds_of(lambda: run(prompts, [1] * num), options.engine_repeats, options.device, warm=True)
    return {
        "step_s": (whole - first) / (steps - 1),
        "whole_s": whole,
        "first_s": first,
        "tokens": num * steps,
    }


def _tails(
    run: Run, prompts: Sequence[Sequence[int]], lengths: Sequence[int], options: argparse.Namespace
) -> Row:
    """Tokens per second until the last completion has ended, prompts included."""
    run(prompts, [max(1, length // _WARM_SHARE) for length in lengths])
    whole = seconds_of(lambda: run(prompts, lengths), 1, options.device, warm=True)
    return {"tokens_per_s": sum(lengths) / whole, "whole_s": whole, "tokens": sum(lengths)}


def _prompts(run: Run, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> Row:
    """Seconds until every prompt has its first token."""
    whole = seconds_of(lambda: run(prompts, [1] * len(prompts)), options.prompt_repeats, options.device)
    return {"whole_s": whole, "tokens": sum(map(len, prompts))}
