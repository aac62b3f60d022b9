"""What must not happen while a policy's weights are being copied, or are not there."""

import pytest
import torch.distributed as dist

import shardproof as sp
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import ShardedEngine
from shardproof.rollout.trajectory import Trajectory
from shardproof.shard.offload import HostCopy
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise
from tests.train.test_step_faults import everything, load, my_batch

pytestmark = [pytest.mark.distributed, pytest.mark.fault]


def watch_changes(policy, look):
    """What `look` sees each time the policy is about to change, as a save that still copies would."""
    seen = []
    policy.before_change_hooks.append(lambda: seen.append(look()))
    return seen


def step_while_a_save_stages(strategy):
    """(what the save copies, what there was at its begin, what there is after the step)."""
    policy = load(strategy=strategy)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    begin = everything(policy, optimizer, None)[0]
    seen = watch_changes(policy, lambda: everything(policy, optimizer, None)[0])
    sp.train_step(policy, my_batch(), optimizer)
    return seen, begin, everything(policy, optimizer, None)[0]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_step_waits_for_a_save_that_knows_no_optimizer(strategy):
    for seen, begin, end in run_ranks(2, step_while_a_save_stages, strategy):
        assert seen == [begin]
        assert end != begin


def offload_while_a_save_stages():
    policy = load()
    seen = watch_changes(policy, lambda: policy.offloaded)
    policy.offload()
    return seen


def test_offloading_waits_for_a_save():
    assert run_ranks(1, offload_while_a_save_stages) == [[None]]


def ask_an_offloaded_policy(what, folder):
    """Ask for `what` while rank 1 alone is offloaded. The storages stay; that they are empty needs another device."""
    policy = load()
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    sp.train_step(policy, my_batch(), optimizer)
    sp.save_checkpoint(folder, policy, optimizer)
    if dist.get_rank() == 1:
        policy.offloaded = HostCopy([], policy.local_shards())
    before = everything(policy, optimizer, None)
    try:
        {
            "score": lambda: sp.logprobs(policy, [[1, 2, 3]]),
            "step": lambda: sp.train_step(policy, my_batch(), optimizer),
            "save": lambda: sp.save_checkpoint(folder, policy, optimizer, step=9),
            "resume": lambda: sp.resume(folder, policy, optimizer),
            "generate": lambda: generate(
                ShardedEngine(policy), [Request(Trajectory.of_prompt((1, 2)), 0)], Sampling(2)
            ),
        }[what]()
    finally:
        assert before == everything(policy, optimizer, None)


@pytest.mark.parametrize("what", ["score", "step", "save", "resume", "generate"])
def test_an_offloaded_policy_is_refused_on_every_rank(what, tmp_path):
    outcomes = run_ranks_outcomes(2, ask_an_offloaded_policy, what, str(tmp_path))
    assert_all_raise(outcomes, "S215", "rank 1", "is offloaded", "onload", kind="ShardFault")
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def stream_an_offloaded_policy():
    policy = load()
    digests = []
    for _ in range(2):
        stream = sp.WeightStream(policy)
        list(stream)
        digests.append(stream.receipt.digest)
        policy.offloaded = HostCopy([], policy.local_shards())
    return digests


def test_an_offloaded_policy_can_be_streamed():
    for first, second in run_ranks(2, stream_an_offloaded_policy):
        assert first == second


def attest_an_offloaded_policy():
    policy = load()
    if dist.get_rank() == 1:
        policy.offloaded = HostCopy([], policy.local_shards())
    return [(finding.code, finding.rank) for finding in sp.attest(policy)]


def test_attestation_says_that_a_policy_is_offloaded():
    assert run_ranks(2, attest_an_offloaded_policy) == [[("S215", 1)]] * 2
