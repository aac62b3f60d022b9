"""Only some ranks see the checkpoint: the others are sent their slices, and hold what they would have read."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.dist.hosts import Hosts
from shardproof.shard import serve
from shardproof.shard.staging import Staging
from shardproof.weights.reader import Checkpoint
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.several_hosts import pretend_hosts
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = pytest.mark.distributed

NOWHERE = "/no/such/folder"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{family: folder}, each made once."""
    families = ("llama", "qwen3_moe", "llama_tied")
    return {family: make_checkpoint(tmp_path_factory.mktemp(family), family) for family in families}


def full_state(policy):
    """{name: whole parameter or persistent buffer}. Collective: every rank."""
    if policy.strategy == "fsdp2":
        state = {
            name: param.full_tensor() if isinstance(param, DTensor) else param
            for name, param in policy.named_parameters()
        }
        return {name: param.detach().clone() for name, param in state.items()}
    with FullyShardedDataParallel.summon_full_params(policy.module, writeback=False):
        return {name: param.detach().clone() for name, param in policy.named_parameters()}


def differing_names(policy, folder):
    """Names whose values are not those of from_pretrained."""
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    state = full_state(policy)
    assert state.keys() == expected.keys()
    return [name for name, value in state.items() if not torch.equal(value, expected[name])]


def load_served(folder, readers, strategy, bucket_bytes=None, **options):
    """Load with the files on `readers` alone; (differing names, served_by, bytes read, bytes of the shard)."""
    source = folder if dist.get_rank() in readers else NOWHERE
    with pytest.MonkeyPatch.context() as patch:
        if bucket_bytes is not None:
            patch.setattr(serve, "_BUCKET_BYTES", bucket_bytes)
        policy = sp.load(source, strategy=strategy, compute_dtype=torch.float32, **options)
    receipt = policy.receipt
    return differing_names(policy, folder), receipt.served_by, receipt.bytes_read, receipt.shard_bytes


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "llama_tied"])
def test_ranks_without_files_hold_what_the_checkpoint_holds(checkpoints, family, num_ranks, strategy):
    results = run_ranks(num_ranks, load_served, checkpoints[family], [0], strategy)
    assert [differing for differing, *_ in results] == [[]] * num_ranks
    assert [served_by for _, served_by, *_ in results] == [None] + [0] * (num_ranks - 1)
    for _, _, bytes_read, shard_bytes in results:
        assert bytes_read == shard_bytes


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("bucket_bytes", [1, 20_000])
def test_buckets_smaller_than_the_model(checkpoints, bucket_bytes, strategy):
    results = run_ranks(3, load_served, checkpoints["qwen3_moe"], [0], strategy, bucket_bytes)
    assert [differing for differing, *_ in results] == [[], [], []]


@pytest.mark.parametrize(("readers", "served_by"), [([1], [1, None, 1]), ([1, 2], [1, None, None])])
def test_any_rank_can_serve(checkpoints, readers, served_by):
    results = run_ranks(3, load_served, checkpoints["llama"], readers, "fsdp2")
    assert [differing for differing, *_ in results] == [[], [], []]
    assert [result[1] for result in results] == served_by


def test_no_rank_is_served_when_all_have_the_files(checkpoints):
    results = run_ranks(2, load_served, checkpoints["llama"], [0, 1], "fsdp2")
    assert [result[1] for result in results] == [None, None]


def load_logits(folder, readers, strategy):
    source = folder if dist.get_rank() in readers else NOWHERE
    policy = sp.load(source, role="reference", strategy=strategy, compute_dtype=torch.float32)
    tokens = torch.arange(1, 13).view(1, -1)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
        return torch.equal(policy.module(tokens).logits, expected)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "llama_tied"])
def test_logits_of_served_ranks(checkpoints, family, strategy):
    assert run_ranks(2, load_logits, checkpoints[family], [0], strategy) == [True, True]


def load_served_in_parts(folder):
    """Fill each shard in two parts, as it is on a device, where shards pass through staging buffers."""

    def halves(memory, dtype):
        middle = memory.numel() // 2
        return [(a, b) for a, b in ((0, middle), (middle, memory.numel())) if a < b]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "parts", staticmethod(halves))
        policy = sp.load(folder if dist.get_rank() == 0 else NOWHERE, compute_dtype=torch.float32)
    return differing_names(policy, folder)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_shards_that_are_filled_in_parts(checkpoints, family):
    assert run_ranks(2, load_served_in_parts, checkpoints[family]) == [[], []]


# Faults.


def load_with_failing_server(folder, name, failing_ranks, bucket_bytes):
    """Rank 0 cannot read one tensor when it reads for `failing_ranks`."""
    serving, begun = [dist.get_rank()], [0]
    real_view, real_buckets = Checkpoint.view, serve._buckets

    def view(self, wanted, box):
        if dist.get_rank() == 0 and wanted == name and serving[0] in failing_ranks:
            raise OSError("the disk went away")
        return real_view(self, wanted, box)

    def buckets(requests, checkpoint):
        begun[0] += 1
        rank = begun[0]  # rank 0 begins to serve ranks 1, 2, ... in this order
        for bucket in real_buckets(requests, checkpoint):
            serving[0] = rank
            yield bucket

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "view", view)
        patch.setattr(serve, "_buckets", buckets)
        patch.setattr(serve, "_BUCKET_BYTES", bucket_bytes)
        sp.load(folder if dist.get_rank() == 0 else NOWHERE, compute_dtype=torch.float32)


