"""`WeightStream`: out of every layout come the tensors of the family's checkpoint, and a receipt that says so."""

import ctypes
import itertools
import os
import threading

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.digest import digest
from shardproof.dist import region
from shardproof.export import gather
from shardproof.export.shared import read_shared
from tests.models import EXTRA_FAMILIES, FAMILIES, make_checkpoint, make_model, tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise
from tests.shard.test_load import (
    InterleavedConfig,
    InterleavedForCausalLM,
    local_parameters,
    register_interleaved,
    replicated_mesh,
)

pytestmark = pytest.mark.distributed

ALL_FAMILIES = FAMILIES + EXTRA_FAMILIES
# (ranks, replicas, options of load): every way a policy can lie.
LAYOUTS = {
    "fsdp1 on 1": (1, 1, {"strategy": "fsdp1"}),
    "fsdp1 on 2": (2, 1, {"strategy": "fsdp1"}),
    "fsdp1 on 3": (3, 1, {"strategy": "fsdp1"}),
    "fsdp1 on 2x2": (4, 2, {"strategy": "fsdp1"}),
    "fsdp2 on 1": (1, 1, {"strategy": "fsdp2"}),
    "fsdp2 on 2": (2, 1, {"strategy": "fsdp2"}),
    "fsdp2 on 3": (3, 1, {"strategy": "fsdp2"}),
    "fsdp2 on 2x1": (2, 2, {"strategy": "fsdp2"}),
    "fsdp2 on 2x2": (4, 2, {"strategy": "fsdp2"}),
    "offloaded on 1": (1, 1, {"strategy": "fsdp2", "cpu_offload": True}),
    "offloaded on 2": (2, 1, {"strategy": "fsdp2", "cpu_offload": True}),
}
# Layouts on fewer ranks than others of their kind, which the tests below use anyway.
SHOWN_BY_OTHERS = ("fsdp1 on 2", "fsdp2 on 2", "offloaded on 1")
SEQUENCES = [[(11 * i + 5 * j * j + 3) % 101 for j in range(9)] for i in range(4)]


