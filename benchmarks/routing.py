"""What routing replay does to the mismatch between engine and trainer of a mixture of experts, and what it costs.

    python benchmarks/routing.py --json routing.json
    python benchmarks/routing.py --device cuda --layers 24 --hidden 1024 --experts 128 --rows 64 --tokens 512

A short training with random weights: in each step the embedded engine samples in bfloat16, the trainer scores the same
tokens in float32, with the engine's experts and with its own, before the update (the engine has these weights) and after
it (the engine's are one step old). The mismatch is the mean of |log p - log p of the engine|, and the KL divergence of
the engine's policy from the trainer's, E[exp(d) - 1 - d]. Costs: decoding with a record and without one, an update with
replay and without, and the bytes of a record.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import mean, median
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

import shardproof as sp
from shardproof.rl.batches import make_batch
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.recording import expert_shape
from shardproof.rollout.trajectory import Trajectory

OWN, REPLAYED = "the router's own experts", "the engine's experts"
CURRENT, OLDER = "the same weights", "weights one step older"


def make_config(options: argparse.Namespace) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        num_hidden_layers=options.layers, hidden_size=options.hidden, num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(options.hidden // 128, 1), head_dim=64, moe_intermediate_size=options.hidden // 2,
        num_experts=options.experts, num_experts_per_tok=options.chosen, norm_topk_prob=True,
        vocab_size=options.vocabulary, max_position_embeddings=4096, initializer_range=options.spread,
    )  # fmt: skip


def requests(options: argparse.Namespace, step: int) -> list[Request]:
    """Groups of four that share a prompt."""
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randint(options.vocabulary, (options.rows // 4, options.prompt), generator=generator)
    return [
        Request(Trajectory.of_prompt(tuple(prompt), number, sample), 1000 * step + 4 * number + sample)
        for number, prompt in enumerate(prompts.tolist())
        for sample in range(4)
    ]


def with_advantages(batch: sp.Batch, said: list[Trajectory], vocabulary: int) -> sp.Batch:
    """A reward for small token ids, compared with that of the group."""
    rewards = torch.tensor([[float(t < vocabulary // 2) for t in s.sampled[0].tokens] for s in said]).mean(1)
    groups = rewards.view(-1, 4)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    rows = [value.expand(length - 1) for value, length in zip(advantages, batch.lengths, strict=True)]
    return batch.with_column("advantages", rows)


def mismatch(policy: Any, batch: sp.Batch, experts: Any) -> dict[str, float]:
    mask = batch.flat_mask().bool()
    logps = torch.cat(sp.logprobs(policy, batch.sequences, experts=experts)).cpu()
    gap = (logps - batch.flat("rollout_logps"))[mask].double()
    worst = float(gap.abs().quantile(0.999))
    return {"mean": float(gap.abs().mean()), "kl": float((gap.exp() - 1 - gap).mean()), "p999": worst}


def seconds(device: str, action: Callable[[], Any]) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    found = action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    policy = sp.load(
        sp.RandomInit(make_config(options), seed=0),
        device=options.device,
        compute_dtype=torch.float32,
        progress=False,
    )
    shape = expert_shape(policy)
    engine, plain = EmbeddedEngine(policy, options.rows, experts=shape), EmbeddedEngine(policy, options.rows)
    for each in (engine, plain):
        each.model.bfloat16()
    trainer = sp.Trainer(policy, sp.make_optimizer(policy, lr=options.lr))
    sampling, found = Sampling(options.tokens), []
    size = options.rows * (options.prompt + options.tokens)
    times: dict[str, list[float]] = {
        name: [] for name in ("decode", "decode, recorded", "update", "update, replayed")
    }
    for step in range(options.steps):
        for each in (engine, plain):
            each.load_weights(sp.WeightStream(policy, torch.float32, digests=False))
        asked = requests(options, step)
        spent, said = seconds(options.device, lambda asked=asked: generate(engine, asked, sampling))
        times["decode, recorded"].append(spent)
        times["decode"].append(
            seconds(options.device, lambda asked=asked: generate(plain, asked, sampling))[0]
        )
        batch = with_advantages(make_batch(said, shape), said, options.vocabulary)
        row = {
            CURRENT: {OWN: mismatch(policy, batch, None), REPLAYED: mismatch(policy, batch, batch.experts)}
        }
        old = sp.logprobs(policy, batch.sequences, experts=batch.experts)
        batch = batch.with_column("old_logps", [each.cpu() for each in old])
        without = batch.with_column("mask", batch.columns["mask"])
        without.experts = None
        frozen = sp.Trainer(policy, torch.optim.SGD(policy.trainable_parameters(), lr=0.0))
        for name, part, who in (("update", without, frozen), ("update, replayed", batch, trainer)):
            how = {"loss": "policy", "micro_batch_tokens": size}
            times[name].append(seconds(options.device, lambda p=part, w=who, h=how: w.step(p, **h))[0])
        row[OLDER] = {OWN: mismatch(policy, batch, None), REPLAYED: mismatch(policy, batch, batch.experts)}
        found.append(row)
    nbytes = sum(t.sampled[0].experts.rows.nbytes for t in said) / sum(len(t.tokens) for t in said)
    return {"steps": found, "times": times, "bytes per token": nbytes, "record": list(map(int, shape.layers))}


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    for lag in (CURRENT, OLDER):
        for who in (OWN, REPLAYED):
            every = [step[lag][who] for step in found["steps"]]
            values = [mean(each[key] for each in every) for key in ("mean", "p999", "kl")]
            rows.append([f"{lag}, {who}", *(f"{value:.2e}" for value in values)])
    title = f"engine in bfloat16, trainer in float32: {options.layers} layers, {options.chosen} of {options.experts} experts"
    print_table(title, ["mismatch", "mean |d|", "99.9% of |d| below", "KL"], rows)
    costs = [[name, f"{median(spent[1:]):.2f}"] for name, spent in found["times"].items()]
    print_table(
        f"{options.rows} rows of {options.prompt} + {options.tokens} tokens", ["seconds", "median"], costs
    )
    print(f"\na record has {found['bytes per token']:.0f} bytes per token")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {
        **{"layers": 6, "hidden": 256, "experts": 64, "chosen": 8, "vocabulary": 2048, "steps": 8},
        **{"rows": 32, "prompt": 32, "tokens": 64},
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--spread", type=float, default=0.05, help="of the random weights")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)
    (found,) = run_on_ranks(1, measure, options)
    report(found, options)
    if options.json is not None:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        write_json(options.json, environment, {"settings": settings, "found": found})


if __name__ == "__main__":
    main()
