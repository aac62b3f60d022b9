"""Replayed experts: any family's routers choose what they are told, and its own code makes weights of their scores."""

import pytest
import torch

from shardproof.errors import ShardproofError
from shardproof.model.families import experts_per_token, num_experts
from shardproof.model.routing import NO_RECORD, Routers, check_replayable
from shardproof.model.skeleton import checkpoint_blocks
from tests.models import make_model, tiny_config

FAMILIES = (
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "granitemoe",
    "qwen2_moe",
    "olmoe",
)
TOKENS = torch.arange(1, 25)[None]


def routed(family, **overrides):
    """A tiny model in which routers were found, and a function that runs it."""
    model = make_model(family, **overrides)
    routers = Routers(model)

    def run():
        return model(TOKENS, use_cache=False).logits

    routers.settle(run)
    return model, routers, run


def noted(routers, run):
    with torch.no_grad(), routers.noting() as found:
        logits = run()
    assert tuple(layer for layer, _ in found) == routers.layers
    return torch.stack([experts for _, experts in found], 1), logits


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_a_models_own_choice_changes_no_bit(family):
    with torch.no_grad():
        expected = make_model(family)(TOKENS, use_cache=False).logits
    _, routers, run = routed(family)
    own, while_noted = noted(routers, run)
    routers.replay(own)
    with torch.no_grad():
        replayed = run()
    routers.replay(None)
    with torch.no_grad():
        afterwards = run()
    for found in (while_noted, replayed, afterwards):
        assert torch.equal(found, expected)
    first_dense = 1 if family in ("deepseek_v3", "glm4_moe") else 0
    assert routers.layers == (first_dense, first_dense + 1)
    assert own.shape == (24, 2, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_choose_what_they_are_told_and_themselves_without_a_record(family):
    _, routers, run = routed(family)
    own, expected = noted(routers, run)
    other = (own + 1) % routers.num_experts
    other[-5:] = NO_RECORD
    routers.replay(other)
    chosen, logits = noted(routers, run)
    assert torch.equal(chosen[:-5], other[:-5])
    assert (
        torch.equal(chosen[-5:, 0], own[-5:, 0]) or family == "gpt_oss"
    )  # before it, nothing differs but attention
    assert bool((chosen[-5:] >= 0).all())
    assert (logits - expected).abs().max() > 0.01


# An independent computation of the weights of given experts, from each family's own formula.


def weights_of(family, module, hidden, experts):
    """What a family's router says about `experts`, [tokens, chosen], computed from its weight and its formula."""
    gate = module.gate if hasattr(module, "gate") else module.router
    weight = gate.layer.weight if hasattr(gate, "layer") else gate.weight
    logits = hidden.float() @ weight.float().T
    if family == "gpt_oss":
        return torch.softmax((logits + gate.bias).gather(1, experts), -1)
    if family == "granitemoe":
        return torch.softmax(logits.gather(1, experts), -1)
    if family in ("deepseek_v3", "glm4_moe"):
        scores = torch.sigmoid(logits).gather(
            1, experts
        )  # the bias helps to choose, and is no part of the weight
        return scores / (scores.sum(-1, keepdim=True) + 1e-20) * module.config.routed_scaling_factor
    probs = torch.softmax(logits, -1).gather(1, experts)
    is_normed = family == "mixtral" or module_config(module).norm_topk_prob
    return probs / probs.sum(-1, keepdim=True) if is_normed else probs


def module_config(module):
    return module.experts.config


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_current_scores_of_the_replayed_experts(family):
    model, routers, run = routed(family)
    own, _ = noted(routers, run)
    other = (own + 1) % routers.num_experts
    seen = []

    def look(module, args):
        experts, weights = args[1:3]
        seen.append((args[0].reshape(-1, args[0].shape[-1]), experts, weights))

    blocks = [
        layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
        for layer in model.model.layers
    ]
    blocks = [block for block in blocks if hasattr(block, "experts")]
    for block in blocks:
        block.experts.register_forward_pre_hook(look)
    routers.replay(other)
    with torch.no_grad():
        run()
    assert len(seen) == len(blocks) == 2
    for at, (block, (hidden, experts, weights)) in enumerate(zip(blocks, seen, strict=True)):
        assert torch.equal(experts, other[:, at])
        expected = weights_of(family, block, hidden, other[:, at])
        torch.testing.assert_close(weights.float(), expected, rtol=1e-5, atol=1e-6)


# Gradients.


def gradients(family, every, experts="eager", replayed=None):
    model, routers, run = routed(family, experts_implementation=experts)
    model.train()
    checkpoint_blocks(model, every)
    routers.replay(replayed)
    run().float().square().mean().backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_recomputed_blocks_replay_too(family, experts):
    _, routers, run = routed(family)
    own, _ = noted(routers, run)
    other = (own + 1) % routers.num_experts
    other[::7] = NO_RECORD
    plain = gradients(family, 0, experts, other)
    recomputed = gradients(family, 1, experts, other)
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    own_choice = gradients(family, 0, experts)
    router = next(name for name in plain if "gate.weight" in name or "router.weight" in name)
    assert (
        plain[router] - own_choice[router]
    ).abs().max() > 1e-7  # gradients flow through the router's weights


# What cannot be replayed is refused by name.


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_dense_model_is_refused(family):
    with pytest.raises(ShardproofError, match=f"C001.*{family}.*no router"):
        check_replayable(tiny_config(family))


def test_routers_that_choose_otherwise_are_refused():
    model = make_model("qwen3_moe")
    model.config.num_experts_per_tok = 3  # the routers were built for 2
    routers = Routers(model)
    with pytest.raises(ShardproofError, match=r"C001.*'qwen3_moe' cannot be replayed"):
        routers.settle(lambda: model(TOKENS, use_cache=False))


def test_experts_of_another_number_of_tokens_are_refused():
    _, routers, run = routed("mixtral")
    own, _ = noted(routers, run)
    routers.replay(own[1:])
    with pytest.raises(ShardproofError, match=r"R511.*layer 0 routes 24 tokens, but experts of 23"):
        run()
    with pytest.raises(ShardproofError, match=r"C004.*\[24, 1, 2\], expected \[tokens, 2, 2\]"):
        routers.replay(own[:, :1])


def test_config_facts_are_those_of_the_routers():
    for family in FAMILIES:
        _, routers, _ = routed(family)
        config = tiny_config(family)
        assert (routers.num_experts, routers.num_chosen) == (num_experts(config), experts_per_token(config))
