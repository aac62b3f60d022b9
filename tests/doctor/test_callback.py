"""Attestation in other people's frameworks: transformers' Trainer, TRL and plain accelerate, sharded by accelerate."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

import shardproof as sp
from shardproof.shard.torch_private import clean_name
from tests.models import make_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

INV_FREQ, EMBEDDING, HEAD = "model.rotary_emb.inv_freq", "model.embed_tokens.weight", "lm_head.weight"
TOKENIZER = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
TOKENS = [{"input_ids": [3 + (i + j) % 90 for j in range(9)]} for i in range(8)]


class Break(TrainerCallback):
    """Breaks the model when training begins, on the ranks given, as a framework's loading does."""

    def __init__(self, breaker, ranks):
        self.breaker, self.ranks = breaker, ranks

    def on_train_begin(self, args, state, control, model=None, **parts):
        if dist.get_rank() in self.ranks:
            self.breaker(model)


def local(param):
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


def cast_buffer(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to(torch.bfloat16)


def write_garbage(model):
    model.model.rotary_emb.inv_freq.fill_(0.25)


def leave_memory_unwritten(model):
    # What `empty_like` gives after other tensors lived there.
    local(model.model.embed_tokens.weight).fill_(float("nan"))


def leave_zeros(model):
    for param in model.parameters():
        local(param).zero_()


def untie(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


@contextlib.contextmanager
def own_accelerate_state():
    """accelerate keeps its state in classes; none of it may reach the next test of this process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states = (PartialState, AcceleratorState, GradientState)
    for state in states:
        state._reset_state()
    try:
        yield
    finally:
        for state in states:
            state._reset_state()


def believe_in_an_accelerator():
    """accelerate shards on accelerators only; from here on it believes that this process has one."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def make_args(kind, folder, **options):
    """Arguments of a Trainer that shards with FSDP2."""
    config = {
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    args = kind(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        fsdp=True,
        fsdp_config=config,
        **options,
    )
    believe_in_an_accelerator()
    return args


def outcome_of(trainer, callback):
    """What a trainer came to: stopped before its first step, or trained while sharded."""
    try:
        trainer.train()
    except sp.ShardFault as fault:
        assert trainer.state.global_step == 0, "the fault must be named before the first step"
        return "stopped", fault.findings
    assert isinstance(next(trainer.model.parameters()), DTensor) and trainer.state.global_step == 2
    return "trained", callback.findings


def train_with_transformers(folder, breaker=None, ranks=(), stop=True):
    callback = sp.AttestCallback(every=1, stop=stop)
    with own_accelerate_state():
        trainer = Trainer(
            model=make_model("llama_tied").train(),
            args=make_args(TrainingArguments, folder),
            train_dataset=[{**row, "labels": row["input_ids"]} for row in TOKENS],
            callbacks=[Break(breaker, ranks), callback],
        )
        return outcome_of(trainer, callback)


def train_with_trl(folder, breaker=None, ranks=()):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    callback = sp.AttestCallback(every=1)
    with own_accelerate_state():
        trainer = SFTTrainer(
            model=make_model("llama_tied").train(),
            args=make_args(SFTConfig, folder, bf16=False, gradient_checkpointing=False),
            train_dataset=Dataset.from_list(TOKENS),
            processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
            callbacks=[Break(breaker, ranks), callback],
        )
        return outcome_of(trainer, callback)


def summary(replies):
    """What the ranks came to, the same on each: (outcome, {(code, rank, tensor)})."""
    assert replies == replies[:1] * len(replies)
    outcome, findings = replies[0]
    return outcome, {(finding.code, finding.rank, finding.tensor) for finding in findings}


@pytest.mark.parametrize("train", [train_with_transformers, train_with_trl])
def test_a_clean_run_is_silent(tmp_path, train):
    assert summary(run_ranks(2, train, tmp_path)) == ("trained", set())


@pytest.mark.parametrize(
    ("breaker", "ranks", "expected"),
    [
        (cast_buffer, (1,), {("S208", 1, INV_FREQ)}),
        (leave_memory_unwritten, (1,), {("S205", 1, EMBEDDING)}),
        (leave_zeros, (1,), {("S206", 1, EMBEDDING)}),
        (untie, (0, 1), {("S203", 0, HEAD), ("S203", 1, HEAD), ("S211", 0, HEAD), ("S211", 1, HEAD)}),
    ],
    ids=["buffer", "unwritten placeholder", "zero placeholder", "tie"],
)
def test_the_trainer_stops_before_its_first_step_by_name(tmp_path, breaker, ranks, expected):
    found = run_ranks(2, train_with_transformers, tmp_path, breaker, ranks)
    assert summary(found) == ("stopped", expected)


def test_without_stop_findings_are_kept_and_training_goes_on(tmp_path):
    found = run_ranks(2, train_with_transformers, tmp_path, write_garbage, (0, 1), False)
    assert summary(found) == ("trained", {("S209", 0, INV_FREQ), ("S209", 1, INV_FREQ)})


@pytest.mark.parametrize(
    ("breaker", "expected"),
    [(cast_buffer, {("S208", 1, INV_FREQ)}), (leave_memory_unwritten, {("S205", 1, EMBEDDING)})],
    ids=["buffer", "placeholder"],
)
def test_trl_stops_by_name(tmp_path, breaker, expected):
    assert summary(run_ranks(2, train_with_trl, tmp_path, breaker, (1,))) == ("stopped", expected)


def prepare_with_accelerate(breaker):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with own_accelerate_state():
        believe_in_an_accelerator()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = make_model("llama_tied")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        names = [clean_name(name) for name, _ in model.named_parameters()]
        if breaker is not None and dist.get_rank() == 1:
            breaker(model)
        assert EMBEDDING in names and isinstance(next(model.parameters()), DTensor)
        return "prepared", sp.attest(model, optimizer)


def test_plain_accelerate():
    assert summary(run_ranks(2, prepare_with_accelerate, None)) == ("prepared", set())
    found = run_ranks(2, prepare_with_accelerate, leave_memory_unwritten)
    assert summary(found) == ("prepared", {("S205", 1, EMBEDDING)})


def test_the_callback_needs_neither_the_command_line_nor_its_packages():
    program = (
        "import sys\n"
        "for name in ('pydantic', 'typer', 'rich'): sys.modules[name] = None\n"
        "import shardproof\n"
        "assert shardproof.AttestCallback().findings == []\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