def read_folder(folder):
    """{name: tensor} of every safetensors file in the folder."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def load(source, replicas=1, **options):
    mesh = replicated_mesh(replicas) if replicas > 1 else None
    return sp.load(source, mesh=mesh, compute_dtype=torch.float32, progress=False, **options)


def collect(policy, **how):
    """(the metadata, what came out, the receipt) of one run of a stream. Collective: every rank."""
    stream = sp.WeightStream(policy, **how)
    metadata = stream.metadata()
    # Cloned: what is kept beyond a step of the loop is the consumer's own.
    tensors = [(name, tensor.clone()) for name, tensor in stream]
    return metadata, tensors, stream.receipt


def describe(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors}


def differences(tensors, expected):
    """Names that one side lacks, and names whose dtype, shape or bytes differ."""
    odd = sorted(tensors.keys() ^ expected.keys())
    return odd + [
        name
        for name in sorted(tensors.keys() & expected.keys())
        if tensors[name].dtype != expected[name].dtype or not torch.equal(tensors[name], expected[name])
    ]


def lora_config(**fields):
    # With init_lora_weights=False neither matrix is zero, so that a merge which forgets one is seen.
    return peft.LoraConfig(
        **{
            "r": 3,
            "lora_alpha": 5,
            "target_modules": ["q_proj", "v_proj"],
            "init_lora_weights": False,
            **fields,
        }
    )


def train(policy, optimizer):
    mine = SEQUENCES[dist.get_rank() :: dist.get_world_size()]
    return sp.train_step(policy, sp.Batch(mine), optimizer)


# Families.


def export_families(folders, replicas, options, hows):
    """{family: [collect(...) for each of hows]}."""
    exported = {}
    for family, folder in folders.items():
        policy = load(folder, replicas, **options)
        exported[family] = [collect(policy, **how) for how in hows]
    return exported


@pytest.mark.parametrize("layout", ["fsdp1 on 2", "fsdp2 on 3"])
def test_every_family_comes_out_as_its_checkpoint(checkpoint, layout):
    folders = {family: checkpoint(family) for family in ALL_FAMILIES}
    num_ranks, replicas, options = LAYOUTS[layout]
    replies = run_ranks(
        num_ranks, export_families, folders, replicas, options, [{}, {"dtype": torch.bfloat16}]
    )
    for family, folder in folders.items():
        stored = read_folder(folder)
        for reply in replies:
            metadata, tensors, receipt = reply[family][0]
            assert {meta.name: (meta.dtype, meta.shape) for meta in metadata} == describe(stored.items()), (
                family
            )
            assert [name for name, _ in tensors] == [meta.name for meta in metadata], family
            assert differences(dict(tensors), stored) == [], family
            assert receipt.manifest.compare(stored.items()) == [], family
            assert receipt.digest == replies[0][family][0][2].digest, family

            metadata, tensors, receipt = reply[family][1]
            cast = {name: tensor if is_buffer(name) else tensor.bfloat16() for name, tensor in stored.items()}
            assert {meta.name: (meta.dtype, meta.shape) for meta in metadata} == describe(tensors), family
            assert differences(dict(tensors), cast) == [], family
            assert receipt.manifest.compare(cast.items()) == [], family


def is_buffer(name):
    return name.endswith("e_score_correction_bias")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_families_hold_persistent_buffers(checkpoint, family):
    assert any(map(is_buffer, read_folder(checkpoint(family))))


def test_checkpoint_dtype_is_that_of_the_files(checkpoint):
    """Masters are float32, the files bfloat16; buffers are what their modules make them."""
    folders = {family: checkpoint(family, dtype=torch.bfloat16) for family in ALL_FAMILIES}
    (reply,) = run_ranks(1, export_families, folders, 1, {}, [{"dtype": "checkpoint"}])
    odd = {}
    for family, folder in folders.items():
        stored = {
            name: tensor.float() if is_buffer(name) else tensor
            for name, tensor in read_folder(folder).items()
        }
        odd[family] = differences(dict(reply[family][0][1]), stored)
    assert {family: names for family, names in odd.items() if names} == {}


def test_checkpoint_dtype_goes_tensor_by_tensor(tmp_path):
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, max_shard_size="1GB")
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"].float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for reply in run_ranks(2, export_families, {"mixed": folder}, 1, {}, [{"dtype": "checkpoint"}]):
        assert differences(dict(reply["mixed"][0][1]), stored) == []


def make_interleaved(folder, dtype):
    """A checkpoint of a family with a conversion that no slice of a tensor can be put through alone."""
    register_interleaved()
    settings = {name: value for name, value in tiny_config("llama").to_dict().items() if name != "model_type"}
    model = InterleavedForCausalLM(InterleavedConfig(**settings)).to(dtype)
    model.load_state_dict(make_model("llama").state_dict())
    model.save_pretrained(folder)
    return folder


def export_interleaved(folder, strategy):
    """The stream, what lies in shared memory, and the merged stream without and with an adapter that adds nothing."""
    register_interleaved()
    policy = load(folder, strategy=strategy)
    weights = sp.SharedWeights(policy, dtype="checkpoint")
    weights.write()
    written = {name: tensor.clone() for name, tensor in read_shared(weights.address)}
    adapted = load(folder, strategy=strategy, lora=lora_config(init_lora_weights=True))
    dist.barrier()
    streams = [dict(collect(p, dtype="checkpoint")[1]) for p in (policy, adapted)]
    weights.close()
    return written, *streams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_conversion_that_needs_whole_tensors(tmp_path, strategy, dtype):
    stored = read_folder(make_interleaved(tmp_path, dtype))
    for reply in run_ranks(2, export_interleaved, tmp_path, strategy):
        for tensors in reply:
            assert differences(tensors, stored) == []


def export_random(family, how):
    return collect(load(sp.RandomInit(tiny_config(family), seed=3)), **how)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama_tied", "gpt_oss"])
def test_a_policy_that_was_never_loaded_has_its_familys_names(checkpoint, family):
    for metadata, tensors, _ in run_ranks(2, export_random, family, {"dtype": "checkpoint"}):
        assert {meta.name: (meta.dtype, meta.shape) for meta in metadata} == describe(
            read_folder(checkpoint(family)).items()
        )
        assert describe(tensors) == describe(read_folder(checkpoint(family)).items())


def test_ties_come_out_once(checkpoint):
    for reply in run_ranks(2, export_families, {"tied": checkpoint("qwen3_tied")}, 1, {}, [{}]):
        names = [name for name, _ in reply["tied"][0][1]]
        assert names.count("model.embed_tokens.weight") == 1
        assert "lm_head.weight" not in names


# Layouts.


def export_everything(folders, replicas, options):
    """{family: digests and tensors of the full, the merged and the adapter export}, after a training step.

    Also which shards changed while being exported.
    """
    exported = {}
    for family, folder in folders.items():
        full = collect(load(folder, replicas, **options), bucket_bytes=10_000)
        policy = load(folder, replicas, lora=lora_config(), **options)
        before = {shard.name: digest(shard.flat) for shard in policy.local_shards()}
        devices = {name: local.device for name, local in local_parameters(policy).items()}
        addresses = {shard.name: shard.flat.data_ptr() for shard in policy.local_shards()}
        adapter = collect(policy, merge_lora=False)
        merged = [collect(policy, bucket_bytes=size) for size in (1, 10_000, 2**28)]
        after = {shard.name: digest(shard.flat) for shard in policy.local_shards()}
        exported[family] = {
            "full": full,
            "adapter": adapter,
            "merged": merged[0],
            "same in every bucket": len({receipt.digest for _, _, receipt in merged}) == 1,
            "changed": [name for name in before if before[name] != after[name]],
            "moved": [
                shard.name
                for shard in policy.local_shards()
                if shard.flat.data_ptr() != addresses[shard.name] or shard.flat.device != devices[shard.name]
            ],
        }
    return exported


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Everything that one rank exports."""
    folders = {family: checkpoint(family) for family in ("llama", "qwen3_moe")}
    return run_ranks(1, export_everything, folders, 1, {"strategy": "fsdp2"})[0]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in SHOWN_BY_OTHERS])
