"""Routing: the balancing loss is transformers' own, and recomputed activations take the path of the forward."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardproof.model.families import experts_per_token, num_experts
from shardproof.model.router import balancing_loss, balancing_statistics, replay_routing
from shardproof.model.skeleton import checkpoint_blocks
from tests.models import make_model, tiny_config

# The balancing loss.


def router_logits(config, num_layers=3, tokens=17):
    torch.manual_seed(0)
    shape = (tokens, num_experts(config))
    return tuple(torch.randn(shape, requires_grad=True) for _ in range(num_layers))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe"])
def test_balancing_loss_is_that_of_transformers(family):
    config = tiny_config(family)
    logits = router_logits(config)
    loss = balancing_loss(balancing_statistics(logits, config), config)
    expected = load_balancing_loss_func(logits, num_experts(config), experts_per_token(config))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
        assert theirs.abs().max() > 1e-5


def test_statistics_of_parts_add_up():
    config = tiny_config("mixtral")
    logits = router_logits(config, tokens=12)
    whole = balancing_statistics(logits, config)
    parts = [
        balancing_statistics([layer[rows] for layer in logits], config) for rows in (slice(5), slice(5, 12))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert whole[:, -1].tolist() == [36, 36]


def test_even_routing_has_the_smallest_loss():
    config = tiny_config("mixtral")
    even = torch.eye(4).repeat(3, 1) + torch.eye(4).roll(1, 0).repeat(3, 1)
    lopsided = torch.tensor([[9.0, 8.0, 0.0, 0.0]]).repeat(12, 1)
    losses = [balancing_loss(balancing_statistics([rows], config), config) for rows in (10 * even, lopsided)]
    assert losses[0] == pytest.approx(experts_per_token(config), rel=1e-3)
    assert losses[1] > 1.9 * losses[0]


def test_layers_without_a_router_are_left_out():
    config = tiny_config("mixtral")
    logits = router_logits(config)
    mixed = (None, logits[0], None, *logits[1:])
    assert torch.equal(balancing_statistics(mixed, config), balancing_statistics(logits, config))


# Facts.


@pytest.mark.parametrize(
    ("family", "experts", "chosen"),
    [
        ("mixtral", 4, 2),  # num_local_experts
        ("qwen3_moe", 8, 2),  # num_experts
        ("qwen2_moe", 4, 2),
        ("deepseek_v3", 8, 2),  # n_routed_experts
        ("glm4_moe", 8, 2),
        ("granitemoe", 4, 2),
        ("llama", None, None),
        ("gpt2", None, None),
    ],
)
def test_number_of_experts_by_whatever_name(family, experts, chosen):
    config = tiny_config(family)
    assert num_experts(config) == experts
    if experts is not None:
        assert experts_per_token(config) == chosen


def test_one_expert_is_no_router():
    assert num_experts(tiny_config("mixtral", num_local_experts=1)) is None


# Replay.


def route(probs, weight):
    values, indices = torch.topk(probs, 2, dim=-1)
    values /= values.sum(-1, keepdim=True)  # in place, as Qwen3-MoE does it
    return (weight[indices] * values).sum(-1)


def routed_gradients(probs, weight, context_fn):
    probs, weight = probs.clone().requires_grad_(), weight.clone().requires_grad_()
    if context_fn is None:
        out = route(torch.softmax(probs, -1), weight)
    else:
        out = checkpoint(
            lambda p, w: route(torch.softmax(p, -1), w),
            probs,
            weight,
            use_reentrant=False,
            context_fn=context_fn,
        )
    out.square().sum().backward()
    return out.detach(), probs.grad, weight.grad


def test_replay_is_exact():
    torch.manual_seed(0)
    probs, weight = torch.randn(11, 6), torch.randn(6)
    plain = routed_gradients(probs, weight, None)
    for ours, theirs in zip(routed_gradients(probs, weight, replay_routing), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_topk_gives_what_it_gave_without_the_mode():
    values = torch.tensor([[3.0, 1.0, 2.0], [5.0, 7.0, 6.0]])
    for call in (
        lambda x: torch.topk(x, 2),
        lambda x: x.topk(2, dim=-1),
        lambda x: torch.topk(x, k=1, dim=0),
        lambda x: torch.topk(input=x, k=2, dim=1, sorted=False),
        lambda x: x.topk(2, 1, largest=False),
    ):
        expected = call(values)
        forward, recompute = replay_routing()
        with forward:
            found = call(values)
        with recompute:
            again = call(values)
        for result in (found, again):
            assert torch.equal(result.values, expected.values)
            assert torch.equal(result.indices, expected.indices)


def test_the_recompute_takes_the_forwards_indices_every_time():
    forward, recompute = replay_routing()
    first, second = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[9.0, 8.0, 7.0]])
    with forward:
        chosen = [torch.topk(first, 1).indices.item(), torch.topk(second, 1).indices.item()]
    assert chosen == [2, 0]
    for _ in range(2):  # a block may be recomputed more than once
        with recompute:
            assert torch.topk(-first, 1).indices.item() == 2
            assert torch.topk(-second, 1).values.item() == -9.0


def nearly_tied_model(family):
    """A model whose routers see pairs of experts as equals, up to less than rounding means to a gradient."""
    # An odd number of choices among pairs: one expert of a pair is always left behind.
    model = make_model(family, num_experts_per_tok=3, experts_implementation="batched_mm").train()
    torch.manual_seed(1)
    routers = [module for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
    assert len(routers) == 2
    for router in routers:
        rows = router.weight.data
        nudge = 2e-6 * torch.randn_like(rows[0::2])
        rows[1::2] = rows[0::2] - nudge
        rows[0::2] += nudge
    return model, routers


def swap_twins(routers):
    """Every token now prefers the other expert of each pair: what noise does to a near tie, to all of them at once."""
    for router in routers:
        rows = router.weight.data
        rows[0::2], rows[1::2] = rows[1::2].clone(), rows[0::2].clone()


def noisy_gradients(family, recompute):
    model, routers = nearly_tied_model(family)
    if recompute == "replayed":
        checkpoint_blocks(model, 1)
    elif recompute == "routed again":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.arange(1, 49).view(2, 24)
    logits = model(tokens, use_cache=False).logits
    swap_twins(routers)
    torch.log_softmax(logits, -1).gather(2, tokens[..., None]).mean().backward()
    return {name: param.grad for name, param in model.named_parameters()}


def largest_difference(found, expected):
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_noise_in_the_recompute_does_not_change_the_routing(family):
    expected = noisy_gradients(family, recompute="never")
    assert largest_difference(noisy_gradients(family, "replayed"), expected) < 2e-5
    # Without replay the recompute re-routes without a word; this is what the test would see.
    assert largest_difference(noisy_gradients(family, "routed again"), expected) > 1e-3


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_checkpointed_gradients_are_the_plain_ones(family, experts):
    gradients = []
    for every in (0, 1, 2):
        model = make_model(family, experts_implementation=experts).train()
        checkpoint_blocks(model, every)
        tokens = torch.arange(1, 25).view(1, 24)
        model(tokens, use_cache=False).logits.float().square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for found in gradients[1:]:
        assert found.keys() == gradients[0].keys()
        assert largest_difference(found, gradients[0]) == 0


def test_both_passes_run_in_a_mode_of_one_class():
    """Compiled code is chosen by the class of the mode: a recompute in other code may save other tensors."""
    forward, recompute = replay_routing()
    assert type(forward) is type(recompute)


def test_every_kth_block_is_checkpointed():
    for every, expected in ((0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])):
        model = make_model("llama", num_hidden_layers=5)
        checkpoint_blocks(model, every)
        blocks = model.model.layers
        assert [index for index, block in enumerate(blocks) if block.gradient_checkpointing] == expected
