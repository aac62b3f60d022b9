"""Batches: their columns, how they are spread over micro-batches, and the weights that make the split not matter."""

import math
import random

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.dist.collectives import exchange
from shardproof.train.batching import batch_facts, check_batch, spread
from tests.ranks import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.distributed


def make_sequences(lengths):
    return [[(7 * i + j) % 50 for j in range(length)] for i, length in enumerate(lengths)]


# Columns.


def test_columns_become_one_value_a_prediction():
    batch = sp.Batch(
        [[1, 2, 3], [4, 5]],
        mask=[[0, 1], [1]],  # one per prediction
        advantages=[2.0, -1.0],  # one per sequence
        old_logps=[[9.0, 0.5, 0.25], [9.0, 0.125]],  # one per token: the first has no prediction
        ref_logps=None,
    )
    assert set(batch.columns) == {"mask", "advantages", "old_logps"}
    assert batch.flat("mask").tolist() == [0, 1, 1]
    assert batch.flat("advantages").tolist() == [2, 2, -1]
    assert batch.flat("old_logps").tolist() == [0.5, 0.25, 0.125]
    assert batch.lengths == [3, 2]
    assert len(batch) == 2


def test_columns_take_tensors_and_let_go_of_their_graph():
    value = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    column = sp.Batch([[1, 2, 3]], advantages=[value]).flat("advantages")
    assert column.dtype == torch.float32
    assert not column.requires_grad


def test_select_and_with_column_leave_the_batch_alone():
    batch = sp.Batch([[1, 2, 3], [4, 5], [6, 7, 8, 9]], mask=[0.0, 1.0, 1.0])
    part = batch.select([2, 0])
    assert part.sequences == [[6, 7, 8, 9], [1, 2, 3]]
    assert part.flat("mask").tolist() == [1, 1, 1, 0, 0]
    weighted = part.with_column("weights", part.masks())
    assert weighted.select([1]).flat("weights").tolist() == [0, 0]
    assert set(batch.columns) == set(part.columns) == {"mask"}
    assert len(batch.select([])) == 0


def test_without_a_mask_every_prediction_counts():
    assert [mask.tolist() for mask in sp.Batch([[1, 2, 3], [4, 5]]).masks()] == [[1, 1], [1]]
    assert sp.Batch([]).masks() == []


@pytest.mark.parametrize(
    ("sequences", "columns", "words"),
    [
        ([[1, 2], [3]], {}, ["sequence 1", "1 tokens"]),
        ([[]], {}, ["sequence 0", "0 tokens"]),
        ([[1, 2]], {"mask": []}, ["'mask'", "0 entries for 1"]),
        ([[1, 2]], {"advantages": [1.0, 2.0]}, ["'advantages'", "2 entries for 1"]),
        (
            [[1, 2], [1, 2, 3, 4]],
            {"old_logps": [[0.0], [0.0]]},
            ["'old_logps'", "sequence 1", "expected (3,)"],
        ),
        ([[1, 2, 3]], {"mask": [torch.ones(2, 1)]}, ["'mask'", "(2, 1)"]),
    ],
)
def test_columns_that_do_not_fit(sequences, columns, words):
    with pytest.raises(sp.ConfigError) as caught:
        sp.Batch(sequences, **columns)
    assert caught.value.code == "C004"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        ([1, 2, 3, 4, 5], ["sequence 1", "5 tokens", "4 positions"]),
        ([1, 10], ["sequence 1", "token 10", "vocabulary has 10"]),
        ([1, -1], ["sequence 1", "token -1"]),
    ],
)
def test_tokens_that_the_model_does_not_have(sequence, words):
    outcomes = run_ranks_outcomes(1, check_on_rank, [[1, 2], sequence])
    assert outcomes[0][:2] == ("error", "ConfigError")
    for word in ["C004", "rank 0", *words]:
        assert word in outcomes[0][2]


def check_on_rank(sequences):
    check_batch(sp.Batch(sequences), vocabulary=10, max_length=4)


def test_a_model_without_positions_takes_any_length():
    check_batch(sp.Batch([[1] * 1000]), vocabulary=10, max_length=None)


# Spreading.


def spread_on_rank(lengths_by_rank, micro_batch_tokens, one_by_one):
    batch = sp.Batch(make_sequences(lengths_by_rank[dist.get_rank()]))
    facts = exchange(batch_facts(batch, micro_batch_tokens, share=1))
    parts = spread(batch, facts, one_by_one=one_by_one)
    for part, indices in parts:
        assert part.sequences == [batch.sequences[i] for i in indices]
    return [(sum(part.lengths), indices) for part, indices in parts]


def spread_many(cases):
    return [spread_on_rank(*case) for case in cases]