def test_every_layout_exports_the_same(checkpoint, alone, layout):
    folders = {family: checkpoint(family) for family in alone}
    num_ranks, replicas, options = LAYOUTS[layout]
    for reply in run_ranks(num_ranks, export_everything, folders, replicas, options):
        for family, expected in alone.items():
            found = reply[family]
            assert differences(dict(found["full"][1]), read_folder(folders[family])) == []
            for kind in ("full", "merged", "adapter"):
                assert found[kind][0] == expected[kind][0], kind
                assert [name for name, _ in found[kind][1]] == [meta.name for meta in found[kind][0]], kind
            assert found["full"][2].digest == expected["full"][2].digest
            assert found["adapter"][2].digest == expected["adapter"][2].digest
            assert found["same in every bucket"]
            assert found["changed"] == found["moved"] == []
            merged = dict(found["merged"][1])
            for name, tensor in expected["merged"][1]:
                # A product of other rows may be summed in another order.
                torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)


# LoRA.

VARIANTS = {
    "attention": ("llama", {}),
    "all linear layers": ("llama", {"target_modules": "all-linear"}),
    "an alpha a layer": (
        "llama",
        {"alpha_pattern": {"layers.0.self_attn.q_proj": 9}, "rank_pattern": {"v_proj": 2}},
    ),
    "rank-stabilised": ("qwen3", {"use_rslora": True}),
    "embedding and head": (
        "llama",
        {"target_modules": ["embed_tokens", "lm_head"], "init_lora_weights": True},
    ),
    "tied": ("qwen3_tied", {}),
    "beside experts": ("qwen3_moe", {}),
    "fused experts": ("gpt_oss", {}),
    "convolutions of gpt2": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
}


