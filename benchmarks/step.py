"""What a train step spends on its verdict and metrics, and what memory the head needs besides weights and activations.

    python benchmarks/step.py --json step.json

The first table is a whole `train_step` of the Qwen3-0.6B shape on two ranks (gloo, CPU, float32, one thread each), and
the part of it that goes into the verdict: the squared norm of the gradients, the metrics of each micro-batch, and the
exchange after the last one. Ranks meet before each part is timed, so that waiting for a slower rank is nobody's cost.

The second table is the head alone, forward and backward, over packed tokens: by how much anonymous memory rises above
the weight and the hidden states. Log-probs of the first and the last tokens are compared with those of whole logits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checkpoints import dense_config
from ranks import AnonymousRise, run_on_ranks
from reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from torch import nn

import shardproof as sp
from shardproof.model.head import HeadFacts, token_logprobs
from shardproof.train import trainer as step_module
from shardproof.train.loss import policy_gradient

_MIB = 2**20
MAX_OVERHEAD = 0.02
MAX_HEAD_BYTES = 2 * 2**30
VOCABULARY, HIDDEN_SIZE = 151936, 1024
NORM, METRICS, EXCHANGE = "norm of the gradients", "metrics of micro-batches", "exchange and decision"
PARTS = (NORM, METRICS, EXCHANGE)


class PartTimes:
    """Seconds spent in each part of the verdict since the last `take`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, fn: Callable[..., Any], *, meet: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if meet:
                dist.barrier()
            started = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - started

        return call

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken

    def watch(self) -> ExitStack:
        """Time the step's own calls of each part inside the block."""
        stack = ExitStack()
        for owner, name, part, meet in (
            (step_module, "local_square_norm", NORM, True),
            (step_module.MetricSums, "add", METRICS, False),
            (step_module, "agree", EXCHANGE, True),
        ):
            timed = self.timed(part, getattr(owner, name), meet=meet)
            # A method's wrapper must be a function, which Python binds.
            stack.enter_context(mock.patch.object(owner, name, timed))
        return stack


def measure_step_on_rank(
    strategy: str, layers: int, tokens: int, micro_batches: int, repeats: int
) -> dict[str, Any]:
    """Seconds of whole steps and of their parts on this rank. Collective: every rank."""
    policy = sp.load(
        sp.RandomInit(dense_config(layers)),
        strategy=strategy,
        device="cpu",
        param_dtype=torch.float32,
        compute_dtype=torch.float32,
        progress=False,
    )
    optimizer = sp.make_optimizer(policy, lr=1e-6, weight_decay=0.01)
    length = tokens // micro_batches
    sequences = [[(7 * i + 13 * j) % VOCABULARY for j in range(length)] for i in range(micro_batches)]
    columns = {
        name: [value] * len(sequences)
        for name, value in (("advantages", 1.0), ("old_logps", -12.0), ("ref_logps", -12.0))
    }
    batch = sp.Batch(sequences, **columns)
    how = {"loss": policy_gradient(kl_coef=0.01, entropy_coef=0.001), "micro_batch_tokens": length}
    times = PartTimes()
    rows = []
    # The first step also finds out how to score, and makes the optimizer's state.
    sp.train_step(policy, batch, optimizer, deadline_s=1800, **how)
    with times.watch():
        for _ in range(repeats):
            dist.barrier()
            times.take()
            started = time.perf_counter()
            result = sp.train_step(policy, batch, optimizer, deadline_s=1800, **how)
            seconds = time.perf_counter() - started
            assert result.stepped, result
            rows.append({"step": seconds, **times.take()})
    return {
        "rows": rows,
        "num_metrics": len(result.metrics),
        "num_tokens": result.num_tokens,
        "num_parameters": sum(info.numel for info in policy.inventory.parameters),
    }


def measure_step(strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    """The slowest rank of the median repeat, part by part."""
    ranks = run_on_ranks(
        options.ranks,
        measure_step_on_rank,
        strategy,
        options.layers,
        options.tokens,
        options.micro_batches,
        options.repeats,
    )
    seconds = {
        key: median(max(rank["rows"][i][key] for rank in ranks) for i in range(options.repeats))
        for key in ("step", *PARTS)
    }
    verdict = sum(seconds[part] for part in PARTS)
    return {
        "strategy": strategy,
        "ranks": options.ranks,
        "layers": options.layers,
        **{key: ranks[0][key] for key in ("num_parameters", "num_tokens", "num_metrics")},
        "micro_batches": options.micro_batches,
        "seconds": seconds,
        "verdict_seconds": verdict,
        "overhead": verdict / seconds["step"],
        "bar": MAX_OVERHEAD,
    }


def measure_head_on_rank(tokens: int, dtype_name: str, want_entropy: bool, threads: int) -> dict[str, Any]:
    """The head's forward and backward on this rank alone, in numbers."""
    torch.set_num_threads(threads)
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN_SIZE, VOCABULARY, bias=False, dtype=dtype)
    hidden = torch.randn(tokens, HIDDEN_SIZE).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (tokens,))
    options = {"temperature": 1.0, "facts": HeadFacts(), "want_entropy": want_entropy}
    # What matrix products allocate once for themselves.
    token_logprobs(hidden[:64], head, targets[:64], **options)[0].sum().backward()
    head.weight.grad = hidden.grad = None
    with AnonymousRise() as forward:
        started = time.perf_counter()
        logps, entropy = token_logprobs(hidden, head, targets, **options)
        forward_seconds = time.perf_counter() - started
    with AnonymousRise() as backward:
        started = time.perf_counter()
        (logps.mean() + entropy.sum() / tokens).backward()
        backward_seconds = time.perf_counter() - started
    check_head(logps, hidden, head, targets)
    return {
        "forward_bytes": forward.peak,
        "forward_backward_bytes": max(forward.peak, backward.peak),
        "gradient_bytes": head.weight.grad.nbytes + hidden.grad.nbytes,
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
    }


