"""The ledger of a reload: every element of every parameter is written once, whatever vLLM's own count says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader.reload import meta
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from shardproof.rollout.vllm_ledger import WriteLedger, recording
from shardproof.rollout.vllm_transport import expected_writes

pytestmark = pytest.mark.vllm

EXPERTS, ROWS, WIDTH = 4, 6, 8
ONCE = "was not written exactly once"


class Experts(torch.nn.Module):
    """A layer as vLLM's: gate and up of every expert are parts of one parameter, which a loader fills part by part."""

    def __init__(self, loader: Any):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(EXPERTS, 2 * ROWS, WIDTH), requires_grad=False)
        self.w13_weight.weight_loader = loader
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.norm.weight_loader = transform


def place(param: torch.Tensor, loaded_weight: torch.Tensor, expert: int, part: int) -> None:
    param.data[expert].narrow(0, part * ROWS, ROWS).copy_(loaded_weight)


def wrong_expert(param: torch.Tensor, loaded_weight: torch.Tensor, expert: int, part: int) -> None:
    place(param, loaded_weight, 1 if expert == 2 else expert, part)


def wrong_part(param: torch.Tensor, loaded_weight: torch.Tensor, expert: int, part: int) -> None:
    place(param, loaded_weight, expert, 0 if expert == 3 else part)


def transform(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """What one call writes twice is a transformation."""
    param.data.copy_(loaded_weight)
    param.data.copy_(param.data * 2)


def across_rows(param: torch.Tensor, loaded_weight: torch.Tensor, expert: int, part: int) -> None:
    """A range of the flat parameter is no box of it."""
    size = ROWS * WIDTH
    param.data.view(-1).narrow(0, (2 * expert + part) * size, size).copy_(loaded_weight.reshape(-1))


def across_rows_wrong(param: torch.Tensor, loaded_weight: torch.Tensor, expert: int, part: int) -> None:
    across_rows(param, loaded_weight, 1 if expert == 2 else expert, part)


def reload(loader: Any) -> tuple[list[tuple[str, str]], list[tuple[int, int]], torch.nn.Module]:
    """(what the ledger found, vLLM's own (loaded, wanted) of layers that it thinks unfinished, the model)."""
    model = torch.nn.ModuleDict({"layer": Experts(loader)})
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    layer = model["layer"]
    ledger = expected_writes(model)
    with recording(ledger, meta):
        for expert in range(EXPERTS):
            for part in range(2):
                param = layer.w13_weight
                param.weight_loader(param, torch.full((ROWS, WIDTH), 1.0 + expert), expert, part)
        layer.norm.weight_loader(layer.norm, torch.ones(WIDTH))
    infos = [get_layerwise_info(module) for module in model.modules()]
    unfinished = [(info.load_numel, info.load_numel_total) for info in infos if info.load_numel_total]
    finalize_layerwise_reload(model, None)
    return ledger.problems(), unfinished, model


@pytest.mark.parametrize("loader", [place, across_rows])
def test_a_whole_reload_is_clean(loader):
    problems, unfinished, model = reload(loader)
    assert problems == [] and unfinished == []
    assert torch.equal(model["layer"].w13_weight[:, 0, 0], torch.arange(1.0, 1 + EXPERTS))
    assert torch.equal(model["layer"].norm, torch.full((WIDTH,), 2.0))


@pytest.mark.parametrize(
    ("loader", "missing", "twice", "count"),
    [
        (wrong_expert, [2, 0, 0], [1, 0, 0], 2 * ROWS * WIDTH),
        (wrong_part, [3, ROWS, 0], [3, 0, 0], ROWS * WIDTH),
        (across_rows_wrong, [2, 0, 0], [1, 0, 0], 2 * ROWS * WIDTH),
    ],
)
def test_a_part_written_twice_and_another_never_is_named_although_the_count_is_right(
    loader, missing, twice, count
):
    problems, unfinished, _ = reload(loader)
    assert unfinished == []  # vLLM's own count is satisfied
    total = EXPERTS * 2 * ROWS * WIDTH
    assert problems == [
        (
            "layer.w13_weight",
            f"{ONCE}: {count} of its {total} elements were not written, from {missing}; "
            f"{count} of its {total} elements were written more than once, from {twice}",
        )
    ]


def test_padding_need_not_be_written_and_everything_else_must():
    ledger = WriteLedger()
    vocabulary, padded, other = torch.empty(64, 4), torch.empty(8, 6), torch.empty(5)
    ledger.expect("embed", "weight", vocabulary, rows=50)
    ledger.expect("linear", "weight", padded, spare=4)
    ledger.expect("head", "bias", other)
    call = ledger.next_call()
    ledger.note(call, vocabulary[:50])
    ledger.note(call, padded[:, 1:].t()[1:])
    ledger.note(call, padded[:4, :2])
    ledger.note(call, torch.empty(5))  # nobody's
    assert ledger.problems(without=["head"]) == [
        ("linear.weight", f"{ONCE}: 8 of its 48 elements were not written, from [4, 0]")
    ]
    ledger.note(call, padded[4:6, :2])
    assert [name for name, _ in ledger.problems()] == ["head.bias"]
    ledger.note(ledger.next_call(), vocabulary[49:50])
    assert ledger.problems(without=["head"]) == [
        ("embed.weight", f"{ONCE}: 4 of its 256 elements were written more than once, from [49, 0]")
    ]