def export_adapted(folder, strategy, fields):
    policy = load(folder, strategy=strategy, lora=lora_config(**fields))
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    assert all(train(policy, optimizer).stepped for _ in range(2))
    return collect(policy, merge_lora=False), collect(policy), collect(policy, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("variant", "strategy"),
    [("attention", "fsdp1"), *zip(VARIANTS, itertools.cycle(["fsdp2", "fsdp1"]))],
)
def test_a_merge_is_pefts_merge(checkpoint, tmp_path, strategy, variant):
    family, fields = VARIANTS[variant]
    folder = checkpoint(family)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft_model = peft.get_peft_model(plain, lora_config(**fields))
    expected_names = set(peft.get_peft_model_state_dict(peft_model, save_embedding_layers=False))
    for index, (adapter, merged, rounded) in enumerate(
        run_ranks(2, export_adapted, folder, strategy, fields)
    ):
        assert {name for name, _ in adapter[1]} == expected_names
        if index == 0:
            outcome = peft.set_peft_model_state_dict(peft_model, dict(adapter[1]))
            assert outcome.unexpected_keys == []
            peft_model.merge_and_unload().save_pretrained(tmp_path)
        expected = read_folder(tmp_path)
        base = read_folder(folder)
        assert describe(merged[1]) == describe(expected.items())
        changed = set()
        for name, tensor in merged[1]:
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
            if not torch.equal(tensor, base[name]):
                changed.add(name)
        assert len(changed) == len(expected_names) // 2
        # Merged in float32 and rounded once, not added up in the exported dtype.
        assert differences(dict(rounded[1]), {n: t.to(torch.bfloat16) for n, t in merged[1]}) == []


def export_tied_end(folder, target):
    """A policy's logits, and what it exports, with an adapter on one end of a tie."""
    policy = load(folder, lora=lora_config(target_modules=[target], init_lora_weights=True))
    optimizer = sp.make_optimizer(policy, lr=1e-1)
    assert all(train(policy, optimizer).stepped for _ in range(2))
    with torch.no_grad():
        logits = policy.module(input_ids=torch.tensor(SEQUENCES)).logits
    return dict(collect(policy)[1]), logits


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_one_end_of_a_tie_is_exported_or_refused(checkpoint, target):
    """One merged tensor cannot be both ends; leaving the adapter out, or putting it on both, must not pass silently."""
    folder = checkpoint("qwen3_tied")
    for outcome in run_ranks_outcomes(2, export_tied_end, folder, target):
        if outcome[0] == "ok":
            tensors, logits = outcome[1]
            model = AutoModelForCausalLM.from_pretrained(
                folder, tie_word_embeddings="lm_head.weight" not in tensors
            )
            model.load_state_dict(tensors, strict=False)
            torch.testing.assert_close(model(torch.tensor(SEQUENCES)).logits, logits, rtol=0, atol=1e-5)
        else:
            _, kind, message = outcome
            assert kind in ("LoadFault", "ShardFault", "ExportFault", "ConfigError"), message
            assert target in message


# Cost.


def big_config():
    """96 MB of float32 whose largest tensor has 2.8 MB."""
    return tiny_config(
        "llama",
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=499,
    )


class MallocUse(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "free", "small", "maps", "mapped", "unused", "fast", "used", "kept", "top")
    ]


