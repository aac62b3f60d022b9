"""What FSDP2 gathers, as it does it, against what estimates count: rows are padded to a multiple of the ranks."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.rl.sizing.model import Sharding, estimate, shape_of
from shardproof.shard.footprint import unit_bytes, unit_groups
from tests.models import tiny_config
from tests.ranks import run_ranks

NUM_EXPERTS = 2


@contextmanager
def _gathers():
    """The bytes that each all-gather inside the block receives."""
    # torch 2.13 renamed it; the old name is all that 2.11 has.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sizes = getattr(dist, name), set()

    def counted(output, *args, **options):
        sizes.add(output.nbytes)
        return gather(output, *args, **options)

    with mock.patch.object(dist, name, counted):
        yield sizes


def gathered_units():
    """(bytes that each all-gather of a forward pass received, what is counted for each unit)."""
    config = tiny_config("qwen3_moe", num_experts=NUM_EXPERTS, num_experts_per_tok=1)
    policy = sp.load(sp.RandomInit(config), compute_dtype=torch.float32, progress=False)
    with _gathers() as sizes:
        sp.logprobs(policy, [[1, 2, 3]], micro_batch_tokens=4)
    groups = unit_groups(policy.inventory, policy.plan.units)
    shards = dist.get_world_size()
    return (
        sizes,
        [unit_bytes(group, torch.float32, shards) for group in groups],
        list(map(unit_bytes, groups)),
    )


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_unit_is_counted_as_fsdp2_gathers_it(num_ranks):
    sizes, counted, whole = run_ranks(num_ranks, gathered_units)[0]
    assert sizes == set(counted)
    # Two experts over eight ranks are eight rows.
    assert (sum(counted) > 1.5 * sum(whole)) == (num_ranks == 8)


def test_an_estimate_knows_that_experts_are_padded():
    """128 experts over 512 ranks are 512 rows; FSDP1 cuts a flat unit."""
    config = tiny_config("qwen3_moe", num_experts=128, num_experts_per_tok=1)
    shape = shape_of(config, "policy")
    found = {
        strategy: [estimate(shape, Sharding(strategy), ranks, 64).gathered for ranks in (128, 512)]
        for strategy in ("fsdp2", "fsdp1")
    }
    assert found["fsdp2"][1] > 3 * found["fsdp2"][0]
    assert found["fsdp1"][1] == found["fsdp1"][0]
