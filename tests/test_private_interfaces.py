"""Every private attribute of torch and transformers that the adapter files rely on, by name.

A failure here after an upgrade says which one moved; the adapter file named in the message is the place to mend.
"""

import inspect

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    activations,
    conversion_mapping,
    core_model_loading,
    initialization,
)
from transformers.integrations import moe

from shardproof.model import hf_private
from shardproof.shard import torch_private
from tests.models import make_model, tiny_config
from tests.ranks import run_ranks

HF_FILE = f"transformers {transformers.__version__}: mend src/shardproof/model/hf_private.py"
TORCH_FILE = f"torch {torch.__version__}: mend src/shardproof/shard/torch_private.py"


def missing(owner, names):
    """Which of `names` the object does not have."""
    return [name for name in names if not hasattr(owner, name)]


def parameters_of(function):
    return list(inspect.signature(function).parameters)


def meta_model(family):
    with torch.device("meta"), hf_private.no_init_weights():
        return AutoModelForCausalLM.from_config(tiny_config(family))


# --- transformers ---


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (conversion_mapping, ["get_model_conversion_mapping", "register_checkpoint_conversion_mapping"]),
        (core_model_loading, ["WeightConverter", "WeightRenaming", "dot_natural_key", "rename_source_key"]),
        (initialization, ["no_init_weights"]),
        (moe, ["ALL_EXPERTS_FUNCTIONS", "_default_apply_gate"]),
        (activations, ["SiLUActivation"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_transformers_modules(module, names):
    assert missing(module, names) == [], f"moved out of {module.__name__}; {HF_FILE}"


def test_conversion_rules_and_what_a_converter_offers():
    renamings, converters = hf_private.conversion_rules(meta_model("mixtral"))
    assert renamings and converters, f"mixtral has no conversion rules any more; {HF_FILE}"
    needed = ["source_patterns", "target_patterns", "operations", "collected_tensors", "convert"]
    assert missing(converters[0], needed) == [], f"moved out of WeightConverter; {HF_FILE}"
    assert {"layer_name", "model", "config"} <= set(parameters_of(converters[0].convert)), HF_FILE
    assert all(isinstance(pattern, str) for pattern in converters[0].source_patterns), HF_FILE


def test_experts_say_how_they_are_built():
    (experts, *_) = hf_private.expert_modules(meta_model("qwen3_moe"))
    names = ["has_gate", "has_bias", "is_transposed", "act_fn", "gate_up_proj", "down_proj", "_apply_gate"]
    assert missing(experts, names) == [], f"moved out of the experts' classes; {HF_FILE}"
    assert hasattr(experts.config, "_experts_implementation_internal"), HF_FILE


def test_rename_source_key():
    """(renamed key, the source pattern of the converter that applies or None)."""
    model = meta_model("qwen3_moe")
    renamings, converters = hf_private.conversion_rules(model)
    rename = hf_private.rename_source_key
    prefix, state = model.base_model_prefix, model.state_dict()
    assert rename("model.norm.weight", renamings, converters, prefix, state) == ("model.norm.weight", None)
    # A base model's checkpoint has no prefix; the model with a head has one.
    assert rename("norm.weight", renamings, converters, prefix, state)[0] == "model.norm.weight"
    name, pattern = rename(
        "model.layers.0.mlp.experts.3.down_proj.weight", renamings, converters, prefix, state
    )
    assert name == "model.layers.0.mlp.experts.down_proj", HF_FILE
    assert pattern in [source for rule in converters for source in rule.source_patterns], HF_FILE


def test_dot_natural_key_orders_experts_by_number():
    names = [f"experts.{index}.w" for index in (10, 9, 2, 0)]
    assert sorted(names, key=hf_private.dot_natural_key) == [f"experts.{i}.w" for i in (0, 2, 9, 10)], HF_FILE


def test_no_init_weights_leaves_modules_as_they_are():
    with torch.device("meta"), hf_private.no_init_weights():
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    assert all(param.is_meta for param in model.parameters()), HF_FILE


def test_pretrained_model_attributes():
    model = make_model("llama_tied")
    private = [
        "_init_weights", "_no_split_modules", "_keys_to_ignore_on_load_missing",
        "_keys_to_ignore_on_load_unexpected", "get_expanded_tied_weights_keys", "all_tied_weights_keys",
        "base_model_prefix", "tie_weights",
    ]  # fmt: skip
    assert missing(model, private) == [], f"moved out of PreTrainedModel; {HF_FILE}"
    assert "all_submodels" in parameters_of(model.get_expanded_tied_weights_keys), HF_FILE
    assert parameters_of(model._init_weights)[:1] == ["module"], HF_FILE
    assert missing(model.config, ["_attn_implementation", "_attn_implementation_internal"]) == [], (
        f"moved out of PretrainedConfig; {HF_FILE}"
    )


@pytest.mark.parametrize(
    ("family", "ties"),
    [
        ("llama", {}),
        ("llama_tied", {"lm_head.weight": "model.embed_tokens.weight"}),
        ("gpt2", {"lm_head.weight": "transformer.wte.weight"}),
    ],
)
def test_ties_are_name_to_name(family, ties):
    assert hf_private.tied_names(meta_model(family)) == ties, HF_FILE


@pytest.mark.parametrize(
    ("family", "block"),
    [("llama", "LlamaDecoderLayer"), ("gpt2", "GPT2Block"), ("qwen3_moe", "Qwen3MoeDecoderLayer")],
)
def test_block_classes(family, block):
    assert block in hf_private.block_classes(meta_model(family)), HF_FILE


def test_implementations_are_arguments_of_from_config():
    kwargs = hf_private.set_implementations({}, "eager", "eager")
    with torch.device("meta"), hf_private.no_init_weights():
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), **kwargs)
    assert model.config._attn_implementation == "eager", HF_FILE
    assert model.config._experts_implementation == "eager", HF_FILE


