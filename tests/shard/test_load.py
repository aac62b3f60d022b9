"""`load`: what each rank ends up holding is the checkpoint, once, whatever the layout."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Interleave, WeightConverter

import shardproof as sp
from tests.models import make_checkpoint, make_model, tiny_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

STRATEGIES = ("fsdp1", "fsdp2")
# (ranks, replicas): plain sharding, then HSDP as replicate x shard.
LAYOUTS = {"1": (1, 1), "3": (3, 1), "4": (4, 1), "2x1": (2, 2), "2x2": (4, 2)}
# Fewer rows than ranks, and sizes that no alignment divides.
FEW_ROWS = {
    "vocab_size": 5,
    "hidden_size": 6,
    "head_dim": 6,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 3,
    "num_hidden_layers": 1,
}
TOKENS = torch.arange(3, 3 + 40).view(2, 20)


# --- what ranks do ---


def load(source, strategy, *, replicas=1, **options):
    """`sp.load` on the CPU, in float32 unless asked otherwise."""
    mesh = replicated_mesh(replicas) if replicas > 1 else None
    return sp.load(
        source, strategy=strategy, mesh=mesh, device="cpu", **{"compute_dtype": torch.float32, **options}
    )


def replicated_mesh(replicas):
    """An HSDP mesh of all ranks."""
    # DTensor remembers the first mesh of each shape that its operations met. In a worker that serves many calls that
    # is the mesh of an earlier call, whose process groups are gone.
    _clear_sharding_prop_cache()
    return sp.make_mesh(replicate=replicas)


def full_state(policy):
    """{name: whole tensor} of every parameter and buffer. Collective: every rank."""
    state = {name: buffer.detach().clone() for name, buffer in clean_buffers(policy).items()}
    if policy.strategy == "fsdp2":
        # On one rank full_tensor() is the parameter's own memory, which the next step writes.
        return state | {
            name: param.full_tensor().detach().clone() for name, param in policy.named_parameters()
        }
    with FullyShardedDataParallel.summon_full_params(policy.module, writeback=False):
        return state | {name: param.detach().clone() for name, param in policy.named_parameters()}


def clean_buffers(policy):
    named = policy.model.named_buffers()
    return {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in named}


def local_parameters(policy):
    """{name: the elements this rank holds}, flat."""
    return {
        name: (param.to_local() if isinstance(param, DTensor) else param).detach().reshape(-1)
        for name, param in policy.named_parameters()
    }


def gather(folders, strategy, replicas, options):
    """{label: whole state} of several checkpoints, with what attest says about each."""
    policies = {
        label: load(folder, strategy, replicas=replicas, **options) for label, folder in folders.items()
    }
    return {
        label: (full_state(policy), [str(f) for f in sp.attest(policy)]) for label, policy in policies.items()
    }


def describe_dtypes(folder, strategy, param_dtype, compute_dtype):
    policy = load(folder, strategy, param_dtype=param_dtype, compute_dtype=compute_dtype)
    state = full_state(policy)
    with torch.no_grad():
        logits = policy.module(input_ids=TOKENS).logits
    return {
        "parameters": {param.dtype for param in policy.parameters()},
        "buffers": {name: buffer.dtype for name, buffer in clean_buffers(policy).items()},
        "logits": logits,
        "state": state,
    }


def describe_receipt(folders, strategy):
    policies = {label: load(folder, strategy) for label, folder in folders.items()}
    return {
        label: {
            "bytes_read": policy.receipt.bytes_read,
            "shard_bytes": policy.receipt.shard_bytes,
            "held": sum(4 * local.numel() for local in local_parameters(policy).values()),
            "printed": str(policy.receipt),
            "provenance": {name: (writer.kind, writer.detail) for name, writer in policy.provenance.items()},
            "num_tensors": policy.receipt.num_tensors,
            "source": policy.source,
        }
        for label, policy in policies.items()
    }


def offloaded(folder):
    """(devices of parameters, logits with offload, logits without)."""
    logits = []
    for cpu_offload in (True, False):
        policy = load(folder, "fsdp2", cpu_offload=cpu_offload)
        logits.append(policy.module(input_ids=TOKENS).logits.detach())
        devices = {local.device.type for local in local_parameters(policy).values()}
    return devices, *logits


def train_tied(folder, strategy, num_steps):
    policy = load(folder, strategy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    names = [name for name, _ in policy.named_parameters()]
    before = full_state(policy)
    losses = []
    for _ in range(num_steps):
        logits = policy.module(input_ids=TOKENS[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = full_state(policy)
    return {
        "names": names,
        "names_after": [name for name, _ in policy.named_parameters()],
        "losses": losses,
        "embedding_and_head": embedding_and_head(policy),
        "moved": [name for name in names if not torch.equal(before[name], after[name])],
        "findings": [str(finding) for finding in sp.attest(policy, optimizer)],
    }


def embedding_and_head(policy):
    """Both whole, as the modules that use them see them."""
    modules = policy.model.get_input_embeddings(), policy.model.get_output_embeddings()
    if policy.strategy == "fsdp2":
        return [module.weight.full_tensor().detach() for module in modules]
    with FullyShardedDataParallel.summon_full_params(policy.module, writeback=False):
        return [module.weight.detach().clone() for module in modules]


def gradients_of_different_data(folder, strategy, replicas):
    """This rank's part of every gradient, after a backward pass over data that no other rank has."""
    policy = load(folder, strategy, replicas=replicas)
    tokens = TOKENS + 5 * dist.get_rank()
    policy.module(input_ids=tokens, labels=tokens).loss.backward()
    return {
        name: (param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad).detach().clone()
        for name, param in policy.named_parameters()
        if param.grad is not None
    }


