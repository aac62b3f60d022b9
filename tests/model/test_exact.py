"""Exact operations: a row's bits do not depend on the rows beside it, and are those of the ordinary operation but for rounding."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from transformers import DynamicCache

from shardproof.model import exact, exact_attention, exact_cpu, hf_private
from shardproof.model.attention import PACKED as ORDINARY
from shardproof.model.attention import attend_packed
from shardproof.model.exact import make_exact
from shardproof.model.exact_attention import COLUMNS, PACKED, Columns, attend_step, paged
from shardproof.model.packing import Packing
from tests.interpreted import run_interpreted
from tests.model.exact_cases import CASES
from tests.models import make_model

CPU = torch.device("cpu")
PARTS = [(0, 1), (7, 1), (299, 1), (3, 2), (5, 5), (29, 33), (100, 64), (0, 257)]


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def assert_rows_alone(function, *rows):
    whole = function(*rows)
    for at, num in PARTS:
        part = function(*(each[at : at + num].clone() for each in rows))
        assert torch.equal(part, whole[at : at + num]), (at, num)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_batch(threads, dtype):
    torch.manual_seed(0)
    for n, k in ((48, 32), (101, 24), (1, 65), (300, 512)):
        x, weight, bias = torch.randn(300, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
        assert_rows_alone(lambda x, w=weight, b=bias: exact_cpu.linear(x, w, b), x)
        expected = x.double() @ weight.double().T + bias.double()
        limit = 1e-4 if dtype == torch.float32 else 0.3
        assert (exact_cpu.linear(x, weight, bias).double() - expected).abs().max() < limit
    for width in (24, 151):
        x = torch.randn(300, width).to(dtype)
        assert_rows_alone(exact_cpu.silu, x)
        assert_rows_alone(exact_cpu.sigmoid, x)
        assert_rows_alone(lambda x: exact_cpu.gelu(x, approximate="tanh"), x)
        assert_rows_alone(exact_cpu.rsqrt, x.abs() + 0.1)
    logits, tokens = 4 * torch.randn(300, 5003).to(dtype), torch.randint(0, 5003, (300,))
    assert_rows_alone(lambda z, t: exact_cpu.token_logprobs(z, t, 0.7)[0], logits, tokens)
    truth = torch.log_softmax(logits.double() / 0.7, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(
        exact_cpu.token_logprobs(logits, tokens, 0.7)[0], truth.float(), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    "extras",
    [{}, {"window": 16}, {"softcap": 2.0}, {"sinks": torch.linspace(-1, 2, 6)}],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_attention_does_not_depend_on_the_queries_beside_it(extras):
    torch.manual_seed(0)
    lengths, heads, key_heads, width = [70, 5, 130], 6, 2, 24
    starts = [0, *accumulate(lengths)][:-1]
    query, key, value = (torch.randn(sum(lengths), h, width) for h in (heads, key_heads, key_heads))
    arguments = {"window": None, "softcap": None, "sinks": None} | extras

    def packed(attend):
        states = (each.transpose(0, 1)[None] for each in (query, key, value))
        return attend(*states, Packing(lengths, CPU), 0.3, *arguments.values())[0].transpose(0, 1)

    found = packed(exact_attention.packed)
    torch.testing.assert_close(found, packed(attend_packed), atol=1e-5, rtol=1e-5)
    # The same queries one by one, and in pieces, with keys in blocks that lie anywhere.
    table = torch.tensor([[3, 1, 5]], dtype=torch.int32)
    for start, length in zip(starts, lengths, strict=True):
        cache = tuple(torch.full((7, key_heads, 64, width), float("nan")) for _ in range(2))
        for at in range(length):
            for held, new in zip(cache, (key, value), strict=True):
                held[table[0, at // 64], :, at % 64] = new[start + at]
        for at in {0, 3, 64, 65, length - 1} & set(range(length)):
            row, position = slice(start + at, start + at + 1), torch.tensor([[at]])
            one = attend_step(query[row], key[row], value[row], cache, table, position, 0.3, **extras)
            assert torch.equal(one.view(1, heads, width), found[row]), at
        pieces = [(0, length // 3, 0), (length // 3, length - length // 3, length // 3)]
        again = paged(query[start : start + length], cache, table.expand(2, -1), pieces, 0.3, **extras)
        assert torch.equal(again, found[start : start + length])


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", torch.float32),
        ("qwen3_moe", torch.bfloat16),
        ("gemma2", torch.bfloat16),
        ("mistral", torch.float32),
        ("deepseek_v3", torch.float32),
        ("gpt_oss", torch.float32),
    ],
)
def test_decoding_gives_the_logits_of_packed_sequences(family, dtype):
    model, lengths, num_new = make_model(family, dtype=dtype), [62, 13, 1], 5
    make_exact(model, CPU)
    torch.manual_seed(0)
    ids = torch.randint(3, 100, (3, 80))
    spans = [length + num_new for length in lengths]
    packing = Packing(spans, CPU)
    row = torch.cat([ids[n, :span] for n, span in enumerate(spans)])
    positions = torch.cat([torch.arange(span) for span in spans])
    with torch.no_grad(), hf_private.attention_implementation(model, PACKED):
        whole = model(input_ids=row[None], position_ids=positions[None], packing=packing, use_cache=False)
    whole = whole.logits[0].split(spans)
    mask = torch.tensor([[0] * (62 - n) + [1] * n for n in lengths])
    inputs = torch.tensor([[0] * (62 - n) + ids[k, :n].tolist() for k, n in enumerate(lengths)])
    positions, cache = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache(config=model.config)
    with torch.no_grad(), hf_private.attention_implementation(model, COLUMNS):
        for step in range(num_new):
            given = {"input_ids": inputs, "position_ids": positions, "attention_mask": mask}
            columns = Columns(mask, inputs.shape[1])
            logits = model(**given, past_key_values=cache, use_cache=True, columns=columns).logits[:, -1]
            for k, length in enumerate(lengths):
                assert torch.equal(logits[k], whole[k][length + step - 1]), (k, step)
            inputs = torch.stack([ids[k, n + step] for k, n in enumerate(lengths)])[:, None]
            positions = torch.tensor([[n + step] for n in lengths])
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], 1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_gradients_are_those_of_ordinary_operations(family):
    lengths, grads = [21, 70], []
    torch.manual_seed(0)
    ids = torch.randint(3, 100, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    for attention in (ORDINARY, PACKED):
        model = make_model(family)
        if attention == PACKED:
            make_exact(model, CPU)
        with hf_private.attention_implementation(model, attention):
            given = {"input_ids": ids, "position_ids": positions, "packing": Packing(lengths, CPU)}
            logits = model(**given, use_cache=False).logits[0]
            if attention == PACKED:
                logps = exact.scored_tokens(logits, ids[0], 0.8)
            else:
                logps = torch.log_softmax(logits / 0.8, -1).gather(1, ids[0, :, None])[:, 0]
            (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
        grads.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=2e-4, rtol=2e-3, msg=name)


@pytest.fixture(scope="module")
def gaps():
    return run_interpreted("tests.model.exact_cases")


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_what_plain_torch_computes(gaps, name):
    assert gaps[name] < 1e-5