@pytest.mark.parametrize("bucket_bytes", [1000, 2**26], ids=["small_buckets", "one_bucket"])
@pytest.mark.parametrize(
    ("num_ranks", "failing_ranks"),
    [(2, [0, 1]), (3, [0, 1, 2]), (3, [1]), (3, [2])],
    ids=str,
)
def test_server_whose_read_fails(checkpoints, num_ranks, failing_ranks, bucket_bytes):
    outcomes = run_ranks_outcomes(
        num_ranks,
        load_with_failing_server,
        checkpoints["llama"],
        "model.layers.1.mlp.down_proj.weight",
        failing_ranks,
        bucket_bytes,
        timeout=30,
        group_timeout=5,
    )
    assert_all_raise(outcomes, "L100", "rank 0: OSError: the disk went away")


def load_with_failing_receiver(folder):
    """Rank 1 fails in the middle of what it is sent."""
    real = serve.ServedSource.view
    num_views = [0]

    def view(self, name, box):
        num_views[0] += 1
        if dist.get_rank() == 1 and num_views[0] == 3:
            raise MemoryError("no room")
        return real(self, name, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "_BUCKET_BYTES", 1000)
        patch.setattr(serve.ServedSource, "view", view)
        sp.load(folder if dist.get_rank() == 0 else NOWHERE, compute_dtype=torch.float32)


def test_receiver_that_fails(checkpoints):
    outcomes = run_ranks_outcomes(
        3, load_with_failing_receiver, checkpoints["llama"], timeout=30, group_timeout=5
    )
    assert_all_raise(outcomes, "L100", "rank 1: MemoryError: no room")


def test_rank_whose_broken_copy_is_not_replaced_by_service(checkpoints, tmp_path):
    broken = shutil.copytree(checkpoints["llama"], tmp_path / "broken")
    next(iter(broken.glob("*.safetensors"))).unlink()
    outcomes = run_ranks_outcomes(2, load_own, checkpoints["llama"], broken)
    assert_all_raise(outcomes, "L102")


def load_own(*folders, **options):
    sp.load(folders[dist.get_rank()], **options)


def load_remote_code(folder):
    load_own(folder, NOWHERE, trust_remote_code=True)


def test_code_of_a_repository_is_not_served(checkpoints):
    assert_all_raise(run_ranks_outcomes(2, load_remote_code, checkpoints["llama"]), "L108", "[1]")


def load_served_on_hosts(folder, letters, readers, config_only):
    """As `load_served`, with ranks on several hosts; other ranks have config and tokenizer alone, or nothing."""
    mine = folder if dist.get_rank() in readers else config_only or NOWHERE
    with pretend_hosts(letters):
        policy = sp.load(mine, compute_dtype=torch.float32)
        differing = differing_names(policy, folder)
    return differing, policy.receipt.served_by


@pytest.mark.parametrize("has_config", [True, False])
def test_a_rank_is_served_on_its_own_host_and_else_by_readers_in_turn(checkpoints, tmp_path, has_config):
    config_only = shutil.copytree(
        checkpoints["llama"],
        tmp_path / "config",
        ignore=lambda _, names: [n for n in names if "safetensors" in n],
    )
    results = run_ranks(
        5, load_served_on_hosts, checkpoints["llama"], "abacc", [0, 1], config_only if has_config else None
    )
    # Rank 2 shares its host with rank 0; ranks 3 and 4 have no reader on theirs.
    assert results == [([], None), ([], None), ([], 0), ([], 1), ([], 0)]


def test_servers_take_turns():
    hosts = Hosts(("a", "b"), (0, 0, 1, 1, 1, 1))
    assert serve.choose_servers([True, True, False, False, False, False], hosts) == {2: 0, 3: 1, 4: 0, 5: 1}
    assert serve.choose_servers([True, False, True, False, False, True], hosts) == {1: 0, 3: 2, 4: 5}
    assert serve.choose_servers([True] * 6, hosts) == {}


def requests_received(folder):
    """The numbers that came to this rank as requests, and the control bytes of the load."""
    counts, real = [], serve.receive_bytes

    def counted(rank, dtype):
        counts.append((rank, dtype is torch.int64))
        return real(rank, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "receive_bytes", counted)
        sp.load(folder if dist.get_rank() == 1 else NOWHERE, compute_dtype=torch.float32)
    return counts


def test_requests_go_to_the_server_alone(checkpoints):
    assert run_ranks(3, requests_received, checkpoints["llama"]) == [[], [(0, True), (2, True)], []]


def load_watching_sends(folder):
    """To whom this rank sends slices, one bucket after another."""
    ranks, real = [], serve.send_bytes

    def send(content, rank):
        if content.dtype is torch.uint8:
            ranks.append((rank, content.numel()))
        real(content, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "send_bytes", send)
        patch.setattr(serve, "_BUCKET_BYTES", 8_000)
        patch.setattr(serve, "_PART", 100)
        policy = sp.load(folder if dist.get_rank() == 0 else NOWHERE, compute_dtype=torch.float32)
        assert differing_names(policy, folder) == []
    return ranks


def test_a_server_sends_a_bucket_to_each_rank_in_turn(checkpoints):
    sent = run_ranks(3, load_watching_sends, checkpoints["llama"])[0]
    assert max(size for _, size in sent) <= 8_000
    assert [rank for rank, _ in sent[:6]] == [1, 2, 1, 2, 1, 2]
