"""SkyRL issue 1709 on any machine: the load it describes, its probe, and what attestation says.

    torchrun --nproc-per-node 2 -m tests.museum.skyrl_1709 [--model FOLDER] [--dtypes bf16,fp32]

On NCCL a broadcast of another dtype writes nothing and says nothing. gloo would abort there, so this script leaves that
one broadcast out: the memory stays as `to_empty` left it, which is what the issue shows.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoConfig, AutoModelForCausalLM

import shardproof as sp

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SEQ_LEN = 128


def load_as_there(source: Any, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """(FSDP1 module, model inside): rank 0 reads the weights, the others cast a meta model and wait for a broadcast."""
    if dist.get_rank() == 0:
        model = (
            AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
            if isinstance(source, str)
            else AutoModelForCausalLM.from_config(source, dtype=dtype)
        )
    else:
        config = AutoConfig.from_pretrained(source) if isinstance(source, str) else source
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.to(dtype)  # the fault: buffers are cast with the parameters
        model.to_empty(device="cpu")
        for buffer in model.buffers():
            fill_as_an_allocator(buffer)
    synchronise(model)
    layers = {type(module) for module in model.modules() if type(module).__name__.endswith("DecoderLayer")}
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(layers), **options), model


def fill_as_an_allocator(buffer: torch.Tensor) -> None:
    """What memory that nobody wrote may hold: pieces of other tensors, and a NaN."""
    values = torch.tensor([0.0, 1.0, 22675456.0, float("nan"), 0.109375], dtype=buffer.dtype)
    buffer.copy_(values.repeat(-(-buffer.numel() // 5))[: buffer.numel()].view(buffer.shape))


def synchronise(model: nn.Module) -> None:
    """`sync_module_states`: tensors of one dtype on all ranks are broadcast, the others are silently not written."""
    for tensor in (*model.parameters(), *model.buffers()):
        dtypes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(dtypes, tensor.dtype)
        if len(set(dtypes)) == 1:
            dist.broadcast(tensor.data, src=0)


def probe(model: nn.Module, label: str) -> None:
    """The issue's own probe: one line for each rank's rotary frequencies."""
    lines: list[Any] = [None] * dist.get_world_size()
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            name = name.replace("_fsdp_wrapped_module.", "")
            first = [round(value, 4) for value in buffer.float().tolist()[:5]]
            line = f"[probe_inv_freq {label} rank={dist.get_rank()}] name={name!r} dtype={buffer.dtype} "
            line += f"shape={tuple(buffer.shape)} n_nan={int(buffer.isnan().sum())} first5={first}"
            dist.all_gather_object(lines, line)
            if dist.get_rank() == 0:
                print("\n".join(lines), flush=True)


def num_nan(module: nn.Module, vocabulary: int) -> tuple[int, int]:
    """(NaN, all) log-probs of one sequence, as the last rank computes them."""
    tokens = torch.arange(SEQ_LEN).remainder(vocabulary).view(1, -1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = module(input_ids=tokens).logits[0, :-1].float()
    logps = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:, None])
    count = torch.tensor([int(logps.isnan().sum()), logps.numel()])
    dist.broadcast(count, src=dist.get_world_size() - 1)
    return int(count[0]), int(count[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None, help="a folder or hub id; default: a small random Qwen3")
    parser.add_argument("--dtypes", default="bf16,fp32")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = args.model or AutoConfig.for_model(
        "qwen3", vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=128, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip
    for label in args.dtypes.split(","):
        module, model = load_as_there(source, DTYPES[label])
        probe(model, label)
        bad, every = num_nan(module, model.config.vocab_size)
        findings = sp.attest(module)
        if dist.get_rank() == 0:
            print(f"[{label}] log_probs n_nan={bad}/{every}")
            print("\n".join(map(str, findings)) or "attest: nothing found", end="\n\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
