"""`make demo`: two ranks load a tiny model, prove what they hold, and teach it to add, on a CPU, without a network."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.config.schema import Recipe
from shardproof.text import printable

SHOWN = ("model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.rotary_emb.inv_freq")


def main() -> None:
    """Start the ranks of the recipe that is named; each runs `run_rank`."""
    from shardproof.dist.launch import start_ranks

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    recipe_path, *overrides = sys.argv[1:]
    recipe = load_recipe(recipe_path, overrides)
    started = time.monotonic()
    start_ranks(run_rank, to_json(recipe), num_ranks=recipe.train.ranks or 2)
    print_outcome(recipe, time.monotonic() - started)


def run_rank(recipe_json: str) -> None:
    """Show what this rank can prove about the model, then train it."""
    from shardproof.dist.launch import shut_down
    from shardproof.rl.loop import train

    recipe = from_json(recipe_json)
    print_attestation(recipe)
    train(recipe)
    shut_down()


def print_attestation(recipe: Recipe) -> None:
    """Load the model, compare it across the ranks, and print who wrote what. Collective: every rank."""
    import torch
    import torch.distributed as dist

    import shardproof as sp

    policy = sp.load(recipe.model.path, strategy=recipe.model.strategy, compute_dtype=torch.float32)
    findings = sp.attest(policy)
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(f"\nrank {rank}: {policy.receipt}")
            for name in SHOWN:
                print(printable(f"  {name}\n    <- {policy.provenance[name]}"))
            sys.stdout.flush()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"\nattestation: {len(findings)} findings", *findings, sep="\n", flush=True)


def print_outcome(recipe: Recipe, seconds: float) -> None:
    """What the run learned, and where it can be looked at."""
    import json

    folder = Path(recipe.output.folder)
    rows = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]  # step 0 is an evaluation alone
    held_out = [row["eval/reward"] for row in rows if "eval/reward" in row]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"\n{recipe.algorithm.name}, {len(rewards)} steps, {recipe.train.ranks} ranks, {seconds:.0f} s")
    print(f"mean reward of sampled answers: {first:.2f} in the first five steps, {last:.2f} in the last five")
    if held_out:
        print(
            f"held-out prompts, greedy: {held_out[0]:.2f} before the first step, {held_out[-1]:.2f} after the last"
        )
    print(f"report: {folder / 'report.html'}")
    print(f"model:  {folder / 'model'}")


if __name__ == "__main__":
    main()
