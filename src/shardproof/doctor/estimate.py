"""The command `shardproof estimate`: how much memory a model or a whole recipe needs, before anything is allocated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof.bounds import require_number
from shardproof.doctor.request import Layout, Request
from shardproof.doctor.results import USAGE_EXIT
from shardproof.errors import ShardproofError, fail

if TYPE_CHECKING:
    from shardproof.rl.sizing.recipe import Machine, RunEstimate

_GIB = 2**30


def estimate(
    source: Annotated[
        str | None, typer.Argument(help="a recipe (TOML), a model's folder, or a hub id")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value: change a key of the recipe")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="processes per node; default: train.ranks, or one per GPU; 8 for a model"),
    ] = None,
    nodes: Annotated[int, typer.Option(help="number of nodes (recipe)")] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB of each GPU (recipe); default: this machine's GPU, else the CPU")
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(help="GiB of each node's host memory (recipe); default: this machine's")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="longest prompt (recipe); default: read from the recipe's data")
    ] = None,
    config: Annotated[str | None, typer.Option(help="a config.json (model)")] = None,
    strategy: Annotated[str, typer.Option(help="fsdp2 or fsdp1 (model)")] = "fsdp2",
    dtype: Annotated[str, typer.Option(help="dtype to compute in (model)")] = "bf16",
    param_dtype: Annotated[str, typer.Option(help="dtype that shards are stored in (model)")] = "fp32",
    micro_batch_tokens: Annotated[int, typer.Option(help="tokens per micro-batch (model)")] = 8192,
    sequence_parallel: Annotated[int, typer.Option(help="ranks per sequence (model)")] = 1,
    replicate: Annotated[int, typer.Option(help="copies of the sharded model, HSDP (model)")] = 1,
    lora: Annotated[int, typer.Option(help="rank of LoRA adapters; 0 for none (model)")] = 0,
    checkpoint_activations: Annotated[bool, typer.Option(help="recompute activations (model)")] = False,
    optimizer: Annotated[str, typer.Option(help="adamw, adamw_8bit, muon, or module:name (model)")] = "adamw",
    role: Annotated[str, typer.Option(help="policy, reference or critic (model)")] = "policy",
    trust_remote_code: Annotated[bool, typer.Option(help="run the model's own code (model)")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the numbers as JSON")] = None,
) -> None:
    """Estimate memory per GPU before a run: of a recipe, and what would make it fit, or of one model."""
    try:
        found: Any
        if source is not None and source.endswith(".toml"):
            found = _of_recipe(source, overrides or [], ranks, nodes, gpu_memory, host_memory, prompt_tokens)
        else:
            layout = Layout(
                strategy=strategy,
                dtype=dtype,
                param_dtype=param_dtype,
                sequence_parallel=sequence_parallel,
                lora=lora,
                replicate=replicate,
                checkpoint_activations=checkpoint_activations,
                optimizer=optimizer,
            )
            request = Request(
                source, config, (layout,), role, ranks or 8, trust_remote_code=trust_remote_code
            )
            found = _of_model(request, overrides or [], micro_batch_tokens)
    except ShardproofError as error:
        print(error, file=sys.stderr)
        raise SystemExit(USAGE_EXIT) from None
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n")


def _of_model(request: Request, overrides: list[str], num_tokens: int) -> list[dict[str, Any]]:
    """Print the table of one model; returns its numbers."""
    from shardproof.doctor.forecast import forecast
    from shardproof.doctor.report import print_estimates

    if overrides:
        message = f"{overrides[0]!r} changes a key of a recipe, but {request.source!r} is not a .toml file."
        raise fail("C001", "estimate", message)
    request.check()
    rows = forecast(request, num_tokens)
    print_estimates(request.label, str(request.layouts[0]), num_tokens, rows)
    return [{**vars(row), "step_peak": row.step_peak, "peak": row.peak} for row in rows]


def _of_recipe(
    source: str,
    overrides: list[str],
    ranks: int | None,
    nodes: int,
    gpu_memory: float | None,
    host_memory: float | None,
    prompt_tokens: int | None,
) -> dict[str, Any]:
    """Print the tables of a recipe, the verdict and what would help; returns the numbers."""
    from shardproof.config.load import load_recipe
    from shardproof.doctor.forecast import prompt_lengths
    from shardproof.doctor.sizing_tables import print_run_estimate
    from shardproof.model.families import check_sequence_parallel
    from shardproof.rl.checks import model_folder
    from shardproof.rl.sizing.advice import advise
    from shardproof.rl.sizing.recipe import estimate_run
    from shardproof.weights.source import read_config

    recipe = load_recipe(source, overrides)
    if prompt_tokens is not None:
        require_number("estimate", "--prompt-tokens", prompt_tokens, at_least=1, at_most=2**24)
    lengths, origin = ([prompt_tokens], "--prompt-tokens") if prompt_tokens else prompt_lengths(recipe)
    machine = _machine(ranks if ranks is not None else recipe.train.ranks, nodes, gpu_memory, host_memory)
    model = recipe.model
    if machine.num_ranks % model.replicate:
        message = f"model.replicate={model.replicate} does not divide the {machine.num_ranks} ranks."
        raise fail("C002", "estimate", message)
    config = read_config(model_folder(model.path), model.trust_remote_code)
    check_sequence_parallel(config, model.sequence_parallel, machine.num_ranks // model.replicate)
    before = estimate_run(recipe, machine, lengths)
    effects, together = advise(recipe, machine, lengths, before)
    longest = f"prompts of up to {max(lengths):,} tokens ({origin})"
    print_run_estimate(source, longest, before, effects, together)
    return {
        **_to_json(before),
        "prompt_tokens": max(lengths),
        "settings": [{"setting": effect.text, **_totals(effect.estimate)} for effect in effects],
        "makes_it_fit": None
        if together is None
        else {"setting": together.text, **_totals(together.estimate)},
    }


def _machine(ranks: int | None, nodes: int, gpu_memory: float | None, host_memory: float | None) -> Machine:
    """What was asked for, or else what this machine has."""
    import torch

    from shardproof.rl.sizing.recipe import Machine
    from shardproof.shard.memory import host_memory as memory_here

    for option, number in (("--gpu-memory", gpu_memory), ("--host-memory", host_memory)):
        if number is not None:
            require_number("estimate", option, number, above=0, at_most=2**20)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = ranks if ranks is not None else max(gpus, 1)
    require_number("estimate", "--ranks", ranks, at_least=1, at_most=2**16)
    require_number("estimate", "--nodes", nodes, at_least=1, at_most=2**16)
    gpu_bytes = None if gpu_memory is None else int(gpu_memory * _GIB)
    if gpu_bytes is None and gpus:
        gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    here = memory_here()[1] or None
    if gpu_memory is not None:
        here = None  # the GPUs that were asked for are elsewhere
    return Machine(ranks, nodes, gpu_bytes, here if host_memory is None else int(host_memory * _GIB))


def _totals(estimate: RunEstimate) -> dict[str, Any]:
    return {"device_bytes": estimate.device_bytes, "host_bytes": estimate.host_bytes, "fits": estimate.fits}


def _to_json(estimate: RunEstimate) -> dict[str, Any]:
    return {
        "machine": vars(estimate.machine),
        "phases": [
            {
                "name": phase.name,
                "device": phase.device,
                "host": phase.host,
                "device_bytes": phase.device_bytes,
            }
            for phase in estimate.phases
        ],
        "fullest": estimate.fullest.name,
        "shared": estimate.shared,
        "notes": list(estimate.notes),
        **_totals(estimate),
    }
