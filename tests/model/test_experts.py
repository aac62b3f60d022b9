"""Grouped experts against transformers' own loop over experts: values and gradients, and which families may use them."""

import pytest
import torch
from torch.nn.functional import softmax
from transformers import AutoModelForCausalLM

from shardproof.model import hf_private
from shardproof.model.experts import GROUPED, grouped_experts, use_grouped_experts
from tests.models import FAMILIES, tiny_config


def make_experts(family: str = "qwen3_moe") -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    return hf_private.expert_modules(model)[0]


def results(experts, forward, hidden, chosen, scores):
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, scores)]
    experts.zero_grad()
    out = forward(experts, leaves[0], chosen, leaves[1])
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), *(x.grad for x in (*leaves, experts.gate_up_proj, experts.down_proj))


@pytest.mark.parametrize("num_tokens", [1, 2, 50])
@pytest.mark.parametrize("skewed", [False, True], ids=["spread", "experts without tokens"])
def test_equal_to_a_loop_over_experts(num_tokens, skewed):
    torch.manual_seed(num_tokens)
    experts = make_experts()
    experts.config._experts_implementation_internal = "eager"
    number = 2 if skewed else experts.num_experts
    scores, chosen = softmax(torch.randn(num_tokens, number), -1).topk(2, -1)
    chosen = chosen + (experts.num_experts - number)
    hidden = torch.randn(num_tokens, experts.hidden_dim)
    expected = results(experts, lambda module, *args: module(*args), hidden, chosen, scores)
    found = results(experts, grouped_experts, hidden, chosen, scores)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_frozen_experts_get_no_gradient():
    experts = make_experts().requires_grad_(False)
    hidden = torch.randn(5, experts.hidden_dim, requires_grad=True)
    chosen, scores = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    grouped_experts(experts, hidden, chosen, scores).sum().backward()
    assert hidden.grad is not None
    assert experts.gate_up_proj.grad is None and experts.down_proj.grad is None


@pytest.mark.parametrize("family", FAMILIES)
def test_only_plain_gated_experts_are_taken(family):
    """A family whose experts compute something else keeps its own way; with ours, logits stay what they were."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(ids).logits
        use_grouped_experts(model)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    taken = {m.config._experts_implementation for m in hf_private.expert_modules(model)}
    if family == "qwen3_moe":
        assert taken == {GROUPED}
    if family == "gpt_oss":
        assert GROUPED not in taken
