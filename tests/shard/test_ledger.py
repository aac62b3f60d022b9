"""The write ledger and computed buffers: what nobody wrote, or two wrote, is found and named."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardproof as sp
from shardproof.errors import ShardFault
from shardproof.model.buffers import compute_buffers
from shardproof.shard import materialise
from shardproof.shard.ledger import Ledger, Writer
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = pytest.mark.fault

TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def ledger_of(start, stop, writes, named=True):
    ledger = Ledger()
    ledger.expect("w", (300,), [((start, stop),)])
    for write in writes:
        ledger.write("w", (write,))
    if named:
        ledger.name_writer("w", Writer("checkpoint", "model.safetensors: w"))
    return ledger


@pytest.mark.parametrize(
    ("start", "stop", "writes"),
    [
        (0, 10, [(0, 10)]),
        (0, 10, [(5, 10), (0, 5)]),
        (7, 10, [(7, 8), (9, 10), (8, 9)]),
        (4, 4, []),
    ],
)
def test_range_written_once_is_clean(start, stop, writes):
    assert ledger_of(start, stop, writes).findings(rank=0) == []


@pytest.mark.parametrize(
    ("writes", "first"),
    [([], 2), ([(3, 10)], 2), ([(2, 9)], 9), ([(2, 5), (6, 10)], 5), ([(6, 10), (2, 5)], 5)],
)
def test_gap_is_named(writes, first):
    (finding,) = ledger_of(2, 10, writes).findings(rank=3)
    assert (finding.code, finding.rank, finding.tensor) == ("S201", 3, "w")
    assert f"from {first} on were not written" in finding.message
    assert "[2, 10)" in finding.message


@pytest.mark.parametrize(
    ("writes", "first"),
    [
        ([(2, 10), (2, 10)], 2),
        ([(2, 6), (5, 10)], 5),
        ([(2, 10), (4, 5)], 4),
        ([(1, 10)], 1),
        ([(2, 11)], 10),
    ],
)
def test_overlap_is_named(writes, first):
    (finding,) = ledger_of(2, 10, writes).findings(rank=1)
    assert (finding.code, finding.rank, finding.tensor) == ("S202", 1, "w")
    assert f"from {first} on were written twice" in finding.message


@pytest.mark.parametrize(
    ("writes", "code", "message"),
    [
        ([((2, 4), (0, 3), (1, 5))], None, ""),
        ([((2, 3), (0, 3), (1, 5)), ((3, 4), (0, 3), (1, 5))], None, ""),
        ([((2, 4), (0, 3), (1, 3)), ((2, 4), (0, 3), (4, 5))], "S201", "from (2, 0, 3) on were not written"),
        (
            [((2, 4), (0, 3), (1, 4)), ((2, 4), (0, 3), (3, 5))],
            "S202",
            "from (2, 0, 3) on were written twice",
        ),
        ([((2, 4), (0, 3), (1, 6))], "S202", "from (2, 0, 5) on were written twice"),
    ],
)
def test_boxes_of_experts_rows_and_columns(writes, code, message):
    ledger = Ledger()
    ledger.expect("w", (6, 3, 8), [((2, 4), (0, 3), (1, 5))])
    for write in writes:
        ledger.write("w", write)
    ledger.name_writer("w", Writer("checkpoint", "model.safetensors: w"))
    findings = ledger.findings(rank=0)
    assert [finding.code for finding in findings] == ([code] if code else [])
    for finding in findings:
        assert f"elements of 'w' {message}; this rank holds [2, 4) x [0, 3) x [1, 5)." in finding.message


def test_tensor_without_a_named_writer_is_a_finding():
    (finding,) = ledger_of(0, 4, [(0, 4)], named=False).findings(rank=0)
    assert (finding.code, finding.tensor) == ("S201", "w")
    assert "no source was recorded" in finding.message


def test_each_tensor_is_reported():
    ledger = Ledger()
    for name, end in (("a", 3), ("b", 4), ("c", 5)):
        ledger.expect(name, (2, 2), [((0, 4),)])
        ledger.write(name, ((0, end),))
        ledger.name_writer(name, Writer("init", "constant(1)"))
    assert [(finding.code, finding.tensor) for finding in ledger.findings(0)] == [
        ("S201", "a"),
        ("S202", "c"),
    ]


def test_count_of_writers_by_kind():
    ledger = Ledger()
    for name, kind in (("a", "checkpoint"), ("b", "tie"), ("c", "checkpoint")):
        ledger.name_writer(name, Writer(kind, "x"))
    assert ledger.num_by_kind() == {"checkpoint": 2, "tie": 1}


@pytest.mark.parametrize("seed", range(50))
def test_random_coverings(seed):
    """A covering is clean in any order; without one of its parts it has a gap, with one of them twice an overlap."""
    draw = random.Random(seed)
    start = draw.randrange(100)
    stop = start + draw.randrange(1, 200)
    cuts = sorted({start, stop, *(draw.randrange(start, stop) for _ in range(draw.randrange(12)))})
    parts = list(itertools.pairwise(cuts))
    draw.shuffle(parts)
    assert ledger_of(start, stop, parts).findings(0) == []

    one = draw.choice(parts)
    (gap,) = ledger_of(start, stop, [part for part in parts if part != one]).findings(0)
    assert gap.code == "S201"
    assert f"from {one[0]} on" in gap.message

    (overlap,) = ledger_of(start, stop, [*parts, one]).findings(0)
    assert overlap.code == "S202"
    assert f"from {one[0]} on" in overlap.message


# The same, in a load whose reads go wrong on one rank.


def load_with_wrong_reads(source, strategy, times):
    """Rank 1 does the first read of one tensor `times` times."""
    real = materialise.list_runs

    def list_runs(boxes, start, stop):
        found = real(boxes, start, stop)
        if found[0].source == TENSOR and dist.get_rank() == 1:
            return found[:1] * times + found[1:]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(materialise, "list_runs", list_runs)
        sp.load(source, strategy=strategy, compute_dtype=torch.float32)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(("times", "code"), [(0, "S201"), (2, "S202")])
def test_load_names_the_tensor_and_rank_of_a_wrong_write(checkpoint, strategy, times, code):
    outcomes = run_ranks_outcomes(2, load_with_wrong_reads, checkpoint, strategy, times)
    message = assert_all_raise(outcomes, code, "rank 1", TENSOR, kind="ShardFault")
    assert message.count("Fix: ") == 1


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_load_with_the_same_wrapper_and_right_reads_is_clean(checkpoint, strategy):
    run_ranks(2, load_with_wrong_reads, checkpoint, strategy, 1)


def largest_difference_after_load(folder, replicate):
    policy = sp.load(
        folder,
        strategy="fsdp1",
        mesh=sp.make_mesh(replicate=replicate),
        param_dtype=torch.bfloat16,
        compute_dtype=torch.bfloat16,
    )
    reference = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).named_parameters())
    with FullyShardedDataParallel.summon_full_params(policy.module, writeback=False), torch.no_grad():
        differences = {
            name: float((param - reference[name]).abs().max()) for name, param in policy.named_parameters()
        }
    return {name: difference for name, difference in differences.items() if difference != 0}


@pytest.mark.distributed
@pytest.mark.parametrize(("num_ranks", "replicate"), [(1, 1), (2, 2), (2, 1)])
def test_fsdp1_pads_between_parameters_and_the_write_lands_in_the_parameter(tmp_path, num_ranks, replicate):
    # Four attention sinks are 8 bytes in bf16; FSDP1 aligns each original parameter to 16.
    folder = make_checkpoint(tmp_path, "gpt_oss")
    assert run_ranks(num_ranks, largest_difference_after_load, folder, replicate) == [{}] * num_ranks


# Buffers that no checkpoint holds.


class BufferedConfig(LlamaConfig):
    model_type = "shardproof_buffered"

    def __init__(self, fill="arange", **kwargs):
        self.fill = fill
        super().__init__(**kwargs)


class Table(nn.Module):
    """A table that only this constructor can compute: `_init_weights` of Llama does not know it."""

    def __init__(self, fill):
        super().__init__()
        made = {
            "arange": lambda: torch.arange(6.0) / 7,
            "integers": lambda: torch.arange(6) % 4,
            "mask": lambda: torch.ones(3, 3, dtype=torch.bool).tril(),
            "infinite": lambda: torch.full((3, 3), float("-inf")).triu(1),
            "bf16": lambda: torch.linspace(0, 1, 5, dtype=torch.bfloat16),
            "empty": lambda: torch.empty(6),
            "empty_integers": lambda: torch.empty(6, dtype=torch.int64),
            "partly_empty": lambda: torch.cat([torch.zeros(3), torch.empty(3)]),
        }[fill]()
        self.register_buffer("table", made, persistent=False)


class BufferedLlama(LlamaForCausalLM):
    config_class = BufferedConfig

    def __init__(self, config):
        super().__init__(config)
        self.extra = Table(config.fill)


def buffered_config(fill):
    AutoConfig.register(BufferedConfig.model_type, BufferedConfig, exist_ok=True)
    AutoModelForCausalLM.register(BufferedConfig, BufferedLlama, exist_ok=True)
    return BufferedConfig(
        fill=fill,
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )


def load_buffered(fill, strategy):
    policy = sp.load(sp.RandomInit(buffered_config(fill)), strategy=strategy)
    table = policy.model.get_buffer("extra.table")
    return table, str(policy.provenance["extra.table"]), str(policy.provenance["model.rotary_emb.inv_freq"])


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("fill", ["arange", "integers", "mask", "infinite", "bf16"])
def test_buffer_that_only_a_constructor_computes(fill, strategy):
    expected = Table(fill).table
    for table, writer, rotary_writer in run_ranks(2, load_buffered, fill, strategy):
        assert table.dtype == expected.dtype
        assert torch.equal(table, expected)
        assert writer == "computed: Table through its constructor"
        assert rotary_writer == "computed: LlamaRotaryEmbedding through _init_weights"


@pytest.mark.distributed
@pytest.mark.parametrize("fill", ["empty", "empty_integers", "partly_empty"])
def test_buffer_that_nothing_writes(fill):
    outcomes = run_ranks_outcomes(2, load_buffered, fill, "fsdp2")
    message = assert_all_raise(outcomes, "S204", "extra.table", kind="ShardFault")
    assert "inv_freq" not in message


def test_compute_buffers_leaves_torch_as_it_was():
    with torch.device("meta"):
        model = BufferedLlama(buffered_config("empty"))
    state = torch.random.get_rng_state()
    with pytest.raises(ShardFault, match="S204"):
        compute_buffers(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not nn.Linear(2, 2).weight.is_meta
