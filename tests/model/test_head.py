"""The chunked head against logits that exist: values and gradients, for every transformation of the logits."""

import pytest
import torch
from torch import nn

from shardproof.model import head as head_module
from shardproof.model.head import HeadFacts, can_chunk, head_facts, token_logprobs
from tests.models import tiny_config

TOKENS, WIDTH, WORDS = 23, 12, 37
FACTS = {
    "plain": HeadFacts(),
    "scaled": HeadFacts(scale=0.25),
    "capped": HeadFacts(softcap=3.0),
    "scaled_and_capped": HeadFacts(scale=2.0, softcap=3.0),
}


def make_head(bias, dtype=torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WORDS, bias=bias, dtype=dtype)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(WORDS, (TOKENS,))
    return head, hidden, targets


def whole_logprobs(hidden, head, targets, temperature, facts):
    """(log-probs, entropy) from logits of all tokens at once, in the input's own precision."""
    logits = head(hidden) * facts.scale
    if facts.softcap is not None:
        logits = facts.softcap * torch.tanh(logits / facts.softcap)
    every = torch.log_softmax(logits / temperature, dim=-1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


def gradients(head, hidden, logps, entropy):
    """Gradients of a sum in which every token's log-prob and entropy weigh differently."""
    weights = torch.linspace(-1.0, 2.0, TOKENS, dtype=logps.dtype)
    total = (weights * logps).sum()
    if entropy is not None:
        total = total + (weights.flip(0) * entropy).sum()
    params = [param for param in (hidden, *head.parameters()) if param.requires_grad]
    return torch.autograd.grad(total, params)


@pytest.mark.parametrize("chunk_elements", [1, 5 * WORDS, 1 << 25], ids=["one_token", "five_tokens", "all"])
@pytest.mark.parametrize("want_entropy", [False, True], ids=["logps", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
def test_values_and_gradients(monkeypatch, facts, bias, temperature, want_entropy, chunk_elements):
    monkeypatch.setattr(head_module, "_CHUNK_ELEMENTS", chunk_elements)
    head, hidden, targets = make_head(bias)
    options = {"temperature": temperature, "facts": facts, "want_entropy": want_entropy}
    logps, entropy = token_logprobs(hidden, head, targets, **options)
    expected_logps, expected_entropy = whole_logprobs(hidden, head, targets, temperature, facts)
    assert logps.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps, expected_logps.float(), rtol=0, atol=1e-6)
    if want_entropy:
        torch.testing.assert_close(entropy, expected_entropy.float(), rtol=0, atol=2e-6)
    else:
        assert entropy.numel() == 0
        entropy = expected_entropy = None
    found = gradients(head, hidden, logps, entropy)
    expected = gradients(head, hidden, expected_logps, expected_entropy)
    for ours, theirs in zip(found, expected, strict=True):
        # Logits of a chunk are float32 whatever the input is.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_frozen_head_has_no_gradient():
    head, hidden, targets = make_head(bias=True)
    head.requires_grad_(False)
    logps, _ = token_logprobs(hidden, head, targets, temperature=1.0, facts=HeadFacts(), want_entropy=False)
    logps.sum().backward()
    assert head.weight.grad is None
    assert head.bias.grad is None
    expected, _ = whole_logprobs(hidden, head, targets, 1.0, HeadFacts())
    torch.testing.assert_close(
        hidden.grad, torch.autograd.grad(expected.sum(), hidden)[0], rtol=1e-5, atol=2e-6
    )


def test_frozen_hidden_states_need_no_gradient():
    head, hidden, targets = make_head(bias=False)
    hidden = hidden.detach()
    logps, _ = token_logprobs(hidden, head, targets, temperature=1.0, facts=HeadFacts(), want_entropy=False)
    logps.sum().backward()
    expected, _ = whole_logprobs(hidden, head, targets, 1.0, HeadFacts())
    grad = torch.autograd.grad(expected.sum(), head.weight)[0]
    torch.testing.assert_close(head.weight.grad, grad, rtol=1e-5, atol=2e-6)


def test_bf16_head_gives_float32_logprobs():
    head, hidden, targets = make_head(bias=False, dtype=torch.bfloat16)
    options = {"temperature": 1.0, "facts": HeadFacts(), "want_entropy": True}
    logps, entropy = token_logprobs(hidden, head, targets, **options)
    exact = nn.Linear(WIDTH, WORDS, bias=False)
    exact.weight = nn.Parameter(head.weight.float())
    expected_logps, expected_entropy = whole_logprobs(hidden.float(), exact, targets, 1.0, HeadFacts())
    assert logps.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps, expected_logps, rtol=0, atol=0.02)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=0.02)
    (logps.sum() + entropy.sum()).backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    assert torch.isfinite(head.weight.grad).all()


def test_no_tensor_is_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr(head_module, "_CHUNK_ELEMENTS", 4 * WORDS)
    head, hidden, targets = make_head(bias=True)
    largest = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(
                x.numel()
                for x in (out if isinstance(out, tuple | list) else [out])
                if isinstance(x, torch.Tensor)
            )
            return out

    with Largest():
        logps, entropy = token_logprobs(
            hidden, head, targets, temperature=0.7, facts=HeadFacts(softcap=3.0), want_entropy=True
        )
        (logps.sum() + entropy.sum()).backward()
    # The head's own gradient is [WORDS, WIDTH]; logits of all tokens would be [TOKENS, WORDS].
    assert max(largest) <= WORDS * WIDTH < TOKENS * WORDS


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("llama", {}, HeadFacts()),
        ("gemma2", {}, HeadFacts(softcap=5.0)),
        ("granitemoe", {}, HeadFacts(scale=0.5)),
        ("cohere", {}, HeadFacts(scale=0.25)),
        ("cohere", {"logit_scale": 3.0}, HeadFacts(scale=3.0)),
    ],
)
def test_facts_of_a_family(family, fields, expected):
    assert head_facts(tiny_config(family, **fields)) == expected


def test_which_heads_are_chunked():
    class Adapted(nn.Linear):
        base_layer = None

    assert can_chunk(nn.Linear(2, 3))
    assert not can_chunk(Adapted(2, 3))
    assert not can_chunk(nn.Identity())
    assert not can_chunk(None)


def test_chunks_that_are_kept_change_nothing(monkeypatch):
    """Kept or computed again: the same gradients to the bit, for any number of kept chunks, and a second time."""
    monkeypatch.setattr(head_module, "_CHUNK_ELEMENTS", 5 * WORDS)
    head, hidden, targets = make_head(bias=True, dtype=torch.float32)
    options = {"temperature": 0.6, "facts": HeadFacts(), "want_entropy": True}
    found = []
    for num in (0, 2, 99):
        monkeypatch.setattr(head_module, "_num_kept", lambda hidden, weight, num=num: num)
        logps, entropy = token_logprobs(hidden, head, targets, **options)
        total = logps.sum() + 0.5 * entropy.sum()
        found += [torch.autograd.grad(total, (hidden, *head.parameters()), retain_graph=True) for _ in "ab"]
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))