def test_init_weights_computes_rotary_buffers():
    """What `compute_buffers` relies on: a family's `_init_weights` fills its non-persistent buffers."""
    model = make_model("llama")
    rotary = model.model.rotary_emb
    expected = rotary.inv_freq.clone()
    assert "inv_freq" in rotary._non_persistent_buffers_set
    rotary.inv_freq.fill_(7.0)
    with hf_private.quiet_initialisation():
        hf_private.run_init_weights(model, "model.rotary_emb", rotary)
    assert torch.equal(rotary.inv_freq, expected), HF_FILE


def test_quiet_initialisation_keeps_the_random_state():
    before = torch.get_rng_state()
    with hf_private.quiet_initialisation():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


# --- torch ---


def test_what_muon_is_made_of():
    where = f"torch {torch.__version__}: mend src/shardproof/train/torch_muon.py"
    names = ["_zeropower_via_newtonschulz", "_adjust_lr", "DEFAULT_A", "DEFAULT_B", "DEFAULT_C", "EPS"]
    assert missing(torch.optim._muon, names) == [], where
    taken = ["grad", "ns_coefficients", "ns_steps", "eps"]
    assert parameters_of(torch.optim._muon._zeropower_via_newtonschulz) == taken, where
    assert parameters_of(torch.optim._muon._adjust_lr) == ["lr", "adjust_lr_fn", "param_shape"], where
    # Muon is a subclass of AdamW that keeps matrices out of the lists which this makes.
    lists = ["params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    assert parameters_of(torch.optim.AdamW._init_group) == ["self", "group", *lists], where


class TwoLayers(nn.Module):
    """An odd number of rows, a bias of one element, and one parameter under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 1)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.first.weight


def inspect_fsdp2():
    """What is missing, by owner, after `fully_shard` of a meta module."""
    with torch.device("meta"):
        module = fully_shard(TwoLayers())
    state = module._get_fsdp_state()
    found = {}
    if missing(state, ["_fsdp_param_groups"]):
        found["FSDPState"] = missing(state, ["_fsdp_param_group"])
    found["FSDPModule"] = missing(
        module,
        [
            "set_force_sum_reduction_for_comms",
            "set_gradient_divide_factor",
            "set_requires_all_reduce",
            "set_is_last_backward",
        ],
    )
    params = list(torch_private.fsdp2_params(module))
    names = [
        "sharded_param", "sharded_size", "padded_sharded_param_size", "to_sharded_dtensor",
        "_sharded_param_data", "_setattr_on_modules",
    ]  # fmt: skip
    found["FSDPParam"] = missing(params[0], names)
    before = [isinstance(p.sharded_param, DTensor) and p.sharded_param.is_meta for p in params]
    torch_private.allocate_fsdp2(params, torch.device("cpu"), pin_memory=False)
    held = dict(module.named_parameters(remove_duplicate=False))
    ranges = {name: torch_private.dtensor_range(param) for name, param in held.items()}
    numels = {name: param.to_local().numel() for name, param in held.items()}
    return {
        "missing": found,
        "is_fsdp": isinstance(module, FSDPModule),
        "meta_before": all(before),
        "num_params": len(params),
        "devices": {param.device.type for param in held.values()},
        "tied": held["tied.weight"] is held["first.weight"],
        "ranges": ranges,
        "numels": numels,
    }


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fsdp2(num_ranks):
    replies = run_ranks(num_ranks, inspect_fsdp2)
    for reply in replies:
        assert {owner: names for owner, names in reply["missing"].items() if names} == {}, (
            f"moved; {TORCH_FILE}"
        )
        assert reply["is_fsdp"] and reply["meta_before"], TORCH_FILE
        assert reply["num_params"] == 4, f"FSDP2 no longer counts a shared parameter once; {TORCH_FILE}"
        assert reply["devices"] == {"cpu"}, f"allocate_fsdp2 did not reach the modules; {TORCH_FILE}"
        assert reply["tied"], (
            f"_setattr_on_modules no longer reaches modules that share a parameter; {TORCH_FILE}"
        )
    for name, numel in {"first.weight": 20, "first.bias": 5, "second.weight": 5, "second.bias": 1}.items():
        position = 0
        for reply in replies:
            start, stop = reply["ranges"][name]
            assert stop - start == reply["numels"][name], TORCH_FILE
            assert start in (position, stop), f"rows are no longer dealt in rank order; {TORCH_FILE}"
            position = max(position, stop)
        assert position == numel, TORCH_FILE


def inspect_fsdp1():
    """What is missing, by owner, after FSDP1 has wrapped a module; and the shards it says this rank holds."""
    module = FullyShardedDataParallel(TwoLayers(), use_orig_params=True, device_id=torch.device("cpu"))
    names = ["_handle", "_gradient_predivide_factor", "_gradient_postdivide_factor"]
    found = {"FullyShardedDataParallel": missing(module, names)}
    handle = module._handle
    names = ["flat_param", "uses_sharded_strategy", "rank", "world_size", "_training_state", "needs_unshard"]
    found["FlatParamHandle"] = missing(handle, names)
    flat = handle.flat_param
    names = ["_param_infos", "_shapes", "_params", "_unpadded_unsharded_size"]
    found["FlatParameter"] = missing(flat, names)
    found["ParamInfo"] = missing(flat._param_infos[0], ["module", "param_name"])
    if handle.uses_sharded_strategy:
        found["FlatParameter"] += missing(flat, ["_shard_param_infos"])
        names = ["in_shard", "offset_in_shard", "numel_in_shard", "intra_param_start_idx"]
        found["_ShardParamInfo"] = missing(flat._shard_param_infos[0], names)
    # The values must be those that the wrapped module was built with.
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        full = {torch_private.clean_name(n): p.detach().clone() for n, p in module.named_parameters()}
    shards = list(torch_private.fsdp1_shards(module))
    return {
        "missing": found,
        "names": [name for name, *_ in shards],
        "wrong": [
            name
            for name, _, start, stop, local in shards
            if not torch.equal(local, full[name].reshape(-1)[start:stop])
        ],
        "ranges": {name: (start, stop) for name, _, start, stop, _ in shards},
        "shapes": [tuple(shape) for _, shape in torch_private.fsdp1_parameters(module)],
        "replica": torch_private.fsdp1_replica_key(module),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_fsdp1(num_ranks):
    replies = run_ranks(num_ranks, inspect_fsdp1)
    numels = {"first.weight": 20, "first.bias": 5, "second.weight": 5, "second.bias": 1}
    for rank, reply in enumerate(replies):
        assert {owner: names for owner, names in reply["missing"].items() if names} == {}, (
            f"moved; {TORCH_FILE}"
        )
        assert reply["names"] == list(numels), TORCH_FILE
        assert reply["wrong"] == [], f"the flat parameter is laid out in another way; {TORCH_FILE}"
        assert reply["shapes"] == [(5, 4), (5,), (1, 5), (1,)], TORCH_FILE
        assert reply["replica"] == ((rank, num_ranks) if num_ranks > 1 else (0, 1)), TORCH_FILE
    for name, numel in numels.items():
        covered = sorted(reply["ranges"][name] for reply in replies)
        assert sum(stop - start for start, stop in covered) == numel, TORCH_FILE


def device_types_of_the_group():
    return [device.type for device in dist.group.WORLD._device_types]


def test_a_group_tells_its_device_types():
    assert "cpu" in run_ranks(1, device_types_of_the_group)[0], (
        f"torch {torch.__version__}: mend dist/collectives.py"
    )


def test_correct_fan():
    """`kaiming_uniform_` is recorded through it."""
    fan = nn.init._calculate_correct_fan(torch.empty(3, 5, device="meta"), "fan_in")
    assert fan == 5, f"torch {torch.__version__}: mend model/initial.py"


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("_fsdp_wrapped_module.model._fsdp_wrapped_module.weight", "model.weight"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("_orig_mod.model.weight", "model.weight"),
        ("model.weight", "model.weight"),
    ],
)
def test_wrapper_names_are_taken_out(name, clean):
    assert torch_private.clean_name(name) == clean