def allocated_bytes():
    """What this process has allocated now. Resident memory would count what the C library keeps for later."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallocUse
    use = libc.mallinfo2()
    return use.used + use.mapped


class AllocationRise:
    """`peak`: by how many bytes more than at the start were allocated, at most, inside the block; sampled."""

    def __enter__(self):
        self.peak = 0
        self.start = allocated_bytes()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

    def sample(self):
        while not self.done.wait(0.001):
            self.peak = max(self.peak, allocated_bytes() - self.start)


def rise_of_a_stream(strategy, bucket_bytes):
    """(largest tensor, all tensors, rise of allocated memory) in bytes."""
    policy = load(sp.RandomInit(big_config()), strategy=strategy)
    stream = sp.WeightStream(policy, bucket_bytes=bucket_bytes)
    with AllocationRise() as memory:
        for _, tensor in stream:
            tensor.sum()
    metas = stream.metadata()
    return max(meta.nbytes for meta in metas), sum(meta.nbytes for meta in metas), memory.peak


@pytest.mark.parametrize(("strategy", "num_ranks"), [("fsdp1", 2), ("fsdp1", 4), ("fsdp2", 2)])
def test_a_stream_holds_two_buckets(strategy, num_ranks):
    """FSDP1 cuts a block's flat parameter by ranks, so that one rank may hold all of a bucket and another nothing."""
    bucket = 6 * 2**20
    for largest, total, rise in run_ranks(num_ranks, rise_of_a_stream, strategy, bucket):
        assert largest < bucket < total / 10
        # Two for the stream; the third is for what the consumer holds and gloo's threads let go of a moment later.
        assert rise < 3 * bucket + 2**20, f"{rise / 2**20:.1f} MiB"


# Receipts.


def export_receipts(folder):
    policy = load(folder)
    policy.version = 7
    stream = sp.WeightStream(policy)
    before = stream.receipt
    for _ in stream:
        pass
    without = collect(policy, digests=False)[2]
    return before, stream.receipt, without, str(stream.receipt)


def test_a_receipt_says_what_was_sent(checkpoint):
    stored = read_folder(checkpoint("qwen3_moe"))
    num_bytes = sum(tensor.nbytes for tensor in stored.values())
    for before, receipt, without, printed in run_ranks(2, export_receipts, checkpoint("qwen3_moe")):
        assert before is None
        assert (receipt.version, receipt.num_tensors, receipt.num_bytes) == (7, len(stored), num_bytes)
        assert receipt.seconds > 0
        assert receipt.findings == []
        assert receipt.manifest.version == 7
        assert receipt.manifest.digests == {name: digest(tensor) for name, tensor in stored.items()}
        assert receipt.digest == receipt.manifest.total
        for word in ("version 7", f"{len(stored)} tensors", receipt.digest[:16]):
            assert word in printed
        assert (without.num_tensors, without.num_bytes) == (len(stored), num_bytes)
        assert without.manifest.digests == {}
        assert without.manifest.compare(stored.items()) == []


def export_over_updates(folder, strategy, fields):
    """[(codes of the findings, digest, version)] of exports around real, simulated and empty updates."""
    policy = load(folder, strategy=strategy, lora=lora_config() if fields["lora"] else None)
    how = {"merge_lora": fields.get("merge", True)}
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    still = sp.make_optimizer(policy, lr=0.0)
    rows = []

    def note():
        receipt = collect(policy, **how)[2]
        rows.append(([str(f) for f in receipt.findings], receipt.digest, receipt.version))

    note()  # 0: the first
    note()  # 1: again, nothing happened in between
    train(policy, optimizer)
    note()  # 2: after an update
    policy.num_updates += 1
    note()  # 3: an update that changed nothing
    note()  # 4: once more; that it was said is enough
    train(policy, still)
    note()  # 5: a step whose learning rate was zero
    train(policy, optimizer)
    note()  # 6
    return rows