def random_cases(num_ranks, count=60):
    draw = random.Random(5)
    for _ in range(count):
        lengths = [[draw.randint(2, 40) for _ in range(draw.randint(0, 12))] for _ in range(num_ranks)]
        yield lengths, draw.choice([1, 30, 64, 1000]), draw.random() < 0.2


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_spread_holds_each_sequence_once_in_as_many_micro_batches_everywhere(num_ranks):
    cases = list(random_cases(num_ranks))
    per_rank = run_ranks(num_ranks, spread_many, cases)
    for number, (lengths_by_rank, capacity, one_by_one) in enumerate(cases):
        rows = [parts[number] for parts in per_rank]
        assert len({len(row) for row in rows}) == 1
        for lengths, row in zip(lengths_by_rank, rows, strict=True):
            indices = sorted(index for _, part in row for index in part)
            assert indices == list(range(len(lengths)))
            loads = [load for load, _ in row]
            # Longest-first filling: no two micro-batches differ by more than one sequence.
            if lengths:
                assert max(loads) - min(loads) <= max(lengths)
            if one_by_one:
                assert all(len(part) <= 1 for _, part in row)
            assert sum(loads) == sum(lengths)
        if not one_by_one:
            # No more micro-batches than a first fit needs on the fullest rank.
            fullest = max(sum(lengths) for lengths in lengths_by_rank)
            most = max(len(lengths) for lengths in lengths_by_rank)
            assert max(1, math.ceil(fullest / max(capacity, 40))) <= len(rows[0]) <= max(1, most)


def test_a_large_enough_micro_batch_is_the_only_one_and_is_ordered_by_length():
    assert run_ranks(1, spread_on_rank, [[5, 9, 2]], 16, False) == [[(16, [2, 0, 1])]]


def test_a_rank_without_sequences_gets_empty_micro_batches():
    rows = run_ranks(2, spread_on_rank, [[30, 30, 30], []], 30, False)
    assert [load for load, _ in rows[0]] == [30, 30, 30]
    assert rows[1] == [(0, []), (0, []), (0, [])]


def test_a_sequence_longer_than_a_micro_batch_has_one_of_its_own():
    rows = run_ranks(1, spread_on_rank, [[50, 3, 4]], 10, False)
    assert sorted(rows[0]) == [(7, [1, 2]), (50, [0])]


def test_micro_batch_that_holds_nothing():
    outcomes = run_ranks_outcomes(2, spread_on_rank, [[3], [3]], 0, False)
    assert all(outcome[1] == "ConfigError" and "micro_batch_tokens=0" in outcome[2] for outcome in outcomes)


# Weights.


def weigh_on_rank(batches, how, share=1, **options):
    sequences, masks = batches[dist.get_rank()]
    return [
        w.tolist()
        for w in sp.weigh(sp.Batch(sequences, mask=masks), how, share=share, **options).columns["weights"]
    ]


BATCHES = [
    ([[1, 2, 3, 4], [5, 6]], [[0.0, 1.0, 1.0], [1.0]]),
    ([[7, 8, 9], [1, 2, 3]], [[1.0, 1.0], [0.0, 0.0]]),
    ([], []),
]


def test_token_mean_gives_each_counted_token_the_same():
    fifth = pytest.approx(1 / 5)
    rows = run_ranks(3, weigh_on_rank, BATCHES, "token_mean")
    assert rows == [[[0.0, fifth, fifth], [fifth]], [[fifth, fifth], [0.0, 0.0]], []]


def test_sequence_mean_gives_each_counted_sequence_the_same():
    third, sixth = pytest.approx(1 / 3), pytest.approx(1 / 6)
    rows = run_ranks(3, weigh_on_rank, BATCHES, "sequence_mean")
    assert rows == [[[0.0, sixth, sixth], [third]], [[sixth, sixth], [0.0, 0.0]], []]


def test_constant_divides_by_the_given_number():
    rows = run_ranks(3, weigh_constant, BATCHES, 8.0)
    eighth = pytest.approx(1 / 8)
    assert rows == [[[0.0, eighth, eighth], [eighth]], [[eighth, eighth], [0.0, 0.0]], []]


def weigh_constant(batches, constant):
    return weigh_on_rank(batches, "constant", constant=constant)


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("share", [1, 2])
def test_weights_sum_to_one_over_the_global_batch(how, share):
    # Ranks of one sequence-parallel group pass the same sequences.
    batches = BATCHES[:2] if share == 1 else [BATCHES[0], BATCHES[0], BATCHES[1], BATCHES[1]]
    rows = run_ranks(len(batches), weigh_on_rank, batches, how, share)
    total = sum(weight for row in rows[::share] for sequence in row for weight in sequence)
    assert total == pytest.approx(1.0)
    assert all(rows[rank] == rows[rank - rank % share] for rank in range(len(rows)))


def test_weights_when_nothing_counts():
    rows = run_ranks(1, weigh_on_rank, [([[1, 2, 3]], [[0.0, 0.0]])], "sequence_mean")
    assert rows == [[[0.0, 0.0]]]


@pytest.mark.parametrize(("how", "word"), [("constant", "needs constant="), ("mean", "how='mean'")])
def test_weights_that_cannot_be(how, word):
    (outcome,) = run_ranks_outcomes(1, weigh_on_rank, BATCHES, how)
    assert outcome[1] == "ConfigError"
    assert word in outcome[2]
