"""A rank that dies or dawdles in the middle of a step ends the others with a clear error, within the step's deadline."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.train import scoring
from tests.models import tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

DEADLINE_S = 5.0
SEQUENCES = [[(7 * i + 3 * j) % 101 for j in range(9)] for i in range(4)]


def load(**options):
    policy = sp.load(sp.RandomInit(tiny_config("llama")), compute_dtype=torch.float32, **options)
    return policy, sp.make_optimizer(policy, lr=1e-2)


def step(policy, optimizer):
    return sp.train_step(policy, sp.Batch(SEQUENCES), optimizer, micro_batch_tokens=20, deadline_s=DEADLINE_S)


def at_the_second_block(policy, act):
    """Call `act` once, when the next forward reaches the second block."""
    pending = [act]

    def hook(module, inputs):
        if pending:
            pending.pop()()

    policy.model.model.layers[1].register_forward_pre_hook(hook)


def in_the_backward(policy, act):
    """Call `act` once, when the next backward reaches the second block."""
    pending = [act]

    def hook(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        if pending and first.requires_grad:
            first.register_hook(lambda grad: pending.pop()() if pending else None)

    policy.model.model.layers[1].register_forward_hook(hook)


def when_packed_scoring_is_tried(policy, act):
    """Call `act` once, when packed sequences are scored for the first time, to find out whether that works."""
    plain, pending = scoring.score, [act]

    def score(policy, batch, way):
        if way.packed and pending:
            pending.pop()()
        return plain(policy, batch, way)

    scoring.score = score


def die_by_exit():
    os._exit(7)


def die_by_signal():
    os.kill(os.getpid(), signal.SIGKILL)


def step_with_lost_rank(options, lost, where, how, good_steps=1):
    """Good steps, then one in which a rank is lost; (seconds until the others knew, what they were told)."""
    policy, optimizer = load(**options)
    for _ in range(good_steps):
        assert step(policy, optimizer).stepped
    if dist.get_rank() == lost:
        where(policy, how)
    started = time.monotonic()
    try:
        step(policy, optimizer)
    except sp.TrainFault as fault:
        return time.monotonic() - started, fault.code, str(fault)
    return time.monotonic() - started, None, None


@pytest.mark.parametrize(
    ("num_ranks", "options", "where", "how", "exit_code"),
    [
        (2, {"strategy": "fsdp2"}, at_the_second_block, die_by_exit, 7),
        (2, {"strategy": "fsdp1"}, at_the_second_block, die_by_signal, -9),
        (3, {"strategy": "fsdp2"}, in_the_backward, die_by_signal, -9),
        (2, {"sequence_parallel": 2}, in_the_backward, die_by_exit, 7),
    ],
    ids=["fsdp2_exits", "fsdp1_killed", "killed_in_the_backward", "sequence_parallel"],
)
def test_rank_that_dies_in_a_step(num_ranks, options, where, how, exit_code):
    lost = num_ranks - 1
    outcomes = run_ranks_outcomes(num_ranks, step_with_lost_rank, options, lost, where, how, timeout=60)
    assert outcomes[lost] == ("died", exit_code)
    for outcome in outcomes[:lost]:
        kind, (seconds, code, message) = outcome
        assert kind == "ok"
        assert code == "T308"
        assert seconds < DEADLINE_S + 2
        assert message.startswith(f"T308 train_step: rank {lost} did not answer: its process has died")
        assert "Fix: " in message


def doze():
    time.sleep(DEADLINE_S + 2)


def dawdle():
    time.sleep(3 * DEADLINE_S)


def test_rank_that_is_lost_while_ways_of_scoring_are_tried():
    """In the first step a way of scoring that fails is left for another one, but not because a rank is gone."""
    arguments = ({}, 1, when_packed_scoring_is_tried, dawdle, 0)
    kind, (seconds, code, message) = run_ranks_outcomes(2, step_with_lost_rank, *arguments, timeout=60)[0]
    assert (kind, code) == ("ok", "T308")
    assert seconds < 2 * DEADLINE_S
    assert message.startswith("T308 train_step: ranks waited for each other for more than 5 s. ")


def test_rank_that_is_slower_than_the_deadline():
    outcomes = run_ranks_outcomes(2, step_with_lost_rank, {}, 1, at_the_second_block, doze, timeout=60)
    kind, (seconds, code, message) = outcomes[0]
    assert (kind, code) == ("ok", "T308")
    assert DEADLINE_S - 1 < seconds < DEADLINE_S + 2
    assert "more than 5 s" in message
    # The slow rank finds its peers gone.
    kind, (seconds, code, _) = outcomes[1]
    assert (kind, code) == ("ok", "T308")
    assert seconds < 2 * DEADLINE_S + 4


def step_with_pause(seconds):
    policy, optimizer = load()
    if dist.get_rank() == 1:
        at_the_second_block(policy, lambda: time.sleep(seconds))
    return step(policy, optimizer).stepped


def test_rank_that_is_slow_but_within_the_deadline():
    assert run_ranks(2, step_with_pause, 1.5) == [True, True]


def timeouts_around_a_step():
    """The groups' own timeouts, before, after a step, and after a step that raised."""
    policy, optimizer = load()

    def timeout():
        group = dist.group.WORLD
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    found = [timeout()]
    step(policy, optimizer)
    found.append(timeout())
    with pytest.raises(sp.ConfigError):
        sp.train_step(policy, sp.Batch([]), optimizer, deadline_s=DEADLINE_S)
    return [*found, timeout()]


def test_the_deadline_ends_with_the_step():
    assert run_ranks(2, timeouts_around_a_step, group_timeout=77) == [[77.0] * 3] * 2


def test_ranks_work_again_afterwards():
    outcomes = run_ranks_outcomes(2, step_with_lost_rank, {}, 0, at_the_second_block, die_by_exit, timeout=60)
    assert outcomes[0] == ("died", 7)
    assert run_ranks(2, step_with_pause, 0.0) == [True, True]