@pytest.mark.parametrize("fields", [{"lora": False}, {"lora": True}, {"lora": True, "merge": False}], ids=str)
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_payload_that_did_not_change_after_an_update_is_a_finding(checkpoint, strategy, fields):
    replies = run_ranks(2, export_over_updates, checkpoint("llama"), strategy, fields)
    assert replies[0] == replies[1]
    findings, digests, versions = zip(*replies[0], strict=True)
    assert [len(found) for found in findings] == [0, 0, 0, 1, 0, 0, 0]
    assert findings[3][0].startswith("E405 export: version 1 has the same")
    assert len(set(digests)) == 3
    assert digests[0] == digests[1] and digests[2] == digests[3] == digests[4] == digests[5]
    assert versions == (0, 0, 1, 1, 1, 2, 3)


# Between other work.


def export_between(folder, strategy):
    """Digests before and after scoring, and after leaving a training step half way, where parameters are gathered."""
    policy = load(folder, strategy=strategy)
    first = collect(policy)[2].digest
    sp.logprobs(policy, SEQUENCES)
    second = collect(policy)[2].digest
    with torch.no_grad():
        policy.module(input_ids=torch.tensor(SEQUENCES))
    third = collect(policy)[2].digest
    policy.module(input_ids=torch.tensor(SEQUENCES)).logits.sum()  # its backward never runs
    fourth = collect(policy)[2].digest
    one_stream = sp.WeightStream(policy)
    again = []
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    for _ in range(2):
        train(policy, optimizer)
        again.append(
            {name: digest(tensor) for name, tensor in one_stream} == collect(policy)[2].manifest.digests
        )
    return [first, second, third, fourth], again, sp.attest(policy, optimizer)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_an_export_between_other_work(checkpoint, strategy):
    for digests, again, findings in run_ranks(2, export_between, checkpoint("qwen3_tied"), strategy):
        assert len(set(digests)) == 1
        assert again == [True, True]
        assert findings == []


def losses(folder, strategy, exporting):
    policy = load(folder, strategy=strategy)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    found = []
    for _ in range(3):
        if exporting:
            collect(policy, dtype=torch.bfloat16, bucket_bytes=5000)
        found.append(train(policy, optimizer).loss)
    return found, collect(policy)[2].digest


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_exporting_changes_no_bit_of_training(checkpoint, strategy):
    folder = checkpoint("llama")
    assert run_ranks(2, losses, folder, strategy, True) == run_ranks(2, losses, folder, strategy, False)


# Bad input.


def stream_with(folder, how):
    collect(load(folder), **how)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8", 16, torch.int8], ids=str)
def test_a_dtype_that_cannot_be(checkpoint, dtype):
    outcomes = run_ranks_outcomes(2, stream_with, checkpoint("llama"), {"dtype": dtype})
    assert_all_raise(outcomes, "C001", "dtype", kind="ConfigError")


# Through shared memory, and without.


def collect_without_shared_memory(folder, options):
    """The digest of a stream whose ranks cannot share memory, and of one whose ranks can."""
    policy = load(folder, **options)
    shared = collect(policy)[2].digest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "open_region", lambda size, group: None)
        return shared, collect(policy)[2].digest


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_cannot_share_memory_gather_the_same(checkpoint, strategy, num_ranks):
    for shared, sent in run_ranks(
        num_ranks, collect_without_shared_memory, checkpoint("qwen3_moe"), {"strategy": strategy}
    ):
        assert shared == sent


def refuse_on_one_rank(size):
    """Whether a region is there when rank 1 cannot map it."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(region, "_map", lambda address: None)
        refused = region.open_region(size, dist.group.WORLD)
    opened = region.open_region(size, dist.group.WORLD)
    opened[dist.get_rank()] = dist.get_rank() + 5
    dist.barrier()
    return refused is None, opened[:2].tolist(), len(os.listdir("/proc/self/fd"))


def test_a_region_is_there_for_all_or_for_none():
    first = run_ranks(2, refuse_on_one_rank, 4096)
    assert [reply[:2] for reply in first] == [(True, [5, 6])] * 2
    again = run_ranks(2, refuse_on_one_rank, 4096)
    assert [reply[2] for reply in again] <= [reply[2] for reply in first]  # no descriptor stays open
