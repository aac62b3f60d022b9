"""Exports that go wrong: every rank hears of it, by the tensor's name, and none is left waiting."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.errors import ExportFault
from shardproof.export.payload import check_entries
from shardproof.export.shared import read_shared
from shardproof.weights.box_tensor import BoxTensor
from shardproof.weights.mapping import ExportEntry
from tests.export.test_stream import collect, load, lora_config
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

NORM = "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
STRATEGIES = ("fsdp1", "fsdp2")
# Every tensor has a bucket of its own.
ONE_BY_ONE = 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


# E403: a consumer that stops.


class ConsumerError(Exception):
    pass


def consume_in_a_with(stream, stop):
    with stream:
        for index, _ in enumerate(stream):
            if index == stop:
                raise ConsumerError("the engine is gone")


def consume_in_a_loop(stream, stop):
    for index, _ in enumerate(stream):
        if index == stop:
            raise ConsumerError("the engine is gone")


def leave_a_with(stream, stop):
    with stream:
        for index, _ in enumerate(stream):
            if index == stop:
                break


def leave_a_loop(stream, stop):
    for index, _ in enumerate(stream):
        if index == stop:
            break


CONSUMERS = {
    "raises in a with": consume_in_a_with,
    "raises in a loop": consume_in_a_loop,
    "leaves a with": leave_a_with,
    "leaves a loop": leave_a_loop,
}


def consume(folder, how, cases, options):
    """For each case: what this rank's consumer came to, whether a whole export works afterwards, and the receipt.

    A case has, for each rank, the tensor at which it stops, or None.
    """
    policy = load(folder, **options)
    before = collect(policy)[2].digest
    found = []
    for stops in cases:
        # Kept, as a caller's variable keeps it: what ends the iteration is leaving the loop, not losing the stream.
        stream = sp.WeightStream(policy, bucket_bytes=ONE_BY_ONE, deadline_s=15)
        stop = stops[dist.get_rank()]
        try:
            CONSUMERS[how](stream, stop)
            outcome = "left" if stop is not None else "done"
        except (ConsumerError, ExportFault) as error:
            outcome = str(error)
        works_again = collect(policy, deadline_s=15)[2].digest == before
        found.append((outcome, works_again, stream.receipt))
    return found


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "merged"])
@pytest.mark.parametrize("how", CONSUMERS)
def test_a_consumer_that_stops_ends_the_others(checkpoint, how, adapters):
    options = {"lora": lora_config(target_modules="all-linear")} if adapters else {}
    # At the first of 21 tensors, in the middle, and at the last, when nothing is left to gather.
    cases = [[None, stop, None] for stop in (0, 7, 20)]
    replies = run_ranks(3, consume, checkpoint, how, cases, options, timeout=60, group_timeout=20)
    for rank, found in enumerate(replies):
        for outcome, works_again, receipt in found:
            if rank == 1:
                assert outcome == ("left" if how.startswith("leaves") else "the engine is gone")
            else:
                assert outcome.startswith("E403 export: rank 1: it stopped reading"), outcome
            assert works_again
            assert receipt is None


@pytest.mark.parametrize("how", ["leaves a with", "leaves a loop"])
def test_consumers_that_all_stop(checkpoint, how):
    cases = [[2, 2], [0, 9], [9, 0]]
    replies = run_ranks(2, consume, checkpoint, how, cases, {}, timeout=60, group_timeout=20)
    for rank, found in enumerate(replies):
        for stops, (outcome, works_again, _) in zip(cases, found, strict=True):
            assert works_again
            if stops[rank] == min(stops):
                assert outcome == "left"
            else:
                assert outcome.startswith(f"E403 export: rank {stops.index(min(stops))}:")


def test_a_consumer_in_another_replica(checkpoint):
    cases = [[None, None, None, 1]]
    replies = run_ranks(4, consume, checkpoint, "raises in a with", cases, {"replicas": 2})
    for rank, ((outcome, works_again, _),) in enumerate(replies):
        assert outcome == "the engine is gone" if rank == 3 else outcome.startswith("E403 export: rank 3:")
        assert works_again


# E406: a rank that is lost or late.


def lose_a_rank(folder, how):
    policy = load(folder)
    stream = sp.WeightStream(policy, bucket_bytes=ONE_BY_ONE, deadline_s=2 if how == "late" else 60)
    started = time.monotonic()
    try:
        for index, _ in enumerate(stream):
            if index == 3 and dist.get_rank() == 1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(4)
    except ExportFault as error:
        return str(error), time.monotonic() - started
    return "done", 0.0


@pytest.mark.parametrize("how", ["killed", "late"])
def test_a_rank_that_is_lost_or_late(checkpoint, how):
    first, second = run_ranks_outcomes(2, lose_a_rank, checkpoint, how, timeout=60)
    message, seconds = first[1]
    said = "rank 1 did not answer" if how == "killed" else "ranks waited for each other for more than 2 s"
    assert message.startswith(f"E406 export: {said}"), message
    assert seconds < 20
    assert second == ("died", -signal.SIGKILL) if how == "killed" else second[1][0].startswith("E40")


# E402: what is not finite.


def spoil(policy, name, value, rank):
    """Put `value` into one element of the named tensor, on a rank that holds some of it."""
    if dist.get_rank() == rank:
        tensors = {shard.name: shard.flat for shard in policy.local_shards()} | policy.persistent_buffers()
        with torch.no_grad():
            tensors[name].view(-1)[-1] = value


def export_spoilt(folder, spoils, options, how):
    policy = load(folder, **options)
    for name, value, rank in spoils:
        spoil(policy, name, value, rank)
    return dict(collect(policy, **how)[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_is_not_finite(checkpoint, strategy, value):
    options = {"strategy": strategy}
    outcomes = run_ranks_outcomes(2, export_spoilt, checkpoint, [(DOWN, value, 1)], options, {})
    assert_all_raise(outcomes, "E402", "rank 1", repr(DOWN), "allow_nonfinite", kind="ExportFault")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_infinities_that_cancel_are_seen(checkpoint, strategy):
    spoils = [(DOWN, float("inf"), 1), (NORM, float("nan"), 0)]
    outcomes = run_ranks_outcomes(
        2, export_spoilt, checkpoint, spoils, {"strategy": strategy}, {"bucket_bytes": 1}
    )
    assert_all_raise(outcomes, "E402", "rank 1", repr(DOWN), kind="ExportFault")


def test_a_replica_that_is_not_finite(checkpoint):
    outcomes = run_ranks_outcomes(
        4, export_spoilt, checkpoint, [(NORM, float("nan"), 3)], {"replicas": 2}, {}
    )
    assert_all_raise(outcomes, "E402", "rank 3", repr(NORM), kind="ExportFault")


def test_a_buffer_that_is_not_finite(tmp_path):
    folder = make_checkpoint(tmp_path, "deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    outcomes = run_ranks_outcomes(2, export_spoilt, folder, [(name, float("nan"), 1)], {}, {})
    assert_all_raise(outcomes, "E402", "rank 1", repr(name), kind="ExportFault")


@pytest.mark.parametrize("merge_lora", [True, False])
def test_an_adapter_that_is_not_finite(checkpoint, merge_lora):
    name = "model.layers.0.self_attn.q_proj.lora_B.default.weight"
    options = {"lora": lora_config()}
    how = {"merge_lora": merge_lora}
    outcomes = run_ranks_outcomes(2, export_spoilt, checkpoint, [(name, float("nan"), 0)], options, how)
    assert_all_raise(outcomes, "E402", "layers.0.self_attn.q_proj", kind="ExportFault")


def test_a_value_that_the_exported_dtype_cannot_hold(checkpoint):
    spoils = [(DOWN, 70_000.0, 1)]
    outcomes = run_ranks_outcomes(2, export_spoilt, checkpoint, spoils, {}, {"dtype": torch.float16})
    assert_all_raise(outcomes, "E402", "rank 1", repr(DOWN), kind="ExportFault")


def test_a_large_value_that_it_can_hold(checkpoint):
    """A sum may overflow where no element does."""
    spoils = [(DOWN, 65_000.0, 1), (NORM, 65_000.0, 1)]
    for tensors in run_ranks(2, export_spoilt, checkpoint, spoils, {}, {"dtype": torch.float16}):
        assert tensors[DOWN][-1, -1] == 65_000.0
        assert tensors[NORM][-1] == 65_000.0


def export_huge(folder):
    """Finite elements whose sum is not."""
    policy = load(folder)
    shard = next(shard for shard in policy.local_shards() if shard.name == DOWN)
    with torch.no_grad():
        shard.flat.fill_(1e38)
    return collect(policy)[2].findings


def test_a_sum_that_overflows_is_no_finding(checkpoint):
    assert run_ranks(2, export_huge, checkpoint) == [[], []]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_not_finite_and_asked_for(checkpoint, strategy):
    spoils = [(DOWN, float("nan"), 1), (NORM, float("inf"), 1)]
    options, how = {"strategy": strategy}, {"allow_nonfinite": True}
    for tensors in run_ranks(2, export_spoilt, checkpoint, spoils, options, how):
        assert {
            name: int((~torch.isfinite(t)).sum()) for name, t in tensors.items() if not t.isfinite().all()
        } == {
            DOWN: 1,
            NORM: 1,
        }
        assert tensors[NORM][-1] == float("inf")


def save_spoilt(folder, target):
    policy = load(folder)
    spoil(policy, NORM, float("nan"), 1)
    sp.save_pretrained(policy, target)


def test_a_folder_with_nan_is_not_written(checkpoint, tmp_path):
    outcomes = run_ranks_outcomes(2, save_spoilt, checkpoint, tmp_path)
    assert_all_raise(outcomes, "E402", "rank 1", repr(NORM), kind="ExportFault")
    assert list(tmp_path.iterdir()) == []


# E401: a module that was moved.


def export_moved(folder, how, rank):
    policy = load(folder)
    if dist.get_rank() == rank:
        if how == "moved":
            policy.module.to("meta")
        else:
            # The other way round, as far as a machine without an accelerator can show it.
            policy.settings = replace(policy.settings, device=torch.device("cuda"))
    sp.SharedWeights(policy).write() if how == "shared" else collect(policy)


@pytest.mark.parametrize(("how", "word"), [("moved", "meta"), ("expected elsewhere", "cuda")])
def test_a_module_that_was_moved(checkpoint, how, word):
    outcomes = run_ranks_outcomes(2, export_moved, checkpoint, how, 1)
    assert_all_raise(
        outcomes, "E401", "rank 1", "'model.embed_tokens.weight'", word, "module.to", kind="ExportFault"
    )


def test_a_module_that_was_moved_is_not_written_to_shared_memory(checkpoint):
    outcomes = run_ranks_outcomes(2, export_moved, checkpoint, "shared", 0)
    assert_all_raise(outcomes, "E401", "rank 0", "'model.embed_tokens.weight'", kind="ExportFault")


def export_again_after_a_move(folder):
    """The second export of a stream, whose layout all ranks know from the first."""
    policy = load(folder)
    stream = sp.WeightStream(policy)
    for _ in stream:
        pass
    if dist.get_rank() == 2:
        policy.module.to("meta")
    for _ in stream:
        pass


def test_a_module_that_is_moved_on_one_rank_after_an_export_is_named_on_all(checkpoint):
    outcomes = run_ranks_outcomes(4, export_again_after_a_move, checkpoint)
    assert_all_raise(outcomes, "E401", "rank 2", "'model.embed_tokens.weight'", kind="ExportFault")


def layouts_before_and_after_one_rank_changes(folder):
    """What ranks know of rank 2's rows of a tensor: at first, again, and once rank 2 holds none of them."""
    policy = load(folder)
    payload = sp.WeightStream(policy).payload
    name = policy.inventory.stored[0].name
    first, again = payload.layout(), payload.layout()
    assert again is first, "nothing changed on any rank"
    if dist.get_rank() == 2:
        payload.shards[name] = payload.shards[name].empty()
    changed = payload.layout()
    assert payload.layout() is changed
    return [[tuple(box) for box in layout.boxes[name][2]] for layout in (first, changed)]


