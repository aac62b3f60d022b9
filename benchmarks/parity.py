"""How far losses, gradients and advantages are from those of TRL's and verl's own code, on random batches.

TRL's trainers run on a stand-in (tests/rl/parity): everything between rewards and loss is theirs. verl's formulas come
from a checkout of it. Numbers are the largest absolute differences over all completions, tokens and seeds, in float32.

    python -m benchmarks.parity --json docs/data/parity.json --verl ../verl
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from benchmarks.verl_side import CASES as VERL_CASES
from benchmarks.verl_side import load_verl, verls
from tests.rl.parity.cases import Drawn, Rows, draw, ours, with_probabilities
from tests.rl.parity.trl_cases import CASES as TRL_CASES
from tests.rl.parity.trl_side import trls

Result = tuple[float, Rows, Any]


def largest(pairs: Sequence[tuple[Any, Any]]) -> float:
    """The largest absolute difference of paired rows."""
    return max(
        float((torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max()) for a, b in pairs
    )


def differences(mine: Callable[[Drawn], Result], theirs: Callable[[Drawn], Result], seeds: int) -> dict:
    """{what: the largest difference over the seeds}, and how large the gradients were."""
    found = {"loss": 0.0, "gradient": 0.0, "advantage": 0.0, "largest_gradient": 0.0}
    for seed in range(seeds):
        drawn = draw(seed)
        (loss, gradients, advantages), (their_loss, their_gradients, their_advantages) = (
            mine(drawn),
            theirs(drawn),
        )
        step = {
            "loss": abs(loss - their_loss),
            "gradient": largest(list(zip(gradients, their_gradients, strict=True))),
            "advantage": largest(
                [
                    (a, torch.as_tensor(b).expand(len(a)))
                    for a, b in zip(advantages, their_advantages, strict=True)
                ]
            ),
            "largest_gradient": max(float(row.abs().max()) for row in their_gradients),
        }
        found = {name: max(value, step[name]) for name, value in found.items()}
    return found


def against_verl(root: Path, seeds: int) -> dict[str, dict]:
    verl, found = load_verl(root), {}
    for name in VERL_CASES:
        settings: dict[str, Any] = {"name": name.split()[0], "preset": "verl"}
        theirs, on_policy = {}, name.endswith("_cov")
        if name == "clip_cov":  # all tokens within the bounds, so that nothing is drawn at random
            settings |= {"cov_ratio": 1.0, "cov_bounds": (0.05, 0.5)}
            theirs = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 0.5}
        elif name == "kl_cov":
            settings |= {"cov_ratio": 0.1}
            theirs = {"kl_cov_ratio": 0.1}
        elif settings["name"] == "dppo":
            settings |= {
                "surrogate": "dppo_kl" if "KL" in name else "dppo_tv",
                "clip_low": 0.02,
                "clip_high": 0.03,
            }

        def given(drawn: Drawn, on_policy: bool = on_policy) -> Drawn:
            drawn = with_probabilities(drawn)
            # verl takes the covariance of the log-probs of now, shardproof of those at the beginning of the step.
            return replace(drawn, old=drawn.logps) if on_policy else drawn

        found[name] = differences(
            lambda drawn, settings=settings, given=given: ours(given(drawn), **settings),
            lambda drawn, name=name, theirs=theirs, given=given: verls(verl, name, given(drawn), **theirs),
            seeds,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--verl", type=Path, help="a checkout of verl")
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    environment = describe_environment(("trl", "torch"))
    results = {
        "trl": {
            case: differences(
                lambda drawn, settings=settings: ours(drawn, **settings),
                lambda drawn, theirs=theirs: trls(drawn, **theirs),
                options.seeds,
            )
            for case, (settings, theirs) in TRL_CASES.items()
        }
    }
    if options.verl is not None:
        command = ["git", "-C", str(options.verl), "rev-parse", "HEAD"]
        environment["verl"] = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
        results["verl"] = against_verl(options.verl, options.seeds)
    print_environment(environment)
    for library, cases in results.items():
        title = f"Largest differences to {library}, over {options.seeds} batches"
        columns = ["case", "loss", "gradient", "advantage", "largest gradient"]
        rows = [[case, *(f"{x:.1e}" for x in row.values())] for case, row in cases.items()]
        print_table(title, columns, rows)
    if options.json is not None:
        write_json(options.json, environment, {"batches": options.seeds, **results})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
