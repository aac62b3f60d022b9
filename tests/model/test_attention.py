"""Packed attention against transformers' eager attention, one sequence at a time."""

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as eager_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_attention_with_sinks

import shardproof as sp
from shardproof.model.attention import packed_attention
from shardproof.model.packing import Packing

LENGTHS = (5, 1, 12, 8)
REPEATED = (3, 5, 1, 5, 3, 3, 6)  # the same number of tokens; sequences of one length are attended together
HEADS, DIM = 4, 16


class Attention(nn.Module):
    """What attention functions ask of the module that calls them."""

    def __init__(self, kv_heads, sinks=None):
        super().__init__()
        self.num_key_value_groups = HEADS // kv_heads
        self.head_dim = DIM
        self.is_causal = True
        self.sinks = sinks


def make_states(kv_heads, value_dim=DIM, dtype=torch.float32):
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = [(HEADS, DIM), (kv_heads, DIM), (kv_heads, value_dim)]
    return [torch.randn(1, heads, tokens, dim).to(dtype).requires_grad_() for heads, dim in shapes]


def make_packing(lengths=LENGTHS):
    return Packing(lengths, torch.device("cpu"))


def causal_mask(length, window):
    """transformers' additive mask: a query sees itself and `window` - 1 tokens before it."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    return torch.zeros(length, length).masked_fill(hidden, torch.finfo(torch.float32).min)


def sequence_by_sequence(states, module, window=None, lengths=LENGTHS, **options):
    attend = eager_attention if module.sinks is None else eager_attention_with_sinks
    parts = []
    for first, last in make_packing(lengths).spans():
        query, key, value = (x[:, :, first:last] for x in states)
        parts.append(attend(module, query, key, value, causal_mask(last - first, window), **options)[0])
    return torch.cat(parts, dim=1)


CASES = {
    "plain": {},
    "window": {"sliding_window": 3},
    "window_longer_than_all": {"sliding_window": 100},
    "window_of_one": {"sliding_window": 1},
    "softcap": {"softcap": 1.5},
    "softcap_and_window": {"softcap": 1.5, "sliding_window": 4},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "sinks_and_window": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sliding_window": 4},
}


@pytest.mark.parametrize("lengths", [LENGTHS, REPEATED], ids=["distinct", "repeated"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_packed_attention_is_eager_attention_of_each_sequence(case, kv_heads, lengths):
    options = CASES[case]
    module = Attention(kv_heads, options.get("s_aux"))
    states = make_states(kv_heads)
    found, weights = packed_attention(
        module,
        *states,
        None,
        packing=make_packing(lengths),
        scaling=0.3,
        **options,
        position_ids=None,
        use_cache=False,
    )
    extra = {"softcap": options["softcap"]} if "softcap" in options else {}
    window = options.get("sliding_window")
    expected = sequence_by_sequence(states, module, window, lengths, scaling=0.3, **extra)
    assert weights is None
    assert found.shape == (1, sum(LENGTHS), HEADS, DIM)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    weight = torch.randn_like(found)
    ours = torch.autograd.grad((found * weight).sum(), states)
    theirs = torch.autograd.grad((expected * weight).sum(), states)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_sinks_learn():
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    module = Attention(2, sinks)
    states = make_states(2)
    found, _ = packed_attention(module, *states, None, packing=make_packing(), scaling=0.3, s_aux=sinks)
    expected = sequence_by_sequence(states, module, scaling=0.3)
    ours = torch.autograd.grad(found.square().sum(), sinks)[0]
    theirs = torch.autograd.grad(expected.square().sum(), sinks)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert theirs.abs().min() > 1e-3


def test_default_scaling_is_that_of_the_head():
    states = make_states(2)
    for options in ({}, {"softcap": 50.0}):
        found, _ = packed_attention(Attention(2), *states, None, packing=make_packing(), **options)
        expected = sequence_by_sequence(states, Attention(2), scaling=DIM**-0.5, **options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_values_may_be_narrower_than_keys():
    # Latent attention, as in deepseek.
    states = make_states(4, value_dim=8)
    found, _ = packed_attention(Attention(4), *states, None, packing=make_packing(), scaling=0.3)
    expected = sequence_by_sequence(states, Attention(4), scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_sequences_do_not_see_each_other():
    query, key, value = (x.detach() for x in make_states(2))
    before, _ = packed_attention(Attention(2), query, key, value, None, packing=make_packing())
    first, last = make_packing().spans()[2]
    for states in (key, value):
        states[:, :, first:last] = 100.0
    after, _ = packed_attention(Attention(2), query, key, value, None, packing=make_packing())
    assert torch.equal(before[:, :first], after[:, :first])
    assert torch.equal(before[:, last:], after[:, last:])
    assert not torch.equal(before[:, first:last], after[:, first:last])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"alibi_slopes": torch.ones(HEADS)}, "alibi_slopes"),
        ({"indexer_mask": torch.ones(1)}, "indexer_mask"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_it_does_not_have_is_refused_by_name(options, word):
    with pytest.raises(sp.TrainFault, match="T303") as caught:
        packed_attention(Attention(2), *make_states(2), None, packing=make_packing(), **options)
    assert word in str(caught.value)
    assert "Attention" in str(caught.value)


def test_unknown_arguments_that_are_none_are_no_request():
    torch.manual_seed(0)
    states = make_states(2)
    plain, with_none = (
        packed_attention(Attention(2), *states, None, packing=make_packing(), **options)[0]
        for options in ({}, {"alibi_slopes": None})
    )
    assert torch.equal(plain, with_none)


def test_a_mask_is_refused():
    with pytest.raises(sp.TrainFault, match="T303") as caught:
        packed_attention(Attention(2), *make_states(2), causal_mask(26, None), packing=make_packing())
    assert "attention_mask" in str(caught.value)


def test_a_module_that_is_not_causal_is_refused():
    module = Attention(2)
    module.is_causal = False
    with pytest.raises(sp.TrainFault, match="T303"):
        packed_attention(module, *make_states(2), None, packing=make_packing())


def test_a_model_that_drops_its_keywords_is_refused():
    with pytest.raises(sp.TrainFault, match="T303") as caught:
        packed_attention(Attention(2), *make_states(2), None)
    assert "does not pass keyword arguments on" in str(caught.value)


def test_packing_knows_its_borders():
    packing = make_packing()
    assert packing.spans() == [(0, 5), (5, 6), (6, 18), (18, 26)]
    assert packing.cu_seqlens.tolist() == [0, 5, 6, 18, 26]
    assert packing.cu_seqlens.dtype == torch.int32
    assert packing.max_length == 12
