"""Packed attention that lets sequences see each other is not used, however little they say to each other."""

import math

import pytest
import torch

import shardproof as sp
from shardproof.model import attention
from shardproof.rollout.paged import proof
from shardproof.train.forward import Scoring
from shardproof.train.probe import Yardstick
from shardproof.train.state import training_state
from tests.models import EXTRA_FAMILIES, FAMILIES, tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

PACKED_FAMILIES = [family for family in FAMILIES + EXTRA_FAMILIES if family != "phi3"]
SOME_FAMILIES = ["llama", "qwen3_moe", "gemma2", "gpt2", "granitemoe"]
SEQUENCES = [[(7 * i + 3 * j * j) % 101 for j in range(n)] for i, n in enumerate((9, 14, 14, 5))]


def load(family, dtype, initializer_range, **options):
    config = tiny_config(family, initializer_range=initializer_range)
    return sp.load(sp.RandomInit(config), compute_dtype=dtype, progress=False, **options)


def without_borders(attend, query, key, value, packing, *args):
    """What `_by_sequence` would be if it took all tokens for one sequence."""
    return attend(query, key, value, *args)


def without_one_border(attend, query, key, value, packing, *args):
    """Only the last two sequences see each other."""
    start = packing.borders[-3]
    parts = [(a, b) for a, b in packing.spans() if b <= start] + [(start, packing.borders[-1])]
    return torch.cat([attend(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], *args) for a, b in parts], 2)


def in_one_layer(attend, query, key, value, packing, *args):
    """Every second call, hence every second layer, ignores borders."""
    in_one_layer.calls += 1
    if in_one_layer.calls % 2:
        return IN_ORDER(attend, query, key, value, packing, *args)
    return without_borders(attend, query, key, value, packing, *args)


in_one_layer.calls = 0
IN_ORDER = attention._by_sequence
FAULTS = {"no borders": without_borders, "one border less": without_one_border, "one layer": in_one_layer}


def score_with(fault, families, dtype, initializer_range, role="policy"):
    """{family: (is it packed, how far its scores are from those of the model's own forward)}."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            patch.setattr(attention, "_by_sequence", FAULTS[fault])
        for family in families:
            policy = load(family, dtype, initializer_range, role=role)
            score_of = sp.values if role == "critic" else sp.logprobs
            rows = torch.cat(score_of(policy, SEQUENCES))
            is_packed = training_state(policy).scoring.packed
            training_state(policy).scoring = Scoring("eager", False, "")
            found[family] = (is_packed, float((torch.cat(score_of(policy, SEQUENCES)) - rows).abs().mean()))
    return found


@pytest.mark.parametrize("initializer_range", [0.1, 0.02])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_attention_across_borders_is_not_used(fault, dtype, initializer_range):
    (found,) = run_ranks(1, score_with, fault, SOME_FAMILIES, dtype, initializer_range)
    expected = dict.fromkeys(SOME_FAMILIES, False)
    assert {family: is_packed for family, (is_packed, _) in found.items()} == expected
    assert max(error for _, error in found.values()) < (0.01 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("dtype", "initializer_range", "families"),
    [
        (torch.bfloat16, 0.02, PACKED_FAMILIES),
        (torch.bfloat16, 0.5, PACKED_FAMILIES),
        (torch.bfloat16, 0.001, SOME_FAMILIES),
        (torch.float32, 0.5, SOME_FAMILIES),
        (torch.float32, 0.001, SOME_FAMILIES),
        (torch.float16, 0.02, SOME_FAMILIES),
    ],
    ids=lambda value: (
        "all" if value is PACKED_FAMILIES else "some" if isinstance(value, list) else str(value)
    ),
)
def test_attention_that_is_right_is_used(dtype, initializer_range, families):
    (found,) = run_ranks(1, score_with, None, families, dtype, initializer_range)
    assert [family for family, (is_packed, _) in found.items() if not is_packed] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_critics(fault, dtype):
    families = ["llama", "qwen3_moe"]
    (found,) = run_ranks(1, score_with, fault, families, dtype, 0.1, "critic")
    assert [is_packed for is_packed, _ in found.values()] == [fault is None] * 2


def score_in_a_group(fault):
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            patch.setattr(attention, "_by_sequence", FAULTS[fault])
        policy = load("qwen3", torch.bfloat16, 0.02, sequence_parallel=2)
        sp.logprobs(policy, SEQUENCES)
        return training_state(policy).scoring.packed


def test_sequence_parallelism_without_borders_is_refused():
    assert run_ranks(2, score_in_a_group, None) == [True, True]
    for kind, error, message in run_ranks_outcomes(2, score_in_a_group, "no borders"):
        assert (kind, error) == ("error", "TrainFault")
        assert message.startswith("T303") and "average" in message


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scores_that_are_not_numbers_agree_with_nothing(dtype, has_experts):
    truth = torch.linspace(-5, -1, 44)
    yardstick = Yardstick(truth, 0.5, dtype, has_experts)
    assert yardstick.error(truth) is None and yardstick.leak(0.0) is None
    assert yardstick.error(truth.where(torch.arange(44) != 7, math.nan)) is not None
    assert yardstick.leak(math.nan) is not None
    assert Yardstick(truth, math.nan, dtype, has_experts).leak(0.0) is not None


@pytest.mark.parametrize("has_experts", [False, True])
def test_steps_that_are_not_numbers_agree_with_nothing(has_experts):
    right, wrong = torch.zeros(3, 5), torch.zeros(3, 5)
    wrong[2, 4] = math.nan
    assert proof.judge([right, right], 1.0, has_experts) is None
    assert proof.judge([right, wrong], 1.0, has_experts) is not None
    assert proof.judge([right, right], math.nan, has_experts) is not None
