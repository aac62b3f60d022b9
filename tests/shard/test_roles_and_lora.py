"""What a role trains and gives, and adapters that start out as the base model on any number of ranks."""

import peft
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaForSequenceClassification

import shardproof as sp
from tests.models import make_checkpoint, tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_load import full_state

pytestmark = pytest.mark.distributed

STRATEGIES = ("fsdp1", "fsdp2")
TOKENS = torch.randint(3, 101, (2, 20), generator=torch.Generator().manual_seed(0))
ATTENTION = ["q_proj", "v_proj"]


def load(source, strategy, **options):
    return sp.load(source, strategy=strategy, device="cpu", compute_dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("roles")
    families = ("llama", "qwen3_tied", "qwen3_moe", "gpt2", "gpt_neox")
    return {family: make_checkpoint(root / family, family) for family in families}


# --- roles ---


def describe_role(folder, strategy, role):
    policy = load(folder, strategy, role=role)
    requires_grad = {param.requires_grad for param in policy.parameters()}
    with torch.no_grad():
        output = policy.module(input_ids=TOKENS)
    return {
        "role": policy.role,
        "requires_grad": requires_grad,
        "training": {module.training for module in policy.module.modules()},
        "trainable": len(policy.trainable_parameters()),
        "logits": output.logits,
        "findings": [str(finding) for finding in sp.attest(policy)],
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reference_is_frozen_and_in_eval_mode(checkpoints, strategy, num_ranks):
    policies = run_ranks(num_ranks, describe_role, checkpoints["llama"], strategy, "policy")
    references = run_ranks(num_ranks, describe_role, checkpoints["llama"], strategy, "reference")
    for policy, reference in zip(policies, references, strict=True):
        assert policy["role"] == "policy" and reference["role"] == "reference"
        assert policy["requires_grad"] == {True} and policy["training"] == {True}
        assert reference["requires_grad"] == {False} and reference["training"] == {False}
        assert reference["trainable"] == 0 and policy["trainable"] > 0
        assert torch.equal(policy["logits"], reference["logits"])
        assert policy["findings"] == reference["findings"] == []


def describe_critic(folders, strategy):
    """{family: values, whole state and provenance of a critic}."""
    described = {}
    for family, folder in folders.items():
        critic = load(folder, strategy, role="critic")
        state = full_state(critic)
        with torch.no_grad():
            values = critic.module(input_ids=TOKENS)
        described[family] = {
            "values": values,
            "state": state,
            "provenance": {name: str(writer) for name, writer in critic.provenance.items()},
            "requires_grad": {param.requires_grad for param in critic.parameters()},
            "findings": [str(finding) for finding in sp.attest(critic)],
        }
    return described


@pytest.fixture(scope="module")
def critic_on_one_rank(checkpoints):
    return run_ranks(1, describe_critic, checkpoints, "fsdp2")[0]


def test_a_critic_gives_one_value_a_token(checkpoints, critic_on_one_rank):
    """The base model's last hidden state times the value head; also where the checkpoint ties its language-model head."""
    for family, folder in checkpoints.items():
        critic = critic_on_one_rank[family]
        base = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            hidden = base(input_ids=TOKENS).last_hidden_state
        assert critic["values"].shape == TOKENS.shape, family
        assert torch.allclose(
            critic["values"], (hidden @ critic["state"]["score.weight"].T).squeeze(-1), atol=1e-5
        )
        assert critic["values"].std() > 1e-3, family
        assert critic["requires_grad"] == {True}


def test_a_critic_ignores_the_language_model_head(checkpoints, critic_on_one_rank):
    for family in checkpoints:
        provenance = critic_on_one_rank[family]["provenance"]
        assert provenance["score.weight"] == "init: normal(0, 0.1), seed 0"
        assert [name for name in provenance if name.startswith(("lm_head", "embed_out"))] == [], family
        assert [name for name, writer in provenance.items() if writer.startswith("init")] == ["score.weight"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_critic_is_the_same_on_any_number_of_ranks(checkpoints, critic_on_one_rank, strategy, num_ranks):
    folders = {family: checkpoints[family] for family in ("llama", "qwen3_tied", "qwen3_moe")}
    for reply in run_ranks(num_ranks, describe_critic, folders, strategy):
        for family, critic in reply.items():
            expected = critic_on_one_rank[family]
            assert torch.equal(critic["state"]["score.weight"], expected["state"]["score.weight"]), family
            assert torch.allclose(critic["values"], expected["values"], rtol=1e-5, atol=1e-5), family
            assert critic["findings"] == [], family


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_saved_value_head_is_read_and_not_drawn_anew(tmp_path, strategy):
    config = tiny_config("llama", num_labels=1)
    torch.manual_seed(0)
    saved = LlamaForSequenceClassification(config)
    saved.save_pretrained(tmp_path)
    for reply in run_ranks(2, describe_critic, {"saved": tmp_path}, strategy):
        critic = reply["saved"]
        assert torch.equal(critic["state"]["score.weight"], saved.score.weight)
        assert critic["provenance"]["score.weight"] == "checkpoint: model.safetensors: score.weight"


# --- adapters ---


def lora_config(**settings):
    return peft.LoraConfig(**{"r": 4, "target_modules": ATTENTION, **settings})


def describe_adapters(folder, strategy, settings):
    """An adapted model before and after one step, and the base model's logits."""
    base = load(folder, strategy)
    with torch.no_grad():
        base_logits = base.module(input_ids=TOKENS).logits
    policy = load(folder, strategy, lora=lora_config(**settings))
    before = full_state(policy)
    logits = policy.module(input_ids=TOKENS).logits
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-2)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    after = full_state(policy)
    findings = [str(finding) for finding in sp.attest(policy, optimizer)]
    return {
        "has_lora": policy.has_lora,
        "trainable": {name for name, param in policy.named_parameters() if param.requires_grad},
        "names": {name for name, _ in policy.named_parameters()},
        "before": before,
        "changed": {name for name in before if not torch.equal(before[name], after[name])},
        "logits": logits.detach(),
        "base_logits": base_logits,
        "provenance": {name: str(writer) for name, writer in policy.provenance.items()},
        "findings": findings,
    }


def is_adapter(name):
    return ".lora_" in name


VARIANTS = {
    "attention": ("llama", {}),
    "all linear layers": ("llama", {"target_modules": "all-linear"}),
    "gaussian": ("llama", {"init_lora_weights": "gaussian"}),
    "rank-stabilised": ("llama", {"use_rslora": True}),
    "beside experts": ("qwen3_moe", {}),
    "tied": ("qwen3_tied", {}),
    "convolutions of gpt2": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_start_as_the_base_model_and_alone_are_trained(checkpoints, strategy, variant):
    family, settings = VARIANTS[variant]
    for reply in run_ranks(2, describe_adapters, checkpoints[family], strategy, settings):
        check_adapters(reply)


def check_adapters(reply):
    adapters = {name for name in reply["names"] if is_adapter(name)}
    assert reply["has_lora"]
    assert adapters and reply["trainable"] == adapters
    assert torch.allclose(reply["logits"], reply["base_logits"], rtol=1e-5, atol=1e-5)
    # With B zero the first gradient of A is zero, and weight decay scales it; the base must not move at all.
    assert reply["changed"] <= adapters
    assert {name for name in adapters if ".lora_B." in name} <= reply["changed"]
    assert reply["findings"] == []


def test_adapters_on_one_rank_change_no_bit_of_the_logits(checkpoints):
    (reply,) = run_ranks(1, describe_adapters, checkpoints["llama"], "fsdp2", {})
    assert torch.equal(reply["logits"], reply["base_logits"])


def fresh_adapters(folder, strategy, settings):
    """{name: whole tensor} of the adapters as they are drawn."""
    state = full_state(load(folder, strategy, lora=lora_config(**settings)))
    return {name: tensor for name, tensor in state.items() if is_adapter(name)}


@pytest.mark.parametrize("init", [True, "gaussian"])
def test_adapters_are_the_same_on_any_number_of_ranks(checkpoints, init):
    settings = {"init_lora_weights": init, "target_modules": "all-linear"}
    folder = checkpoints["llama"]
    (reference,) = run_ranks(1, fresh_adapters, folder, "fsdp2", settings)
    assert len(reference) == 2 * 7 * 2  # A and B, seven projections, two layers
    for strategy, num_ranks in [("fsdp1", 2), ("fsdp1", 3), ("fsdp2", 2), ("fsdp2", 3)]:
        for adapters in run_ranks(num_ranks, fresh_adapters, folder, strategy, settings):
            assert adapters.keys() == reference.keys()
            odd = [name for name in reference if not torch.equal(adapters[name], reference[name])]
            assert odd == [], (strategy, num_ranks)


def test_adapters_are_drawn_as_peft_draws_them(checkpoints):
    for init, bound in [(True, 32**-0.5), ("gaussian", None)]:
        settings = {"init_lora_weights": init}
        (before,) = run_ranks(1, fresh_adapters, checkpoints["llama"], "fsdp2", settings)
        down = torch.cat([tensor.flatten() for name, tensor in before.items() if ".lora_A." in name])
        up = torch.cat([tensor.flatten() for name, tensor in before.items() if ".lora_B." in name])
        assert not up.any()
        if bound is not None:
            assert 0.9 * bound < down.abs().max() <= bound
        else:
            assert down.std().item() == pytest.approx(1 / 4, rel=0.15)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_base_under_adapters_is_the_checkpoint(checkpoints, strategy):
    expected = dict(AutoModelForCausalLM.from_pretrained(checkpoints["qwen3_moe"]).named_parameters())
    for reply in run_ranks(2, describe_adapters, checkpoints["qwen3_moe"], strategy, {}):
        base = {n.replace(".base_layer", ""): t for n, t in reply["before"].items() if not is_adapter(n)}
        assert set(expected) <= set(base)
        assert [name for name, value in expected.items() if not torch.equal(base[name], value)] == []


def test_provenance_tells_base_and_adapters_apart(checkpoints):
    (reply,) = run_ranks(
        1, describe_adapters, checkpoints["llama"], "fsdp2", {"init_lora_weights": "gaussian"}
    )
    provenance = reply["provenance"]
    layer = "model.layers.0.self_attn.q_proj"
    assert provenance[f"{layer}.base_layer.weight"].startswith("checkpoint: model-0000")
    assert provenance[f"{layer}.base_layer.weight"].endswith(f": {layer}.weight")
    assert provenance[f"{layer}.lora_A.default.weight"] == "init: normal(0, 0.25), seed 0"
    assert provenance[f"{layer}.lora_B.default.weight"] == "init: constant(0), seed 0"
    assert reply["names"] <= set(provenance)


def load_with_adapters(folder, settings):
    config = lora_config(**settings)
    before = config.to_dict()
    load(folder, "fsdp2", lora=config)
    return before, config.to_dict()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=["all-linear", "down_proj"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_on_fused_experts_work_or_are_refused_by_name(checkpoints, strategy, targets):
    """peft turns these targets into adapters of expert parameters, which `target_parameters` asks for openly."""
    settings = {"target_modules": targets}
    for outcome in run_ranks_outcomes(2, describe_adapters, checkpoints["qwen3_moe"], strategy, settings):
        if outcome[0] == "error":
            assert outcome[2].startswith(("L113 ", "S214 ")), outcome[2]
            named = targets if isinstance(targets, str) else sorted(targets)
            assert f"target_modules={named!r}" in outcome[2] and "experts" in outcome[2]
        else:
            check_adapters(outcome[1])


def test_the_caller_s_lora_config_is_left_as_it_was(checkpoints):
    """peft resolves targets in place; the same config may be meant for another model next."""
    (reply,) = run_ranks(1, load_with_adapters, checkpoints["llama"], {"target_modules": "all-linear"})
    before, after = reply
    assert after == before


def names_through_training(folder, strategy):
    policy = load(folder, strategy, lora=lora_config())
    names = [[name for name, _ in policy.named_parameters()]]
    for _ in range(2):
        policy.module(input_ids=TOKENS, labels=TOKENS).loss.backward()
        names.append([name for name, _ in policy.named_parameters()])
    return names


@pytest.mark.parametrize(("strategy", "num_ranks"), [("fsdp1", 1), ("fsdp1", 2), ("fsdp2", 1), ("fsdp2", 2)])
def test_no_frozen_parameter_is_lost_in_training(checkpoints, strategy, num_ranks):
    """FSDP1 on one rank does not shard, and forgets the parameters of a unit that is frozen: that must be refused."""
    for outcome in run_ranks_outcomes(num_ranks, names_through_training, checkpoints["llama"], strategy):
        if outcome[0] == "error":
            assert (strategy, num_ranks) == ("fsdp1", 1), outcome
            assert outcome[2].startswith("S214 ")
        else:
            before, *later = outcome[1]
            assert "model.embed_tokens.weight" in before
            assert all(names == before for names in later)


def trainable_of_critic(folder, strategy, settings):
    critic = load(folder, strategy, role="critic", lora=lora_config(**settings))
    return {name for name, param in critic.named_parameters() if param.requires_grad}


@pytest.mark.parametrize("targets", [ATTENTION, "all-linear"], ids=["attention", "all-linear"])
def test_a_critic_with_adapters_trains_its_value_head(checkpoints, targets):
    """The head is drawn at random; frozen, no value could ever be right."""
    settings = {"target_modules": targets}
    for trainable in run_ranks(2, trainable_of_critic, checkpoints["llama"], "fsdp2", settings):
        learning = {name.replace(".base_layer", "") for name in trainable if not is_adapter(name)}
        assert learning == {"score.weight"}