# --- what they should hold ---


def reference_state(folder, dtype=torch.float32):
    """What transformers itself loads; buffers are compared too."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    parameters = {name: param.detach() for name, param in model.named_parameters()}
    return parameters | dict(model.named_buffers())


def differences(state, reference):
    """Names that one side lacks, and names whose bytes differ."""
    odd = sorted(set(state) ^ set(reference))
    return odd + [
        name for name in set(state) & set(reference) if not torch.equal(state[name], reference[name])
    ]


def checkpoint_bytes(folder):
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    return total


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "in many files": make_checkpoint(root / "many", "llama"),
        "tied, in one file": make_checkpoint(root / "tied", "qwen3_tied", max_shard_size="1GB"),
        "experts": make_checkpoint(root / "experts", "qwen3_moe"),
        "stored buffers": make_checkpoint(root / "buffers", "deepseek_v3"),
        "few rows": make_checkpoint(root / "few", "qwen3", **FEW_ROWS),
        "bfloat16": make_checkpoint(root / "bfloat16", "qwen2", dtype=torch.bfloat16),
    }


@pytest.fixture(scope="module")
def references(checkpoints):
    return {label: reference_state(folder) for label, folder in checkpoints.items()}


def test_the_checkpoints_are_what_their_labels_say(checkpoints):
    files = {
        label: sorted(path.name for path in folder.glob("*.safetensors"))
        for label, folder in checkpoints.items()
    }
    assert files["tied, in one file"] == ["model.safetensors"]
    assert len(files["in many files"]) > 2
    index = json.loads((checkpoints["in many files"] / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files["in many files"]
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in all_names(checkpoints["experts"])
    assert "lm_head.weight" not in all_names(checkpoints["tied, in one file"])


def all_names(folder):
    names = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return names


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_layout_holds_the_checkpoint(checkpoints, references, strategy, layout):
    num_ranks, replicas = LAYOUTS[layout]
    for reply in run_ranks(num_ranks, gather, checkpoints, strategy, replicas, {}):
        odd = {label: differences(state, references[label]) for label, (state, _) in reply.items()}
        assert {label: names for label, names in odd.items() if names} == {}
        assert {label: findings for label, (_, findings) in reply.items() if findings} == {}


def load_over_a_named_mesh(folder, strategy):
    _clear_sharding_prop_cache()
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (1, 2), mesh_dim_names=("replicate", "shard")
    )
    return full_state(
        sp.load(folder, strategy=strategy, mesh=mesh, device="cpu", compute_dtype=torch.float32)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_replica_of_two_shards(checkpoints, references, strategy):
    for state in run_ranks(2, load_over_a_named_mesh, checkpoints["experts"], strategy):
        assert differences(state, references["experts"]) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_value_head_of_one_row_on_more_ranks(checkpoints, references, strategy, num_ranks):
    replies = run_ranks(
        num_ranks, gather, {"few rows": checkpoints["few rows"]}, strategy, 1, {"role": "critic"}
    )
    expected = {name: value for name, value in references["few rows"].items() if name != "lm_head.weight"}
    for reply in replies:
        state, findings = reply["few rows"]
        assert state["score.weight"].shape == (1, 6)
        assert torch.equal(state["score.weight"], replies[0]["few rows"][0]["score.weight"])
        assert differences({n: v for n, v in state.items() if n != "score.weight"}, expected) == []
        assert findings == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_are_cast_and_buffers_are_not(
    checkpoints, strategy, num_ranks, param_dtype, compute_dtype
):
    folder = checkpoints["stored buffers"]
    expected = reference_state(folder)
    replies = run_ranks(num_ranks, describe_dtypes, folder, strategy, param_dtype, compute_dtype)
    for reply in replies:
        assert reply["parameters"] == {param_dtype}
        assert set(reply["buffers"].values()) == {torch.float32}
        for name, value in reply["state"].items():
            dtype = torch.float32 if name in reply["buffers"] else param_dtype
            assert torch.equal(value, expected[name].to(dtype)), name
        assert torch.isfinite(reply["logits"]).all()
        assert reply["logits"].dtype == compute_dtype
        assert torch.equal(reply["logits"], replies[0]["logits"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_byte_is_read_once_by_the_rank_that_holds_it(checkpoints, strategy, num_ranks):
    """In particular no rank reads another rank's experts, and a tied tensor is read once."""
    labels = ("in many files", "tied, in one file", "experts", "few rows")
    folders = {label: checkpoints[label] for label in labels}
    replies = run_ranks(num_ranks, describe_receipt, folders, strategy)
    for label, folder in folders.items():
        receipts = [reply[label] for reply in replies]
        assert sum(receipt["bytes_read"] for receipt in receipts) == checkpoint_bytes(folder), label
        for receipt in receipts:
            assert receipt["bytes_read"] == receipt["shard_bytes"] == receipt["held"], label
            assert (
                "MiB" in receipt["printed"]
                and f"loaded {receipt['num_tensors']} tensors" in receipt["printed"]
            )


