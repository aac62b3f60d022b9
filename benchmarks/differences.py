"""What a step of training changes in bfloat16 weights, how small that can be sent, and what it saves in a sync.

    python benchmarks/differences.py --json differences.json

A model with layers of Qwen3-0.6B's shape and weights of its spread is trained for a few steps with AdamW in float32, as
RL does it, on random tokens. After each step, once the optimizer's averages have warmed up, the bfloat16 weights are
compared with those of the step before and encoded as `shardproof/export/differences.py` does. The second table is a whole
sync over loopback to a receiver process: from a barrier until the receiver has proved the payload.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import peft
import torch
import torch.distributed as dist
from checkpoints import dense_config, make_checkpoint
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
from shardproof.export.address import read_shared
from shardproof.export.differences import decode, encode
from shardproof.export.network import NetworkWeights
from shardproof.export.packing import BLOCK_BYTES

# (learning rate, whether LoRA is trained and merged)
WAYS = {
    "AdamW, lr 1e-6": (1e-6, False),
    "AdamW, lr 1e-5": (1e-5, False),
    "LoRA merged, lr 1e-5": (1e-5, True),
    "LoRA merged, lr 1e-4": (1e-4, True),
}
WARM_UP, STEPS = 3, 3


def load(folder: str, lora: bool) -> sp.ShardedModel:
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if lora else None
    return sp.load(
        folder,
        device="cpu",
        param_dtype=torch.float32,
        compute_dtype=torch.float32,
        lora=config,
        progress=False,
    )


def step(policy: sp.ShardedModel, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    tokens = torch.randint(0, policy.model.config.vocab_size, (4, 64), generator=generator)
    sp.train_step(policy, sp.Batch(tokens.tolist()), optimizer)


def measure_encoding(folder: str, lr: float, lora: bool) -> dict[str, float]:
    """Means over steps: share of values that change, encoded size of the raw one, seconds per GB."""
    policy = load(folder, lora)
    optimizer = sp.make_optimizer(policy, lr=lr)
    weights = sp.SharedWeights(policy, dtype=torch.bfloat16)
    rows = []
    old: np.ndarray | None = None
    for number in range(WARM_UP + STEPS):
        step(policy, optimizer, number)
        weights.write()
        tensors = [tensor.reshape(-1).view(torch.int16) for _, tensor in read_shared(weights.address)]
        new = torch.cat(tensors).numpy().view(np.uint8)
        if old is not None and number >= WARM_UP:
            rows.append(compare(new, old))
        old = new
    return {name: mean(row[name] for row in rows) for name in rows[0]}


def compare(new: np.ndarray, old: np.ndarray) -> dict[str, float]:
    """What one step changed, and what it takes to encode and decode it."""
    size = encoding = decoding = 0.0
    for at in range(0, len(new), BLOCK_BYTES):
        after, before = new[at : at + BLOCK_BYTES], old[at : at + BLOCK_BYTES]
        started = time.perf_counter()
        block = encode(after, before)
        encoding += time.perf_counter() - started
        body = np.frombuffer(b"".join(part.tobytes() for part in block.parts), dtype=np.uint8)
        started = time.perf_counter()
        decoded = decode(block.to_json(), body, before)
        decoding += time.perf_counter() - started
        assert np.array_equal(decoded, after)
        size += block.nbytes
    gigabytes = len(new) / 1e9
    changed = float((new.view(np.int16) != old.view(np.int16)).mean())
    return {
        "changed": changed,
        "size": size / len(new),
        "encode": encoding / gigabytes,
        "decode": decoding / gigabytes,
    }


def measure_sync(folder: str, receiver: str, secret: str, lr: float) -> dict[str, list[dict[str, float]]]:
    """Seconds and bytes of syncs with everything and with differences. Collective: every rank."""
    policy = load(folder, False)
    optimizer = sp.make_optimizer(policy, lr=lr)
    rows: dict[str, list[dict[str, float]]] = {}
    for way in ("everything", "differences"):
        network = NetworkWeights(
            policy, [receiver], secret, dtype=torch.bfloat16, differences=way == "differences"
        )
        rows[way] = []
        for number in range(WARM_UP + STEPS):
            step(policy, optimizer, number)
            dist.barrier()
            started = time.perf_counter()
            sent = network.write()
            seconds = time.perf_counter() - started
            assert not sent.lost, sent.lost
            network.commit([receiver])
            if number >= WARM_UP:
                rows[way].append({"total": seconds, "bytes": sent.wire_bytes[receiver], **sent.seconds})
        network.close()
    return rows


def time_syncs(folder: str, num_ranks: int, lr: float) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="shardproof-secret-") as private:
        secret = Path(private) / "secret"
        secret.write_text("a secret of enough characters")
        secret.chmod(0o600)
        command = [sys.executable, "-m", "shardproof", "receive", "--listen", "127.0.0.1:0"]
        with subprocess.Popen(
            [*command, "--secret-file", str(secret)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            name = process.stdout.readline().split()[-1]
            rows = run_on_ranks(num_ranks, measure_sync, folder, name, str(secret), lr)[0]
            process.terminate()
    return {way: {key: median(row[key] for row in found) for key in found[0]} for way, found in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32768)
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)
    with tempfile.TemporaryDirectory(prefix="shardproof-model-") as folder:
        make_checkpoint(Path(folder), dense_config(options.layers, options.vocabulary))
        found = {way: run_on_ranks(1, measure_encoding, folder, *how)[0] for way, how in WAYS.items()}
        table = [
            [
                way,
                f"{row['changed']:.2%}",
                f"{row['size']:.2%}",
                f"{row['encode']:.2f}",
                f"{row['decode']:.2f}",
            ]
            for way, row in found.items()
        ]
        print_table(
            "what a step changes in bfloat16",
            ["trained by", "values changed", "bytes sent", "encode, s/GB", "decode, s/GB"],
            table,
        )
        syncs = time_syncs(folder, options.ranks, 1e-6)
    rows = [
        [
            way,
            f"{row['bytes'] / 1e6:.1f}",
            *(f"{row[key]:.2f}" for key in ("write", "send", "verify", "total")),
        ]
        for way, row in syncs.items()
    ]
    print_table(
        f"a sync over loopback from {options.ranks} ranks, lr 1e-6",
        ["sent", "MB", "write, s", "send, s", "verify, s", "total, s"],
        rows,
    )
    if options.json is not None:
        write_json(options.json, environment, {"encoding": found, "sync": syncs})


if __name__ == "__main__":
    main()
