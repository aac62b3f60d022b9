"""Conversations on CUDA: what is kept between turns changes what is read, and nothing that is drawn."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.kept import GIB, KeptTurns
from shardproof.rollout.paged import graphs
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.trajectory import Segment, Trajectory

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
_SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1000, "initializer_range": 0.05,
}  # fmt: skip
DENSE = Qwen3Config(**_SHAPE)
MOE = Qwen3MoeConfig(**_SHAPE, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128)
TURNS = 6
SAMPLING = Sampling(40, stop_ids=tuple(range(0, 1000, 40)))


def talk(decoder: PagedDecoder, kept: KeptTurns | None, rows: int = 21) -> list[Trajectory]:
    """Conversations whose turns and replies differ in length; a few end before the others."""
    going = [
        Trajectory.of_prompt(tuple((7 * row + 3 * at) % 1000 for at in range(20 + 9 * (row % 5))), row)
        for row in range(rows)
    ]
    over = []
    for turn in range(TURNS):
        if kept is not None:
            kept.begin_wave()
        requests = [Request(t, 100 * t.group + turn, turn < TURNS - 1) for t in going]
        with torch.no_grad():
            answered = decoder(requests, SAMPLING, 0, kept)
        over += answered[:2] if turn < TURNS - 1 else answered
        going = [
            t.extended(Segment(tuple((5 * at + t.group + turn) % 1000 for at in range(3 + 13 * (t.group % 4))), "environment"))
            for t in answered[2:]
        ]  # fmt: skip
    return sorted(over, key=lambda t: t.group)


def make(config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(CUDA).eval()


def test_tokens_and_log_probs_are_those_of_reading_everything_in_float32():
    model, kept = make(DENSE, torch.float32), KeptTurns(GIB)
    with_kept, without = talk(PagedDecoder(model, CUDA), kept), talk(PagedDecoder(model, CUDA), None)
    assert [t.tokens for t in with_kept] == [t.tokens for t in without]
    for one, other in zip(with_kept, without, strict=True):
        for mine, theirs in zip(one.sampled, other.sampled, strict=True):
            assert torch.allclose(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-4)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_fused_kernels_go_on_from_what_was_kept(config, monkeypatch, caplog):
    """In 16 bits the error of log-probs, against the same weights in float32, is no larger with what was kept."""
    captured: list[Any] = []
    capture = graphs.capture
    monkeypatch.setattr(graphs, "capture", lambda *given: captured.append(given) or capture(*given))
    model = make(config, torch.bfloat16)
    precise = deepcopy(model).float()
    errors = []
    for kept in (KeptTurns(GIB), None):
        decoder = PagedDecoder(model, CUDA)
        found = talk(decoder, kept)
        assert (
            decoder.ways.fused and decoder.ways.draws and decoder.ways.graphs and "without" not in caplog.text
        )
        if kept is not None:
            assert len(kept) > 0 and kept.nbytes <= kept.max_bytes
        errors.append(torch.cat([distances(precise, t) for t in found]).median())
    assert errors[0] < 1.2 * errors[1] + 1e-4
    # Graphs serve all lengths; they are made again only when the cache has grown to twice its size.
    assert len(captured) < 2 * 20
    captured.clear()
    talk(decoder, KeptTurns(GIB))
    assert len(captured) < 3  # the next step's conversations use the same


@torch.no_grad()
def distances(precise: Any, trajectory: Trajectory) -> torch.Tensor:
    ids = torch.tensor([trajectory.tokens], device=CUDA)
    scores = torch.log_softmax(precise(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]).squeeze(1).cpu()
    found, at = [], 0
    for segment in trajectory.segments:
        if segment.author == "policy":
            found.append(
                (scores[at - 1 : at - 1 + len(segment.tokens)] - torch.tensor(segment.logprobs)).abs()
            )
        at += len(segment.tokens)
    return torch.cat(found)
