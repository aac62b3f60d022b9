"""Several sources by weights: shares, epochs, and resuming at any position."""

import pytest

from shardproof.errors import ConfigError
from shardproof.rl.data import PromptStream, Share
from shardproof.rl.sources.mixing import BLOCK, Deal, MixedStream

SIZES, WEIGHTS = [7, 300, 40], [1.0, 5.0, 2.5]


def sources_of(rows):
    ends = [7, 307, 347]
    return [next(n for n, end in enumerate(ends) if row < end) for row in rows]


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, -3])
def test_shares_are_the_weights_to_within_one_place_of_every_block(seed):
    stream = MixedStream(SIZES, WEIGHTS, seed)
    for number in range(1, 30):
        drawn = sources_of(stream.take(BLOCK))
        for source, weight in enumerate(WEIGHTS):
            assert abs(drawn.count(source) - BLOCK * weight / sum(WEIGHTS)) < 1, number


def test_shares_converge_also_where_a_block_has_less_than_one_place():
    deal = Deal([1.0, 3000.0], 5)
    expected = [n * BLOCK / 3001 for n in (1000, 4000)]
    found = [deal.counts(n * BLOCK)[0] for n in (1000, 4000)]
    assert found == pytest.approx(expected, abs=30)


def test_counts_are_those_of_the_places():
    for weights in ([1.0], [2.0, 1.0], [0.1, 0.2, 0.7], [1.0, 0.0, 1e-3, 3.0]):
        deal, seen = Deal(weights, 11), [0] * len(weights)
        for position in range(3 * BLOCK + 7):
            if position % 37 == 0 or position % BLOCK in (0, 1, BLOCK - 1):
                assert Deal(weights, 11).counts(position) == seen
            seen[deal.at(position)] += 1


def test_each_source_has_epochs_of_its_own():
    drawn = MixedStream(SIZES, WEIGHTS, 3).take(2000)
    first = [row for row in drawn if row < 7]
    for epoch in range(len(first) // 7):
        assert sorted(first[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_it_resumes_at_any_position_whatever_is_taken_at_a_time():
    whole = MixedStream(SIZES, WEIGHTS, 9).take(700)
    assert MixedStream(SIZES, WEIGHTS, 10).take(700) != whole
    for position in (0, 1, 63, 127, 128, 129, 255, 256, 500):
        stream = MixedStream(SIZES, WEIGHTS, 9)
        stream.position = position
        taken = []
        while len(taken) < 150:
            taken += stream.take(1 + len(taken) % 7)
        assert taken[:150] == whole[position : position + 150]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_share_the_same_prompts_and_every_source_comes_to_every_rank(num_ranks):
    parts = []
    for rank in range(num_ranks):
        stream, share = MixedStream([50, 50], [1.0, 1.0], 0), Share(rank, num_ranks)
        parts.append([share.of(stream.take(12)) for _ in range(40)])
    for step, drawn in enumerate(
        MixedStream([50, 50], [1.0, 1.0], 0).take(480)[i : i + 12] for i in range(0, 480, 12)
    ):
        merged = [None] * 12
        for rank, part in enumerate(parts):
            merged[rank::num_ranks] = part[step]
        assert merged == drawn
    for part in parts:
        rows = [row for step in part for row in step]
        assert 0.35 < sum(row < 50 for row in rows) / len(rows) < 0.65


def test_one_source_is_dealt_as_ever():
    assert Deal([3.0], 1).counts(1000) == [1000]
    assert MixedStream([20], [1.0], 4).take(60) == PromptStream(20, 4).take(60)


def test_weights_that_cannot_be():
    for weights in ([0.0, 0.0], [1.0, -1.0]):
        with pytest.raises(ConfigError):
            Deal(weights, 0)
