"""The online curriculum: pools by pass rate, the same on any number of ranks, resumed exactly."""

import json
from itertools import pairwise

import pytest

from shardproof.config.data import Curriculum
from shardproof.rl.sources.pools import PoolStream

SOLVED, HALF, NEVER = (4, 4), (2, 4), (0, 4)


def stream(num=60, seed=3, sizes=None, weights=None, rates=(), **settings):
    return PoolStream(sizes or [num], weights, Curriculum(**settings), seed, rates, "rows")


def judge(row):
    """A policy that solves a third of the prompts always, a third half of the time, and a third never."""
    return (SOLVED, HALF, NEVER)[row % 3]


def run(one, num_steps, size=8):
    steps = []
    for _ in range(num_steps):
        rows = one.take(size)
        steps.append(rows)
        one.learn({row: judge(row) for row in rows})
    return steps


def test_prompts_that_nobody_measured_come_first_each_once():
    one = stream(num=40)
    assert sorted(one.take(40)) == list(range(40))
    assert one.metrics() == {"pool/easy": 0.0, "pool/useful": 1.0, "pool/hard": 0.0, "pool/measured": 0.0}


def test_shares_are_the_weights_once_all_prompts_are_measured():
    one = stream(easy=1.0, useful=2.0, hard=1.0)
    one.learn({row: judge(row) for row in range(60)})
    assert one.metrics()["pool/easy"] == one.metrics()["pool/hard"] == pytest.approx(1 / 3)
    drawn = one.take(128 * 5)
    assert [sum(row % 3 == pool for row in drawn) / len(drawn) for pool in range(3)] == pytest.approx(
        [0.25, 0.5, 0.25], abs=0.01
    )
    useful = [row for row in drawn if row % 3 == 1]
    for begin in range(0, len(useful) - 20, 20):  # in turn: the one that was drawn longest ago
        assert len(set(useful[begin : begin + 20])) == 20


def test_an_empty_pool_passes_its_places_on():
    one = stream(easy=0.0, useful=1.0, hard=0.0, rest=0.0)
    one.learn(dict.fromkeys(range(60), SOLVED))
    assert sorted(one.take(60)) == list(range(60))
    one.learn({7: HALF})  # half of what was known is kept: 0.75
    assert set(one.take(9)) == {7}


def test_a_prompt_rests_while_others_are_left():
    one = stream(easy=0.0, useful=1.0, hard=0.0, rest=0.2)
    one.learn({row: SOLVED if row != 7 else HALF for row in range(60)})
    drawn = one.take(50)
    assert [place for place, row in enumerate(drawn) if row == 7] == [0, 13, 26, 39]
    assert [len(set(drawn[n : n + 13])) for n in range(0, 39, 13)] == [13] * 3
    few = stream(num=3, rest=1.0)
    assert len(few.take(20)) == 20


def test_a_pass_rate_is_a_running_mean():
    one = stream(num=2, decay=0.5)
    one.learn({0: SOLVED, 1: (0, 0)})
    one.learn({0: NEVER})
    assert one.state()["rows"] == [[0, 0.5, one.state()["rows"][0][2]]]
    last = stream(num=2, decay=0.0)
    last.learn({0: SOLVED})
    last.learn({0: (1, 4)})
    assert last.state()["rows"][0][1] == 0.25


def test_the_order_depends_on_seed_and_measurements_alone():
    assert run(stream(), 30) == run(stream(), 30)
    assert run(stream(), 30) != run(stream(seed=4), 30)
    fine = stream()
    assert fine.take(3) + fine.take(5) == stream().take(8)


@pytest.mark.parametrize("at", [1, 7, 8, 19])
def test_a_run_resumes_exactly_from_any_step(at):
    whole = run(stream(), 30)
    first = stream()
    assert run(first, at) == whole[:at]
    ahead = first.take(8)  # drawn for a step that is not over
    state, position = json.loads(json.dumps(first.state())), first.position
    second = stream()
    second.position = position
    second.restore(state)
    for one in (first, second):
        one.learn({row: judge(row) for row in ahead})
    assert run(second, 20) == run(first, 20)


def test_measured_rates_are_where_it_begins():
    rates = [1.0, 0.5, 0.0] * 20
    one = stream(rates=rates, easy=0.0, hard=0.0)
    assert all(row % 3 == 1 for row in one.take(50))


def test_other_data_are_measured_anew(caplog):
    one = stream()
    run(one, 10)
    other = PoolStream([60], None, Curriculum(), 3, (), "other rows")
    other.restore(one.state())
    assert other.metrics()["pool/measured"] == 0.0
    assert "measured anew" in caplog.text


def test_sources_keep_their_weights():
    one = stream(sizes=[30, 30], weights=[3.0, 1.0], easy=1.0, useful=1.0, hard=1.0)
    one.learn({row: judge(row) for row in range(60)})
    drawn = one.take(128 * 4)
    assert sum(row < 30 for row in drawn) / len(drawn) == pytest.approx(0.75, abs=0.01)


def test_all_rows_are_looked_at_once_for_each_pool(monkeypatch):
    looks, oldest = [], PoolStream._oldest
    monkeypatch.setattr(PoolStream, "_oldest", lambda *given: looks.append(given[2:4]) or oldest(*given))
    stream().take(40)  # nothing is measured: two of the pools are empty
    assert sorted(looks) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("weight", [1.0, 9.0])
def test_a_prompt_of_a_small_source_rests_too(weight):
    """Its source may hold fewer prompts than the rest of all data are drawn: it came in 8 of 10 of its source's places."""
    one = stream(sizes=[40, 960], weights=[weight, 1.0], rest=0.25)
    one.learn({row: NEVER if row != 7 else HALF for row in range(40)})
    drawn = [row for row in one.take(2000) if row < 40]
    places = [place for place, row in enumerate(drawn) if row == 7]
    apart = [b - a for a, b in pairwise(places)]
    assert min(apart) >= 4 and 10 <= sum(apart) / len(apart) <= 14


def test_a_curriculum_that_begins_later_knows_nothing(caplog):
    one = stream()
    one.position = 24
    one.restore({})  # of a run without pools
    assert len(set(one.take(40))) == 40 and one.metrics()["pool/measured"] == 0.0 and not caplog.text
