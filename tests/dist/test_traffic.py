"""What a run's phases send as ranks are added: counted on real ranks, and against what docs/scaling.md carries on."""

import json
import os
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import scaling
from shardproof.dist.collectives import any_rank, exchange
from shardproof.dist.launch import spare_connections
from tests.ranks import run_ranks

MANY = 0  # bytes of messages that rank 0 gathers at first, as if the ranks were too many for any


@pytest.fixture(scope="module")
def page():
    """What docs/scaling.md shows."""
    return json.loads((scaling.ROOT / "docs" / "data" / "scaling.json").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    scaling.make_models(folder)
    return folder


def numbers_in(found: dict[str, Any], path: str = "") -> dict[str, float]:
    """The numbers of nested dicts, by the path to each."""
    numbers = {}
    for name, value in found.items():
        below = f"{path}/{name}"
        numbers |= numbers_in(value, below) if isinstance(value, dict) else {below: value}
    return numbers


@pytest.mark.distributed
def test_bytes_of_a_phase_do_not_grow_faster_than_the_ranks(models):
    counts = {
        size: scaling.summary(run_ranks(size, scaling.run_rank, "dense", str(models), None, timeout=600))
        for size in (2, 8)
    }
    for phase in scaling.PHASES:
        few, many = (counts[size]["phases"][phase] for size in (2, 8))
        assert few["collectives"] <= many["collectives"] <= 4 * few["messages"], phase
        assert 0 < many["mean"]["control"] <= 4 * few["mean"]["control"], phase
        # Rank 0 hears all the others, and sends its answers to three of them.
        assert many["rank 0"]["control"] <= (7 + 3) * few["rank 0"]["control"], phase


@pytest.mark.distributed
@pytest.mark.parametrize("model", scaling.MODELS)
def test_a_step_sends_what_the_page_says(models, page, model):
    found = scaling.summary(run_ranks(8, scaling.run_rank, model, str(models), MANY, timeout=600))["phases"]
    for phase in scaling.REPEATED:
        for whose in ("mean", "rank 0"):
            fitted = scaling.at(page["fitted"][model][phase][whose]["factors"], 8)
            assert found[phase][whose]["control"] == pytest.approx(fitted, rel=0.2), (phase, whose)


def test_the_page_shows_what_was_asked_for(page):
    assert page["problems"] == []
    assert "+dirty" not in page["environment"]["commit"]
    for model in scaling.MODELS:
        assert list(page["counts"][model]) == [str(size) for size in scaling.SIZES]
        again = numbers_in(scaling.fit_all(page["counts"][model]))
        # Another processor solves for other last bits.
        assert again == pytest.approx(numbers_in(page["fitted"][model]), rel=1e-6, abs=1e-6)
        for whose in ("mean", "rank 0"):
            carried = [page["fitted"][model][phase][whose]["carried"]["512"] for phase in scaling.REPEATED]
            assert sum(carried) < scaling.MB


def connections(num_ranks, folder):
    """Sockets that this rank opens for a group of its own and some messages, where ranks are said to be many."""
    environment = dict(os.environ)
    spare_connections(num_ranks)
    before = scaling.count_sockets()
    try:
        store = dist.FileStore(f"{folder}/store", 8)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=8)
        for _ in range(3):
            assert exchange(dist.get_rank()) == list(range(8))
            assert any_rank(dist.get_rank() == 5) == [True]
        opened = scaling.count_sockets() - before
        exchange("counted")  # a rank that has left has closed its connections
        return opened
    finally:
        os.environ.clear()
        os.environ.update(environment)


@pytest.mark.distributed
def test_many_ranks_connect_only_to_those_they_talk_to(tmp_path):
    for num_ranks in (8, 64):
        (tmp_path / str(num_ranks)).mkdir()
    few, many = (
        run_ranks(8, connections, num_ranks, str(tmp_path / str(num_ranks)), init_group=False)
        for num_ranks in (8, 64)
    )
    assert many[0] == few[0], "all talk to rank 0"
    assert all(each <= 5 < few[0] for each in many[1:]), (few, many)


def test_a_fit_finds_the_terms_that_made_it():
    points = {size: scaling.at({"log2 n": 30.0, "n": 500.0}, size) for size in (4, 8, 16, 32)}
    assert scaling.fit(points) == pytest.approx({"log2 n": 30.0, "n": 500.0})
    assert scaling.fit(dict.fromkeys((4, 8, 16), 0.0)) == {}
