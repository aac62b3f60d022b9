"""SkyRL issue 1709: a reference loaded on the meta device gave NaN log-probs on every rank but the first.

There, the rotary frequencies were cast to bf16 on meta, got memory that nobody wrote, and were broadcast with another
dtype; with sequence parallelism every log-prob of ranks 1 to N-1 was NaN. The case here is that of the report: role
reference, both strategies, two and four ranks, length 128, two ranks a sequence, packed, inside autocast.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.train.state import training_state
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

LENGTH = 128
SEQUENCES = [[(17 * i + 5 * j * j + 3) % 101 for j in range(LENGTH)] for i in range(4)]
# bf16 keeps 8 bits: log-probs of this model near -5, from logits that pass two layers, move by a few hundredths.
NOISE = {torch.float32: 0.15, torch.bfloat16: 0.15}


@pytest.fixture(scope="module", params=["llama", "llama_tied"])
def folder(request, tmp_path_factory):
    """A checkpoint as published ones are: bf16 weights."""
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, dtype=torch.bfloat16)


@functools.cache
def plain_logprobs(folder):
    """Log-probs of a plain float32 model in one process."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = []
    for tokens in SEQUENCES:
        with torch.no_grad():
            every = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
        rows.append(every.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1))
    return rows


def score_reference(folder, strategy, compute_dtype, autocast):
    """({index: log-probs}, every buffer) of this rank."""
    reference = sp.load(
        folder,
        role="reference",
        strategy=strategy,
        compute_dtype=compute_dtype,
        sequence_parallel=2,
        progress=False,
    )
    group = dist.get_rank() // 2
    mine = list(range(len(SEQUENCES)))[group :: dist.get_world_size() // 2]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rows = sp.logprobs(reference, [SEQUENCES[i] for i in mine])
    assert training_state(reference).scoring.packed
    return dict(zip(mine, rows, strict=True)), dict(reference.model.named_buffers())


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_reference_log_probs_inside_autocast(folder, strategy, num_ranks, compute_dtype):
    expected = plain_logprobs(folder)
    ranks = run_ranks(num_ranks, score_reference, folder, strategy, compute_dtype, True)
    assert {index for rows, _ in ranks for index in rows} == set(range(len(SEQUENCES)))
    for rows, buffers in ranks:
        for index, row in rows.items():
            assert row.shape == (LENGTH - 1,)
            assert row.dtype == torch.float32
            assert torch.isfinite(row).all()
            torch.testing.assert_close(row, expected[index], rtol=0, atol=NOISE[compute_dtype])
            # Noise has no direction.
            assert abs(float((row - expected[index]).mean())) < 0.02
        for name, buffer in buffers.items():
            assert buffer.dtype == torch.float32, name
            assert torch.equal(buffer, ranks[0][1][name]), name


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_reference_log_probs_in_float32(folder, strategy, num_ranks):
    expected = plain_logprobs(folder)
    for rows, _ in run_ranks(num_ranks, score_reference, folder, strategy, torch.float32, False):
        for index, row in rows.items():
            torch.testing.assert_close(row, expected[index], rtol=0, atol=2e-5)
