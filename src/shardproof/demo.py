"""`make demo`: build a tiny model, load it on two ranks, print what each rank can prove about it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

NUM_RANKS = 2


def main() -> None:
    """Start the ranks through torch's elastic agent; each runs `run_rank`."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="shardproof-demo-") as folder:
        build_checkpoint(Path(folder))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=NUM_RANKS,
            run_id="demo",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
        )
        elastic_launch(config, run_rank)(folder)


def build_checkpoint(folder: Path) -> None:
    """A tiny mixture-of-experts checkpoint in the layout of the hub: one tensor an expert, several files."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="300KB")


def run_rank(folder: str) -> None:
    """Load the checkpoint on this rank, attest it, and compare one forward with the other rank."""
    import torch
    import torch.distributed as dist

    import shardproof as sp

    policy = sp.load(folder, device="cpu", compute_dtype=torch.float32)
    findings = sp.attest(policy)
    with torch.no_grad():
        logits = policy.module(input_ids=torch.arange(16).view(1, 16)).logits
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(f"\nrank {rank}: {policy.receipt}")
            for name in ("model.embed_tokens.weight", "model.layers.0.mlp.experts.gate_up_proj"):
                print(f"  {name}\n    <- {policy.provenance[name]}")
            print(f"  model.rotary_emb.inv_freq\n    <- {policy.provenance['model.rotary_emb.inv_freq']}")
            sys.stdout.flush()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"\nattestation: {len(findings)} findings; logits finite: {bool(torch.isfinite(logits).all())}")
        for finding in findings:
            print(finding)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