def test_a_shard_that_changes_on_one_rank_makes_all_ranks_ask_again(checkpoint):
    outcomes = run_ranks(4, layouts_before_and_after_one_rank_changes, checkpoint)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    before, after = outcomes[0]
    assert before != after


# E404: what arrived is not what was sent.


def corrupt_shared(folder, change):
    """What a receiver says of a payload that was changed after it was sent."""
    policy = load(folder)
    weights = sp.SharedWeights(policy)
    manifest = weights.write().manifest
    received = {name: tensor.clone() for name, tensor in read_shared(weights.address)}
    if change == "one element":
        received[DOWN].view(torch.uint8).view(-1)[-1] ^= 1
    elif change == "two elements swapped":
        received[NORM][[0, 1]] = received[NORM][[1, 0]]
    elif change == "missing":
        del received[DOWN]
    elif change == "extra":
        received["model.layers.9.mlp.down_proj.weight"] = torch.zeros(1)
    elif change == "dtype":
        received[DOWN] = received[DOWN].bfloat16()
    elif change == "shape":
        received[DOWN] = received[DOWN].T.contiguous()
    dist.barrier()
    return [str(finding) for finding in manifest.compare(received.items(), receiver="vllm worker 3")]


@pytest.mark.parametrize(
    ("change", "name", "word"),
    [
        ("one element", DOWN, "differs from what was sent"),
        ("two elements swapped", NORM, "differs from what was sent"),
        ("missing", DOWN, "did not arrive"),
        ("extra", "model.layers.9.mlp.down_proj.weight", "not in the manifest"),
        ("dtype", DOWN, "torch.bfloat16"),
        ("shape", DOWN, "(48, 32), expected torch.float32 (32, 48)"),
    ],
)
def test_a_receiver_that_holds_something_else(checkpoint, change, name, word):
    for findings in run_ranks(2, corrupt_shared, checkpoint, change):
        assert len(findings) == 1
        assert findings[0].startswith("E404 verify: ")
        assert all(part in findings[0] for part in (repr(name), "vllm worker 3", word)), findings[0]


def test_a_clean_receiver_is_silent(checkpoint):
    assert run_ranks(2, corrupt_shared, checkpoint, "nothing") == [[], []]


def test_two_tensors_under_one_name():
    box = BoxTensor.of_source("a", (2,), torch.float32)
    entries = [ExportEntry(("a",), {"same": box}), ExportEntry(("b",), {"other": box, "same": box})]
    check_entries(entries[:1])
    with pytest.raises(
        ExportFault, match=r"E404 export: 'same' would be exported twice: from \('a',\) and from \('b',\)"
    ):
        check_entries(entries)
