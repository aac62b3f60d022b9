"""Messages of every length between few and many ranks, the same and different ones, and with errors on any rank."""

import itertools
import random
import string

import pytest
import torch
import torch.distributed as dist

from shardproof.dist.collectives import (
    any_rank,
    broadcast,
    combine,
    exchange,
    exchange_among,
    gather,
    gather_rows,
    raise_together,
    rows_on_first,
    sum_rows,
    together,
)
from shardproof.errors import fail
from shardproof.findings import Finding
from tests.ranks import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.distributed

LENGTHS = [0, 1, 40, 900, 1200, 5000, 300_000]  # from a head's inside to what goes around the ring
_NOISE = "".join(
    random.Random(0).choices(string.printable, k=max(LENGTHS))
)  # hardly shorter when it is compressed


def messages_of_all_lengths():
    rank, size = dist.get_rank(), dist.get_world_size()
    for length, letters in itertools.product(LENGTHS, ("x" * max(LENGTHS), _NOISE)):
        same = letters[:length]
        assert exchange(same) == [same] * size
        # Any one rank may say something else, or something longer.
        for odd in {0, size // 2, size - 1}:
            mine = [same, rank] if rank == odd else None
            expected = [[same, odd] if each == odd else None for each in range(size)]
            assert exchange(mine) == expected
            assert gather(mine) == (expected if rank == 0 else None)
            assert combine("rollout", mine, lambda rows: [len(rows), rows]) == [size, expected]
            assert broadcast(mine, source=odd) == expected[odd]
        different = [[r, 0.1 * r, float("inf"), "ü" + letters[: r * length // 10]] for r in range(size)]
        assert exchange(different[rank]) == different
    for length in (2, 5000):  # down a tree, and around the ring
        assert gather_rows(torch.full((length,), rank - 1)).tolist() == [
            [r - 1] * length for r in range(size)
        ]
        on_first = rows_on_first(torch.full((length,), rank))
        assert (on_first is None) == (rank > 0)
        assert on_first is None or on_first.tolist() == [[r] * length for r in range(size)]
    for share in (share for share in (1, 2, 7) if size % share == 0):
        for letters in ("x" * 5000, _NOISE):
            rows = exchange_among([rank, letters[: rank * 1000]], share)
            first = rank - rank % share
            assert rows == [[r, letters[: r * 1000]] for r in range(first, first + share)]
    for odd in range(size):
        assert any_rank(rank == odd, False, True) == [True, False, True]
    large = torch.tensor([2**62, -1, rank])
    wrapped = (size * 2**62 + 2**63) % 2**64 - 2**63
    assert sum_rows(large).tolist() == [wrapped, -size, size * (size - 1) // 2]
    rows = exchange([])
    rows[0].append(1)
    assert rows[1:] == [[]] * (size - 1), "each row is an object of its own"
    return True


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_every_rank_gets_every_message(num_ranks):
    assert all(run_ranks(num_ranks, messages_of_all_lengths))


def errors_on(culprits, how):
    """What this rank raises where some ranks have an error."""
    rank = dist.get_rank()
    if how == "together":
        with together("rollout") as message:
            message.mine = rank
            if rank in culprits:
                raise ValueError("x" * 2000 if rank % 2 else f"rank {rank} failed")
        assert message.rows == list(range(dist.get_world_size()))
    elif how == "raise_together":
        raise_together([Finding("R500", "rollout", f"rank {rank} failed")] if rank in culprits else [])
    else:
        combine("rollout", rank in culprits, _merge_or_fail)


def _merge_or_fail(rows):
    if any(rows):
        raise fail("R500", "rollout", f"rows {rows}")
    return rows


@pytest.mark.parametrize("how", ["together", "raise_together", "combine"])
@pytest.mark.parametrize("culprits", [[0], [3], [1, 4], [0, 1, 2, 3, 4]])
def test_an_error_on_any_rank_is_raised_alike_on_all(how, culprits):
    outcomes = run_ranks_outcomes(5, errors_on, culprits, how)
    assert len(set(outcomes)) == 1
    kind, name, message = outcomes[0]
    assert (kind, name) == ("error", "RolloutFault")
    for rank in culprits if how != "combine" else ():
        assert f"rank {rank}" in message or len(culprits) == 5


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_an_unforeseen_error_of_a_merge_is_one_error(num_ranks):
    outcomes = run_ranks_outcomes(num_ranks, unforeseen_merge)
    assert len(set(outcomes)) == 1
    assert outcomes[0][1] == "TrainFault" and "ZeroDivisionError" in outcomes[0][2]


def unforeseen_merge():
    combine("train_step", dist.get_rank(), lambda rows: 1 / (rows[0] * 0))
