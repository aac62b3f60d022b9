"""`reshard_after_forward=False`: parameters are gathered once per step, and never used after they have changed."""

import contextlib
from unittest import mock

import peft
import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

import shardproof as sp
from shardproof.train import staying
from shardproof.train.state import training_state
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.shard.test_serve import full_state
from tests.train.test_recompute import PLENTY, Watched, assert_same_run, load, steps, train

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

NUM_UNITS = 3  # two blocks and the root
NUM_MICRO_BATCHES = 2


@contextlib.contextmanager
def counting_gathers():
    """A mock that is called for every gather of a unit."""
    gather = _fsdp_param_group.foreach_all_gather
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", side_effect=gather) as counted:
        yield counted


def are_shards(policy):
    """Whether parameters are shards as they stand, without anything's being given up to look at them."""
    return all(isinstance(param, DTensor) for param in policy.module.parameters())


def gathers_of_a_step(folder, options):
    """(gathers of a second step, of scoring in two micro-batches), and whether shards are left after each."""
    policy = load(folder, options)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    steps(policy, optimizer, 1)
    found = []
    for work in (
        lambda: steps(policy, optimizer, 1),
        lambda: sp.logprobs(policy, [[1, 2, 3], [4, 5, 6]], micro_batch_tokens=3),
    ):
        with counting_gathers() as counted:
            work()
        found.append(counted.call_count)
        assert are_shards(policy)
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_once_a_step(tmp_path, family):
    folder = str(make_checkpoint(tmp_path, family))
    held = run_ranks(2, gathers_of_a_step, folder, {"reshard_after_forward": False})
    assert held == [[NUM_UNITS, NUM_UNITS]] * 2
    given_up = run_ranks(2, gathers_of_a_step, folder, {})
    # The root stays until the backward pass in any case, and where there is none.
    in_a_step = NUM_MICRO_BATCHES * (2 * NUM_UNITS - 1)
    assert given_up == [[in_a_step, NUM_MICRO_BATCHES * (NUM_UNITS - 1) + 1]] * 2


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_tied", {}),
        ("qwen3_moe", {"checkpoint_activations": True}),
        ("qwen3", {"sequence_parallel": 2}),
        ("qwen3", {"lora": peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)}),
        ("qwen3", {"cpu_offload": True}),
    ],
    ids=["tied", "moe, recomputed", "sequence parallel", "lora", "offloaded"],
)
def test_no_number_changes(tmp_path, family, options):
    folder = str(make_checkpoint(tmp_path, family))
    expected = run_ranks(2, train, folder, options)
    assert_same_run(run_ranks(2, train, folder, {**options, "reshard_after_forward": False}), expected)


def fail_and_go_on(folder):
    """A loss that raises in the second micro-batch; then other weights, written into the shards."""
    policy = load(folder, {"reshard_after_forward": False})
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    calls = []

    def breaks(scored, columns):
        calls.append(None)
        if len(calls) == 2:
            raise ZeroDivisionError
        return -scored.logps, {}

    with contextlib.suppress(ZeroDivisionError):
        steps(policy, optimizer, 1, loss=sp.Loss("breaks", breaks))
    assert len(calls) == 2
    left_shards = are_shards(policy)
    with torch.no_grad():
        for param in policy.parameters():
            param.mul_(0.5)
    return left_shards, sp.logprobs(policy, [[1, 2, 3, 4]])[0], full_state(policy)


def test_a_step_that_raises_leaves_nothing_that_is_old(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    found = run_ranks(2, fail_and_go_on, str(folder))
    assert all(left_shards for left_shards, *_ in found)
    policy = run_ranks(1, score_halved, str(folder))[0]
    for _, logps, _ in found:
        torch.testing.assert_close(logps, policy)


def score_halved(folder):
    policy = load(folder, {})
    with torch.no_grad():
        for param in policy.parameters():
            param.mul_(0.5)
    return sp.logprobs(policy, [[1, 2, 3, 4]])[0]


def gathers_with(folder, strategy, free, options):
    """Gathers of a step with "auto", and `free` bytes beyond what keeping every activation takes."""
    policy = load(folder, {"strategy": strategy, "checkpoint_activations": "auto", **options})
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    training_state(policy).recompute = recompute = Watched(policy, 0)
    steps(policy, optimizer, 1)
    longest = max((row.extent for row in recompute.measured), key=lambda extent: extent.tokens)
    recompute.free = recompute.free_for(policy, optimizer, longest, 0) + free
    with counting_gathers() as counted:
        result = steps(policy, optimizer, 1)
    assert max(recompute.counts) == 0
    return counted.call_count, result, full_state(policy)


def test_auto_spends_what_is_left_on_parameters(tmp_path):
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    whole = sum(map(gathered_bytes, run_ranks(1, state_of, folder)[0].values()))
    found = {
        (free, *options): run_ranks(2, gathers_with, folder, "fsdp2", free, options)
        for free, options in ((0, {}), (whole, {}), (PLENTY, {}), (PLENTY, {"reshard_after_forward": True}))
    }
    counts = {key: [count for count, *_ in rows] for key, rows in found.items()}
    in_a_step = NUM_MICRO_BATCHES * (2 * NUM_UNITS - 1)
    assert counts == {
        (0,): [in_a_step] * 2,
        (whole,): [NUM_UNITS] * 2,
        (PLENTY,): [NUM_UNITS] * 2,
        (PLENTY, "reshard_after_forward"): [in_a_step] * 2,
    }
    expected = [row[1:] for row in found[0,]]
    for rows in found.values():
        assert_same_run([row[1:] for row in rows], expected)


def gathered_bytes(tensor):
    """Of a tensor, as two ranks gather it: rows are padded to an even number."""
    return (len(tensor) + len(tensor) % 2) * tensor[0].nbytes


def state_of(folder):
    return full_state(load(folder, {}))


def gathers_by_memory(folder, free):
    """Gathers of steps 2 to 4 on devices with so much free memory; step 3 has longer sequences than any before."""
    policy = load(folder, {})
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    memory = {
        "mem_get_info": (free, 0),
        "memory_allocated": 100,
        "max_memory_allocated": 300,
        "memory_reserved": 150,
        "get_device_properties": mock.Mock(uuid="the only one"),
    }
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(staying, "_is_open", return_value=True))
        for name, value in memory.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        for length in (5, 5, 6, 4):
            with counting_gathers() as counted:
                sp.train_step(policy, sp.Batch([list(range(1, length))] * 2), optimizer, micro_batch_tokens=3)
            found.append(counted.call_count)
    whole = sum(gathered_bytes(torch.empty(param.shape)) for param in policy.module.parameters())
    return found[1:], whole  # the first step also finds out how the model can be scored


def test_where_earlier_steps_left_room(tmp_path):
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    given_up = NUM_MICRO_BATCHES * (2 * NUM_UNITS - 1)
    (found, whole), _ = run_ranks(2, gathers_by_memory, folder, 0)
    assert found == [given_up] * 3
    # Two ranks share the device: each needs what steps have used beside what it holds, and the whole model.
    found, _ = zip(*run_ranks(2, gathers_by_memory, folder, 2 * (whole + 150)), strict=True)
    assert found == ([NUM_UNITS, given_up, NUM_UNITS],) * 2
    found, _ = zip(*run_ranks(2, gathers_by_memory, folder, 2 * (whole + 150) - 1), strict=True)
    assert found == ([given_up] * 3,) * 2
