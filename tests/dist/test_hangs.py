"""Ranks that wait in different calls: the deadline's error says which rank is where, instead of a timeout."""

import contextlib
import os
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.dist import lost, places, stacks
from shardproof.dist.deadline import await_all
from tests.models import tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

SECONDS = 3.0
WAIT = lost.Wait("train_step", "T308", SECONDS)
SEQUENCES = [[5, 6, 7, 8], [9, 10, 11]]


def load():
    policy = sp.load(sp.RandomInit(tiny_config("llama")), compute_dtype=torch.float32)
    return policy, sp.make_optimizer(policy, lr=1e-3)


def go_another_way(rank_in_barrier):
    """One rank skips the step, as after a test that only it failed, and waits for the others at a barrier."""
    policy, optimizer = load()
    try:
        if dist.get_rank() == rank_in_barrier:
            wait_at_the_end_of_the_epoch()
        else:
            sp.train_step(policy, sp.Batch(SEQUENCES), optimizer, deadline_s=SECONDS)
    except (RuntimeError, sp.TrainFault) as error:
        return str(error)
    return None


def wait_at_the_end_of_the_epoch():
    with sp.deadline("epoch", seconds=2 * SECONDS):
        dist.barrier()


def test_ranks_in_different_collectives_are_told_apart():
    other = 1
    answers = run_ranks(2, go_another_way, other)
    message = answers[1 - other]
    assert message.startswith("T308 train_step: ranks waited for each other for more than 3 s. Rank 0 in ")
    assert re.search(
        rf"rank {other} in barrier: wait_at_the_end_of_the_epoch \(dist/test_hangs.py:\d+\) < go_another_way",
        message,
    )
    assert re.search(
        rf"Rank {1 - other} in all_gather: \w+ \(dist/\w+.py:\d+\) < .* < go_another_way \(dist/",
        message,
    )
    # The other rank loses its connection when the first one gives up, and says the same.
    assert answers[other] == message


def compute_for_long():
    policy, optimizer = load()
    if dist.get_rank() == 1:
        time.sleep(SECONDS + 2)
        return None
    try:
        sp.train_step(policy, sp.Batch(SEQUENCES), optimizer, deadline_s=SECONDS)
    except sp.TrainFault as error:
        return str(error)


def test_a_rank_that_is_in_no_collective_is_shown_at_its_line():
    message = run_ranks(2, compute_for_long)[0]
    assert re.search(r"rank 1 in no collective: compute_for_long \(dist/test_hangs.py:\d+\)", message)


def die_in_a_step():
    policy, optimizer = load()
    if dist.get_rank() == 1:
        policy.model.model.layers[1].register_forward_pre_hook(lambda *_: os._exit(3))
    try:
        sp.train_step(policy, sp.Batch(SEQUENCES), optimizer, deadline_s=SECONDS)
    except sp.TrainFault as error:
        return str(error)


def test_a_rank_that_died_gives_no_answer():
    outcomes = run_ranks_outcomes(3, die_in_a_step)
    assert outcomes[1] == ("died", 3)
    message = outcomes[0][1]
    assert message.startswith(
        "T308 train_step: rank 1 did not answer: its process has died or is stuck outside Python. Rank"
    )
    assert outcomes[2][1] == message
    for rank in (0, 2):
        assert re.search(rf"(?i)(rank {rank}|ranks 0, 2) in all_gather\w*: .* < die_in_a_step", message)


def skip_an_export():
    policy, _ = load()
    if dist.get_rank() == 0:
        try:
            for _ in sp.WeightStream(policy, deadline_s=SECONDS):
                pass
        except sp.ExportFault as error:
            return str(error)
    with contextlib.suppress(RuntimeError):
        dist.barrier()  # no call of this project: its lines are shown all the same


def test_an_export_that_one_rank_skips():
    message = run_ranks(2, skip_an_export)[0]
    assert message.startswith("E406 export: ranks waited for each other for more than 3 s. Rank 0 in ")
    assert re.search(r"rank 1 in barrier: skip_an_export", message)


def requests_of_steps():
    policy, optimizer = load()
    for _ in range(3):
        assert sp.train_step(policy, sp.Batch(SEQUENCES), optimizer, deadline_s=1.0).stepped
        time.sleep(0.6)  # between steps nothing is late
    return stacks.current()._number


def test_steps_in_time_request_no_stacks():
    assert run_ranks(2, requests_of_steps) == [0, 0]


def test_places_are_short_and_name_the_user():
    package = places.PACKAGE
    torch_file = f"{places.TORCH}/distributed/distributed_c10d.py"
    inner = [(f"{package}/dist/collectives.py", i, f"inner{i}") for i in range(9)]
    stack = [(torch_file, 1, "all_reduce"), *inner, ("/home/someone/run/train.py", 12, "main")]
    assert places.describe(stack) == (
        "all_reduce: inner0 (dist/collectives.py:0) < inner1 (dist/collectives.py:1) < inner2 (dist/collectives.py:2)"
        " < inner3 (dist/collectives.py:3) < main (run/train.py:12)"
    )
    begun = (f"{places.STANDARD}/multiprocessing/process.py", 108, "run")
    assert places.describe([*stack[:7], begun]).endswith(
        "inner3 (dist/collectives.py:3) < inner4 (dist/collectives.py:4)"
    )
    assert places.describe([]) == "no collective: unknown lines"


def test_many_ranks_at_one_place_are_said_once():
    answers = dict.fromkeys(range(12), "barrier: a") | {12: "all_gather: b"}
    assert lost.summarise(lost.Answers(WAIT, answers), 14) == (
        "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more in barrier: a; rank 12 in all_gather: b; rank 13 did not answer"
    )


def watch_a_store_that_is_gone():
    """Start the thread that answers requests for stacks where no new connection to the store can be made."""
    asked = threading.Event()
    released = threading.Event()

    class Gone:
        def clone(self):
            asked.set()
            assert released.wait(20), "nobody went on"

    stacks.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks, "_get_default_store", Gone)
        stacks.start()
        assert asked.wait(20)
        watch = stacks.current()
        found = watch.report(RuntimeError("connection closed by peer"), WAIT)
        released.set()
        stacks.stop()
        watch.join(20)
    return list(found.places), found.store_silent_s >= 1.0, watch.is_alive()


def test_a_store_that_is_gone_stops_no_rank():
    assert run_ranks(2, watch_a_store_that_is_gone) == [([0], True, False), ([1], True, False)]


def looked_for(seconds):
    """For how long a rank looks before it tells the others that it waits, where one needs three looks and another none."""
    looks = []

    def done(at_most):
        looks.append(at_most)
        return dist.get_rank() == 0 or len(looks) == 3

    with sp.deadline("rollout", seconds=seconds):
        await_all(done)
    return looks


@pytest.mark.parametrize("seconds", [20.0, 600.0])
def test_ranks_that_need_very_different_times_tell_each_other_well_within_the_deadline(seconds):
    for looks in run_ranks(2, looked_for, seconds):
        assert len(looks) == 3 and max(looks) <= min(seconds / 4, 60.0)