def check_head(logps: torch.Tensor, hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor) -> None:
    """End the program if the head's log-probs are not those of whole logits, or its gradients are not finite."""
    with torch.no_grad():
        for rows in (slice(0, 8), slice(-8, None)):
            every = torch.log_softmax(hidden[rows].float() @ head.weight.float().t(), dim=-1)
            expected = every.gather(1, targets[rows, None]).squeeze(1)
            if not torch.allclose(
                logps[rows], expected, rtol=0, atol=1e-3 if hidden.dtype == torch.float32 else 0.05
            ):
                raise SystemExit("the head's log-probs differ from those of whole logits; no result.")
    if not bool(torch.isfinite(hidden.grad[:8]).all()):
        raise SystemExit("the head's gradients are not finite; no result.")


def measure_head(dtype_name: str, want_entropy: bool, options: argparse.Namespace) -> dict[str, Any]:
    (row,) = run_on_ranks(
        1, measure_head_on_rank, options.head_tokens, dtype_name, want_entropy, options.head_threads
    )
    return {
        "dtype": dtype_name,
        "entropy": want_entropy,
        "tokens": options.head_tokens,
        "vocabulary": VOCABULARY,
        "hidden_size": HIDDEN_SIZE,
        "logits_bytes": options.head_tokens * VOCABULARY * 4,
        **row,
        "bar": MAX_HEAD_BYTES,
    }


def print_steps(results: list[Mapping[str, Any]]) -> None:
    first = results[0]
    title = (
        f"train_step: {first['num_parameters'] / 1e6:.0f}M parameters in {first['layers']} layers, {first['ranks']} ranks, "
        f"{first['num_tokens']} predictions in {first['micro_batches']} micro-batches a rank, {first['num_metrics']} metrics"
    )
    header = ["", "step s", *(f"{part} s" for part in PARTS), "share", "bar", ""]
    table = [
        [
            row["strategy"],
            f"{row['seconds']['step']:.2f}",
            *(f"{row['seconds'][part]:.4f}" for part in PARTS),
            f"{100 * row['overhead']:.2f}%",
            f"{100 * row['bar']:.0f}%",
            "ok" if row["overhead"] <= row["bar"] else "OVER",
        ]
        for row in results
    ]
    print_table(title, header, table)


def print_heads(results: list[Mapping[str, Any]]) -> None:
    first = results[0]
    title = (
        f"the head alone: {first['tokens']} tokens of {first['hidden_size']}, {first['vocabulary']} words; "
        f"logits of all would be {first['logits_bytes'] / _MIB:.0f} MiB"
    )
    header = [
        "",
        "forward MiB",
        "with backward MiB",
        "of which gradients",
        "forward s",
        "backward s",
        "bar MiB",
        "",
    ]
    table = [
        [
            f"{row['dtype']}{', entropy' if row['entropy'] else ''}",
            *(
                f"{row[key] / _MIB:.0f}"
                for key in ("forward_bytes", "forward_backward_bytes", "gradient_bytes")
            ),
            f"{row['forward_seconds']:.1f}",
            f"{row['backward_seconds']:.1f}",
            f"{row['bar'] / _MIB:.0f}",
            "ok" if row["forward_backward_bytes"] < row["bar"] else "OVER",
        ]
        for row in results
    ]
    print_table(title, header, table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=["step", "head"], default=["step", "head"])
    parser.add_argument("--strategies", nargs="+", choices=["fsdp2", "fsdp1"], default=["fsdp2", "fsdp1"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--layers", type=int, default=28, help="fewer make the step shorter and the share larger"
    )
    parser.add_argument("--tokens", type=int, default=256, help="on each rank")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--head-tokens", type=int, default=32768)
    parser.add_argument("--head-dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--head-threads", type=int, default=2)
    parser.add_argument("--entropy", action="store_true", help="the head also gives entropies")
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)
    results: dict[str, Any] = {}
    if "step" in options.parts:
        results["step"] = [measure_step(strategy, options) for strategy in options.strategies]
        print_steps(results["step"])
    if "head" in options.parts:
        results["head"] = [measure_head(dtype, options.entropy, options) for dtype in options.head_dtypes]
        print_heads(results["head"])
    print(
        "\nshare: norm, metrics and exchange of the whole step, median repeat, slowest rank of each;"
        "\nMiB: peak of anonymous memory over its value with weight and hidden states in place."
    )
    if options.json is not None:
        write_json(options.json, environment, results)


if __name__ == "__main__":
    main()
