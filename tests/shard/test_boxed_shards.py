"""Shards of several boxes (experts x rows, a slice of columns) through load, export and checkpoints, bit for bit."""

import peft
import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.shard.local import LocalShard
from shardproof.shard.materialise import check_tied_copies, materialise
from shardproof.shard.serve import list_requests
from shardproof.shard.staging import Staging
from shardproof.weights.boxes import cut
from shardproof.weights.reader import open_checkpoint
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]


def boxes_of(shape, rank):
    """What one of two ranks holds: two corners of experts x rows, every other half of the columns, a range."""
    if len(shape) == 3:
        experts, rows = [(0, shape[0] // 2), (shape[0] // 2, shape[0])], [(0, 5), (5, shape[1])]
        whole = (0, shape[2])
        return [(experts[0], rows[rank], whole), (experts[1], rows[1 - rank], whole)]
    if len(shape) == 2:
        third = shape[1] // 3
        return [((0, shape[0]), ((0, third), (third, shape[1]))[rank])]
    half = shape[0] // 2
    return [((0, half), (half, shape[0]))[rank : rank + 1]]


def boxed(policy):
    """The policy's parameters as shards of boxes, in memory of their own; nothing of it is written."""
    shards = []
    for name, param in policy.named_parameters():
        boxes = boxes_of(param.shape, dist.get_rank())
        size = sum(cut(torch.empty(param.shape), box).numel() for box in boxes)
        shards.append(LocalShard.of_boxes(name, param.shape, boxes, torch.full((size,), float("nan"))))
    return shards


def held_by(policy):
    """The values of the policy's own shards."""
    return {shard.name: shard.flat.clone() for shard in policy.local_shards()}


def written_from(plan, shards, source, model):
    ledger, _ = materialise(plan, shards, source, model, Staging(torch.device("cpu")), lambda _: None)
    check_tied_copies(plan, shards, source)
    return ledger.findings(dist.get_rank())


class InOrder:
    """A source that must be asked for what was announced, in that order, as a rank without files is served."""

    def __init__(self, checkpoint, requests):
        self.checkpoint, self.requests = checkpoint, iter(requests)

    def view(self, name, box):
        assert next(self.requests) == (name, box)
        return self.checkpoint.view(name, box)

    def whole(self, name):
        assert next(self.requests) == (name, ())
        return self.checkpoint.whole(name)


def through_boxes(folder, saves, lora):
    policy = sp.load(folder, compute_dtype=torch.float32, progress=False, lora=lora)
    whole = {name: param.full_tensor() for name, param in policy.named_parameters()}
    expected, before = sp.WeightStream(policy), held_by(policy)
    streamed = {name: tensor.clone() for name, tensor in expected}

    # From the checkpoint's files, read by this rank and as another would serve them.
    shards, served = boxed(policy), boxed(policy)
    source = open_checkpoint(folder)
    assert written_from(policy.plan, shards, source, policy.model) == []
    requests = InOrder(source, list_requests(policy.plan, served))
    assert written_from(policy.plan, served, requests, policy.model) == []
    for shard, other in zip(shards, served, strict=True):
        values = torch.cat([cut(whole[shard.name], box).reshape(-1) for box in shard.boxes])
        assert torch.equal(shard.flat, values), shard.name
        assert torch.equal(other.flat, values), shard.name

    # Out again, gathered and through shared memory.
    policy.local_shards = lambda: shards
    stream = sp.WeightStream(policy, bucket_bytes=40_000)
    assert {name: torch.equal(tensor, streamed[name]) for name, tensor in stream} == dict.fromkeys(
        streamed, True
    )
    assert stream.receipt.manifest.tensors == expected.receipt.manifest.tensors
    assert stream.receipt.manifest.digests == expected.receipt.manifest.digests
    shared = sp.SharedWeights(policy)
    assert shared.write().manifest.digests == expected.receipt.manifest.digests
    shared.close()

    # From boxes to ranges through a checkpoint, and back.
    sp.save_checkpoint(saves / "boxes", policy)
    del policy.local_shards
    for shard in policy.local_shards():
        shard.flat.fill_(-7)
    sp.resume(saves / "boxes", policy)
    after = held_by(policy)
    assert all(torch.equal(after[name], before[name]) for name in before)
    sp.save_checkpoint(saves / "ranges", policy)
    filled = [shard.flat.clone() for shard in shards]
    for shard in shards:
        shard.flat.fill_(-7)
    policy.local_shards = lambda: shards
    sp.resume(saves / "ranges", policy)
    assert all(torch.equal(shard.flat, values) for shard, values in zip(shards, filled, strict=True))
    return sum(len(box) > 1 for shard in shards for box in shard.boxes)


# With init_lora_weights=False neither matrix of an adapter is zero: both are drawn, and the merge changes something.
ADAPTER = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.mark.parametrize(
    ("family", "lora"), [("qwen3_moe", None), ("gpt_oss", None), ("llama_tied", ADAPTER)]
)
def test_boxes_go_everywhere_that_ranges_go(tmp_path, family, lora):
    folder = make_checkpoint(tmp_path / "model", family)
    found = run_ranks(2, through_boxes, folder, tmp_path, lora)
    assert min(found) > 4  # boxes that are no ranges
