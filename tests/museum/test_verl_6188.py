"""verl PR 6188 on the CPU: FSDP2 with CPUOffloadPolicy trains, exports, trains and exports again.

There the second stage crashed ("Attempted to set the storage of a tensor on device cpu to a storage on different device
cuda:0"), in the plain and in the LoRA-merged path, because the module was moved before its weights were asked for.
tests/gpu has the same on CUDA.
"""

import functools

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.digest import digest
from tests.export.test_stream import collect, load, lora_config, train
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

KINDS = {
    "full": ({}, {}),
    "merged": ({"lora": lora_config()}, {}),
    "adapter": ({"lora": lora_config()}, {"merge_lora": False}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(family):
        return make_checkpoint(tmp_path_factory.mktemp(family), family)

    return make


def train_and_export(folder, options, how):
    """Train, stream, train, stream; in between `offload` and `onload`, as a loop with a colocated engine calls them."""
    policy = load(folder, **options)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    frozen = {name for name, param in policy.named_parameters() if not param.requires_grad}
    weights = sp.SharedWeights(policy, dtype=torch.bfloat16, **how)
    before = held(policy, frozen)
    rounds = []
    for _ in range(2):
        loss = train(policy, optimizer).loss
        notes = [policy.offload(optimizer)]
        _, streamed, receipt = collect(policy, dtype=torch.bfloat16, **how)
        written = weights.write()
        notes.append(policy.onload())
        rounds.append(
            {
                "loss": loss,
                "tensors": dict(streamed),
                "digest": receipt.digest,
                "written": written.digest,
                "findings": receipt.findings + [str(f) for f in written.findings],
                "offload": [(note.num_bytes, note.note) for note in notes],
                "devices": {shard.flat.device.type for shard in policy.local_shards()},
            }
        )
    dist.barrier()
    weights.close()
    return rounds, before == held(policy, frozen), len(frozen), sp.attest(policy, optimizer)


def held(policy, names):
    return {shard.name: digest(shard.flat) for shard in policy.local_shards() if shard.name in names}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "num_ranks"), [("qwen3_tied", 1), ("llama", 2), ("qwen3_moe", 2)])
def test_train_stream_train_stream_under_cpu_offload(checkpoint, family, num_ranks, kind):
    fields, how = KINDS[kind]
    resident = run_ranks(num_ranks, train_and_export, checkpoint(family), fields, how)
    offloaded = run_ranks(
        num_ranks, train_and_export, checkpoint(family), {**fields, "cpu_offload": True}, how
    )
    for (expected, *_), (rounds, base_is_unchanged, num_frozen, findings) in zip(
        resident, offloaded, strict=True
    ):
        assert base_is_unchanged
        assert (num_frozen > 0) == bool(fields)
        assert findings == []
        for found, wanted in zip(rounds, expected, strict=True):
            assert found["loss"] == wanted["loss"]
            assert found["digest"] == wanted["digest"] == found["written"]
            assert found["tensors"].keys() == wanted["tensors"].keys()
            for name, tensor in found["tensors"].items():
                assert torch.equal(tensor, wanted["tensors"][name]), name
            assert found["findings"] == []
            assert found["devices"] == {"cpu"}
        assert rounds[0]["digest"] != rounds[1]["digest"]


@pytest.mark.parametrize(
    ("options", "why"),
    [({}, "the policy lives on the CPU"), ({"cpu_offload": True}, "cpu_offload=True")],
    ids=["on the CPU", "offloaded by FSDP"],
)
def test_offload_without_device_memory_does_nothing_and_says_so(checkpoint, options, why):
    for rounds, *_ in run_ranks(2, train_and_export, checkpoint("llama"), options, {}):
        for row in rounds:
            (offloaded, offload_note), (onloaded, onload_note) = row["offload"]
            assert (offloaded, onloaded) == (0, 0)
            assert why in offload_note
            assert onload_note == "not offloaded"


def state_dict_values(folder, options):
    """What the origin called: torch's own state dict, which on the CPU still works, and the stream after it."""
    policy = load(folder, **options)
    train(policy, sp.make_optimizer(policy, lr=1e-2))
    whole = {
        name.removeprefix("model.").removeprefix("base_model."): value.full_tensor()
        for name, value in policy.module.state_dict().items()
    }
    return whole, dict(collect(policy)[1])


def test_the_stream_is_what_the_state_dict_holds(checkpoint):
    for whole, streamed in run_ranks(2, state_dict_values, checkpoint("llama"), {"cpu_offload": True}):
        assert whole.keys() == streamed.keys()
        assert all(torch.equal(whole[name], streamed[name]) for name in whole)