def test_half_the_bytes_are_read_of_a_bfloat16_checkpoint(checkpoints):
    (reply,) = run_ranks(1, describe_receipt, {"bfloat16": checkpoints["bfloat16"]}, "fsdp2")
    receipt = reply["bfloat16"]
    assert (
        2 * receipt["bytes_read"] == receipt["shard_bytes"] == 2 * checkpoint_bytes(checkpoints["bfloat16"])
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_provenance_names_every_tensor_and_its_file(checkpoints, strategy):
    folders = {label: checkpoints[label] for label in ("tied, in one file", "experts", "stored buffers")}
    replies = run_ranks(2, describe_receipt, folders, strategy)
    for label, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder)
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
        files = {path.name for path in folder.glob("*.safetensors")}
        for reply in replies:
            provenance = reply[label]["provenance"]
            assert set(provenance) == {*parameters, *buffers}
            assert reply[label]["num_tensors"] == len(provenance)
            assert reply[label]["source"] == str(folder)
            for name, (kind, detail) in provenance.items():
                if kind == "checkpoint":
                    assert detail.split(": ")[0] in files, name
            assert {kind for kind, _ in provenance.values()} <= {"checkpoint", "computed", "tie"}
    tied = replies[0]["tied, in one file"]["provenance"]
    assert tied["lm_head.weight"] == ("tie", "model.embed_tokens.weight")
    assert tied["model.embed_tokens.weight"][1].endswith(": model.embed_tokens.weight")
    assert tied["model.rotary_emb.inv_freq"][0] == "computed"
    fused = replies[0]["experts"]["provenance"]["model.layers.0.mlp.experts.gate_up_proj"]
    # 8 experts, each with a gate and an up projection.
    assert "mlp.experts.0.gate_proj.weight and 15 more through MergeModulelist, Concatenate" in fused[1]
    kept = replies[0]["stored buffers"]["provenance"]["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert kept[0] == "checkpoint"


class InterleavedConfig(LlamaConfig):
    model_type = "interleaved_llama"


class InterleavedForCausalLM(LlamaForCausalLM):
    config_class = InterleavedConfig


def register_interleaved():
    """A family whose checkpoints hold the query projection with its two halves interleaved."""
    AutoConfig.register(InterleavedConfig.model_type, InterleavedConfig, exist_ok=True)
    AutoModelForCausalLM.register(InterleavedConfig, InterleavedForCausalLM, exist_ok=True)
    name = "self_attn.q_proj.weight"
    rules = [WeightConverter(name, name, operations=[Interleave(dim=0)])]
    register_checkpoint_conversion_mapping(InterleavedConfig.model_type, rules, overwrite=True)


def load_interleaved(folder, strategy):
    register_interleaved()
    policy = load(folder, strategy)
    return full_state(policy), {name: str(writer) for name, writer in policy.provenance.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_conversion_that_needs_whole_tensors(tmp_path, strategy, num_ranks):
    register_interleaved()
    plain = make_model("llama")
    settings = {k: v for k, v in tiny_config("llama").to_dict().items() if k != "model_type"}
    model = InterleavedForCausalLM(InterleavedConfig(**settings))
    model.load_state_dict(plain.state_dict())
    model.save_pretrained(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not torch.equal(file.get_tensor(name), plain.state_dict()[name]), (
            "the checkpoint is not interleaved"
        )
    for state, provenance in run_ranks(num_ranks, load_interleaved, tmp_path, strategy):
        assert differences(state, dict(plain.state_dict()) | dict(plain.named_buffers())) == []
        assert provenance[name] == f"converted whole: model.safetensors: {name} through Interleave"
        assert provenance["model.norm.weight"].startswith("checkpoint: ")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_offload_on_a_machine_without_an_accelerator(checkpoints, num_ranks):
    for devices, with_offload, without in run_ranks(num_ranks, offloaded, checkpoints["experts"]):
        assert devices == {"cpu"}
        assert torch.equal(with_offload, without)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tied_tensor_stays_one_parameter_through_training(checkpoints, strategy):
    for reply in run_ranks(2, train_tied, checkpoints["tied, in one file"], strategy, 10):
        assert reply["names"].count("model.embed_tokens.weight") == 1
        assert "lm_head.weight" not in reply["names"]
        assert reply["names_after"] == reply["names"]
        embedding, head = reply["embedding_and_head"]
        assert torch.equal(embedding, head)
        assert embedding.shape == (101, 32)
        assert reply["moved"] == reply["names"]
        assert reply["losses"][-1] < reply["losses"][0] / 2
        assert reply["findings"] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["2x1", "2x2"])
def test_replicas_receive_one_gradient(checkpoints, strategy, layout):
    """Replicas that keep gradients to themselves drift apart from the first step on."""
    num_ranks, replicas = LAYOUTS[layout]
    shards = num_ranks // replicas
    gradients = run_ranks(
        num_ranks, gradients_of_different_data, checkpoints["in many files"], strategy, replicas
    )
    for first, second in zip(gradients[:shards], gradients[shards:], strict=True):
        assert first.keys() == second.keys() and first
        assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_both_strategies_reduce_to_the_same_gradient(checkpoints):
    """Replicas that are not sharded hold whole gradients, so that they can be compared as they are."""
    arguments = (gradients_of_different_data, checkpoints["in many files"])
    (first, _), (second, _) = (run_ranks(2, *arguments, strategy, 2) for strategy in STRATEGIES)
    assert first.keys() == second.keys()
    odd = [
        n for n in first if not torch.allclose(first[n].view_as(second[n]), second[n], rtol=1e-4, atol=1e-6)
    ]
    assert odd == []
