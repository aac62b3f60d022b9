"""`checkpoint_activations="auto"`: as few recomputed blocks as memory asks for, and never another number."""

import bisect
import logging

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

import shardproof as sp
from shardproof.shard.memory import free_memory
from shardproof.train.recompute import Extent, Measurement, Recompute
from shardproof.train.state import training_state
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.shard.test_serve import full_state

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

NUM_BLOCKS = 4
PLENTY = 1 << 50
STEPS = 4
MICRO_BATCH_TOKENS = 40
# On either of two ranks a micro-batch of 40 tokens and a shorter one.
SEQUENCES = [[(11 * i + 5 * j * j + 3) % 101 for j in range(n)] for i, n in enumerate((40, 39, 12, 10))]
STRATEGIES = pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function from a family to the folder of its checkpoint; each is made once."""
    made = {}

    def folder_of(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = str(make_checkpoint(folder, family, num_hidden_layers=NUM_BLOCKS))
        return made[family]

    return folder_of


class Watched(Recompute):
    """Has the memory that a test gives it, and notes what it decided."""

    def __init__(self, policy, free):
        super().__init__(policy, lambda device, sharers: (self.free, 0))
        self.free = free
        self.plans = []

    def plan(self, *args):
        plan = super().plan(*args)
        self.plans.append(self.counts)
        return plan

    def free_for(self, policy, optimizer, extent, count):
        """The least free memory with which a micro-batch recomputes `count` blocks, once a step was taken."""
        budget = bisect.bisect_left(range(1 << 40), -count, key=lambda b: -self.min_recomputed(extent, b))
        beside = self._beside(policy, extent, training_state(policy).scoring)
        return budget + self._unallocated(policy, optimizer) + beside


def load(folder, options):
    return sp.load(folder, **{"compute_dtype": torch.float32, "progress": False, **options})


def steps(policy, optimizer, num_steps, **how):
    group, num_groups = (x // policy.sequence_parallel for x in (dist.get_rank(), dist.get_world_size()))
    batch = sp.Batch(SEQUENCES[group::num_groups])
    how = {"micro_batch_tokens": MICRO_BATCH_TOKENS, **how}
    return [sp.train_step(policy, batch, optimizer, **how) for _ in range(num_steps)]


def train(folder, options, how=None):
    """A few steps with a fixed choice of blocks: results and weights."""
    policy = load(folder, options)
    results = steps(policy, sp.make_optimizer(policy, lr=1e-2), STEPS, **(how or {}))
    return results, full_state(policy)


def train_auto(folder, options, free, how=None):
    """The same with "auto" and `free` bytes of memory; `free` is of each rank, or how many blocks shall be recomputed."""
    policy = load(folder, {**options, "checkpoint_activations": "auto"})
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    training_state(policy).recompute = recompute = Watched(policy, 0)
    results = steps(policy, optimizer, 1, **(how or {}))
    if isinstance(free, list):
        recompute.free = free[dist.get_rank()]
    else:
        longest = max((row.extent for row in recompute.measured), key=lambda extent: extent.tokens)
        recompute.free = recompute.free_for(policy, optimizer, longest, free["recomputed"])
    results += steps(policy, optimizer, STEPS - 1, **(how or {}))
    return results, full_state(policy), recompute.plans


def assert_same_run(found, expected):
    """Recomputing repeats the same arithmetic, so nothing at all may differ."""
    for (results, state), (expected_results, expected_state) in zip(found, expected, strict=True):
        assert all(result.stepped for result in results)
        assert results == expected_results
        assert all(torch.equal(state[name], expected_state[name]) for name in expected_state)


# One trajectory, whatever is recomputed.


@pytest.mark.parametrize(
    ("family", "strategy"),
    [("qwen3", "fsdp1"), ("qwen3", "fsdp2"), ("qwen3_moe", "fsdp1"), ("deepseek_v3", "fsdp2")],
)
def test_what_is_recomputed_changes_no_number(checkpoints, family, strategy):
    folder, options = checkpoints(family), {"strategy": strategy}
    expected = run_ranks(2, train, folder, options)
    probe = [NUM_BLOCKS + 1] * 2
    for free, counts in (([0, 0], [NUM_BLOCKS] * 2), ([PLENTY, PLENTY], [0, 0]), ({"recomputed": 2}, None)):
        found = run_ranks(2, train_auto, folder, options, free)
        assert_same_run([row[:2] for row in found], expected)
        for *_, plans in found:
            assert plans == found[0][2]  # every rank decides alike
            assert plans[0] == probe
            if counts is not None:
                assert plans[1:] == [counts] * (STEPS - 1)
            else:
                # The shorter micro-batch fits with fewer.
                assert all(max(plan) == 2 and min(plan) < 2 for plan in plans[1:])


@STRATEGIES
def test_balancing_loss_and_routing_hold_where_some_blocks_are_recomputed(checkpoints, strategy):
    folder, how = checkpoints("qwen3_moe"), {"router_coef": 0.7}
    expected = run_ranks(2, train, folder, {"strategy": strategy}, how)
    found = run_ranks(2, train_auto, folder, {"strategy": strategy}, {"recomputed": 3}, how)
    assert_same_run([row[:2] for row in found], expected)
    assert max(found[0][2][-1]) == 3


@pytest.mark.parametrize(
    ("family", "sequence_parallel", "strategy"),
    [("qwen3", 1, "fsdp2"), ("qwen3", 2, "fsdp1"), ("qwen3_moe", 1, "fsdp1"), ("qwen3_moe", 2, "fsdp2")],
)
def test_ranks_with_different_memory_decide_alike(checkpoints, family, sequence_parallel, strategy):
    """In a sequence-parallel group a recompute exchanges tokens: a rank that did it alone would wait for ever."""
    folder, options = checkpoints(family), {"strategy": strategy, "sequence_parallel": sequence_parallel}
    expected = run_ranks(2, train, folder, options)
    found = run_ranks(2, train_auto, folder, options, [PLENTY, 0], timeout=60)
    assert_same_run([row[:2] for row in found], expected)
    for *_, plans in found:
        assert {count for plan in plans[1:] for count in plan} == {NUM_BLOCKS}


@STRATEGIES
def test_adapters_train_alike(checkpoints, strategy):
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    folder, options = checkpoints("qwen3"), {"lora": lora, "strategy": strategy}
    expected = run_ranks(2, train, folder, {**options, "checkpoint_activations": True})
    found = run_ranks(2, train_auto, folder, options, {"recomputed": 1})
    assert_same_run([row[:2] for row in found], expected)
    assert max(found[0][2][-1]) == 1


# Which blocks, and how many.


def count_calls(folder, recomputed):
    """How often each block ran in a probe and in a step after it: twice if it was recomputed."""
    policy = load(folder, {"checkpoint_activations": "auto"})
    sp.logprobs(policy, SEQUENCES)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    training_state(policy).recompute = recompute = Watched(policy, 0)
    calls = [0] * NUM_BLOCKS
    for index, block in enumerate(recompute.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    steps(policy, optimizer, 1, micro_batch_tokens=10_000)
    probed = list(calls)
    (row,) = recompute.measured
    recompute.free = recompute.free_for(policy, optimizer, row.extent, recomputed)
    steps(policy, optimizer, 1, micro_batch_tokens=10_000)
    then = [after - before for after, before in zip(calls, probed, strict=True)]
    return probed, then, [block.gradient_checkpointing for block in recompute.blocks]


def test_the_first_blocks_are_recomputed_and_the_last_of_each_kind_is_measured(checkpoints):
    probed, calls, flags = run_ranks(1, count_calls, checkpoints("qwen3"), 3)[0]
    assert probed == [2, 2, 2, 1]
    assert calls == [2, 2, 2, 1]
    assert flags == [True] * NUM_BLOCKS  # a forward outside of a step is the frugal one
    probed, calls, _ = run_ranks(1, count_calls, checkpoints("deepseek_v3"), 2)[0]
    assert probed == [1, 2, 2, 1]  # the first block is dense, the others have experts
    assert calls == [2, 2, 1, 1]


def measure(folder, strategy):
    policy = load(folder, {"strategy": strategy, "checkpoint_activations": "auto"})
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    training_state(policy).recompute = recompute = Watched(policy, 0)
    for length in (20, 40, 80):
        batch = sp.Batch([[j % 100 for j in range(length + 1)]])
        sp.train_step(policy, batch, optimizer, micro_batch_tokens=length)
    return recompute.measured


@STRATEGIES
def test_what_blocks_keep_is_measured_without_their_weights(checkpoints, strategy):
    rows = run_ranks(1, measure, checkpoints("qwen3"), strategy)[0]
    assert [row.extent for row in rows] == [Extent(n, n * n) for n in (20, 40, 80)]
    for row in rows:
        assert row.output == [4 * 32 * row.extent.tokens] * NUM_BLOCKS
        # Attention on the CPU has a kernel, so everything grows with the tokens.
        assert row.kept[0] == pytest.approx(rows[0].kept[0] * row.extent.tokens / 20, rel=0.02)


def with_measurements(*rows):
    """A decider without a model."""
    recompute = Recompute.__new__(Recompute)
    recompute.blocks = [None] * len(rows[0].kept)
    recompute.measured = list(rows)
    return recompute


ROW = Measurement(Extent(100, 10_000), kept=[50, 90, 90, 90], output=[10, 10, 10, 10])


def test_more_memory_never_means_more_recomputed_blocks():
    recompute = with_measurements(ROW)
    for extent in (Extent(100, 10_000), Extent(60, 1800), Extent(10, 20), Extent(120, 14_400)):
        counts = [recompute.min_recomputed(extent, budget) for budget in range(-10, 1000)]
        assert counts == sorted(counts, reverse=True)
        assert {counts[0], counts[-1]} == {4, 0}


def test_the_fewest_that_fit():
    recompute = with_measurements(ROW)
    # All that is kept, and the gradients of one block.
    needed = {0: 320 + 90, 1: 280 + 90, 2: 200 + 90, 3: 120 + 90}
    for count, num_bytes in needed.items():
        assert recompute.min_recomputed(ROW.extent, num_bytes) == count
        assert recompute.min_recomputed(ROW.extent, num_bytes - 1) == count + 1


def test_an_estimate_is_an_upper_bound_and_is_probed_where_it_is_far_off():
    recompute = with_measurements(ROW)
    probe = 5
    # One sequence of 100 tokens was measured; one of 200 may keep four times as much.
    assert recompute.min_recomputed(Extent(200, 40_000), 4 * 410) == 0
    assert recompute.min_recomputed(Extent(200, 40_000), 4 * 410 - 1) == probe
    # Where the probe finds twice as much, twice as much is what is reckoned with.
    recompute.measured.append(Measurement(Extent(200, 40_000), [100, 180, 180, 180], [20] * 4))
    assert recompute.min_recomputed(Extent(200, 40_000), 2 * 410) == 0
    assert recompute.min_recomputed(Extent(200, 40_000), 2 * 410 - 1) == 1
    # Two sequences of half the length.
    assert recompute.min_recomputed(Extent(100, 5_000), 410) == 0


# What is asked of a load, and of the memory.


def without_blocks(how):
    config = AutoConfig.for_model(
        "ctrl", vocab_size=101, n_positions=64, n_embd=32, dff=48, n_layer=2, n_head=4
    )
    policy = sp.load(sp.RandomInit(config), compute_dtype=torch.float32, checkpoint_activations=how)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    policy.module.eval()  # it has dropout
    return [sp.train_step(policy, sp.Batch([[1, 2, 3, 4]]), optimizer).loss for _ in range(2)]


def test_a_model_without_such_blocks_keeps_everything():
    assert run_ranks(1, without_blocks, "auto") == run_ranks(1, without_blocks, False)


def real_memory(folder):
    policy = load(folder, {"checkpoint_activations": "auto"})
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("shardproof.train.recompute")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        steps(policy, optimizer, 3)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    free, total = free_memory(policy.device, sharers=2)
    return lines, 0 < free < total


def test_the_host_has_memory_and_the_log_says_once_what_was_decided(checkpoints):
    (first, is_free), (second, _) = run_ranks(2, real_memory, checkpoints("qwen3"))
    assert is_free
    assert len(first) == 1 and first[0].startswith("activations: up to 0 of 4 blocks are recomputed")
    assert second == []
