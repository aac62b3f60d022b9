"""Reward models: sequence classifiers that are loaded shard by shard and score as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

import shardproof as sp
from shardproof.train.score import scored_text
from tests.models import make_checkpoint, tiny_config
from tests.ranks import RankError, run_ranks, run_ranks_outcomes

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "mixtral", "gpt2", "qwen3_moe")
PAD = 0


def make_reward_model(folder: Path, family: str = "llama", bias: bool = False, **overrides: Any) -> Path:
    """A tiny sequence classifier of the family with one label, as transformers saves it."""
    config = tiny_config(family, num_labels=1, pad_token_id=PAD, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(config)
        for param in model.parameters():
            param.data += 0.1 * torch.randn_like(param)
        if bias:
            model.score.bias = torch.nn.Parameter(torch.tensor([0.7]))
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def texts(vocabulary: int = 90) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    found = [torch.randint(1, vocabulary, (n,), generator=draw).tolist() for n in (9, 3, 17, 1, 12)]
    return [*found, [*found[0], PAD, PAD], [PAD, PAD]]  # padding at the end, and nothing else


def transformers_scores(folder: Path, sequences: list[list[int]]) -> torch.Tensor:
    """What transformers' own forward says, of all texts in one padded batch."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.config.get_text_config().pad_token_id = PAD
    longest = max(map(len, sequences))
    ids = torch.tensor([[*tokens, *[PAD] * (longest - len(tokens))] for tokens in sequences])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in sequences])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits[:, 0]


def _score(folders: list[str], options: list[dict[str, Any]]) -> list[list[float]]:
    """This rank's scores under each layout; the last rank has no texts unless ranks share them."""
    found = []
    for folder, more in zip(folders, options, strict=True):
        more = {
            name: getattr(torch, v) if str(v).startswith(("float", "bfloat")) else v
            for name, v in more.items()
        }
        model = sp.load(folder, role="reward", **({"compute_dtype": torch.float32} | more))
        assert sp.attest(model) == []
        assert model.provenance["score.weight"].kind == "checkpoint"
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = texts() if model.sequence_parallel > 1 else texts()[rank :: max(size - 1, 1)]
        mine = [] if rank == size - 1 and model.sequence_parallel == 1 else mine
        found.append(sp.scores(model, mine, micro_batch_tokens=20).tolist())
    return found


def _in_order(rows: list[list[float]], num: int) -> torch.Tensor:
    """The scores of ranks that took every `num`-th text."""
    found = torch.zeros(len(texts()))
    for rank in range(num):
        found[rank::num] = torch.tensor(rows[rank])
    return found


@pytest.mark.distributed
def test_scores_equal_transformers_own_in_every_family(tmp_path: Path) -> None:
    folders = [make_reward_model(tmp_path / family, family) for family in FAMILIES]
    found = run_ranks(3, _score, [str(folder) for folder in folders], [{}] * len(folders))
    for index, folder in enumerate(folders):
        scores = _in_order([rows[index] for rows in found], 2)
        assert found[2][index] == []
        torch.testing.assert_close(scores, transformers_scores(folder, texts()), rtol=0, atol=1e-5)


@pytest.mark.distributed
def test_scores_are_the_same_in_every_layout(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", "mixtral")
    layouts: list[dict[str, Any]] = [
        {"strategy": "fsdp1"},
        {"cpu_offload": True},
        {"sequence_parallel": 2},
        {"compute_dtype": "bfloat16"},
    ]
    found = run_ranks(2, _score, [str(folder)] * len(layouts), layouts)
    expected = transformers_scores(folder, texts())
    for index, layout in enumerate(layouts):
        rough = 0.3 if "compute_dtype" in layout else 1e-5
        torch.testing.assert_close(torch.tensor(found[0][index]), expected, rtol=0, atol=rough)


def _load(folder: str, options: dict[str, Any]) -> str:
    model = sp.load(folder, role="reward", compute_dtype=torch.float32, **options)
    return str(model.provenance["score.weight"].kind)


@pytest.mark.distributed
def test_a_checkpoint_without_a_head_is_refused_unless_it_is_to_be_trained(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "causal", "llama")
    outcomes = run_ranks_outcomes(2, _load, str(folder), {})
    assert {outcome[0] for outcome in outcomes} == {"error"}
    assert all("L104" in outcome[2] and "'score.weight'" in outcome[2] for outcome in outcomes)
    assert all("algorithm.name='reward_model'" in outcome[2] for outcome in outcomes)
    assert run_ranks(2, _load, str(folder), {"new_head": True}) == ["init", "init"]


@pytest.mark.distributed
def test_a_corrupt_head_is_found_by_its_name(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", "llama")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / index["score.weight"]
    raw = bytearray(file.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + header])["score.weight"]
    at = 8 + header + entry["data_offsets"][0]
    raw[at : at + 4] = b"\xff\xff\xff\xff"  # NaN
    file.write_bytes(bytes(raw))
    outcomes = run_ranks_outcomes(2, _load, str(folder), {})
    assert all(outcome[0] == "error" and "score.weight" in outcome[2] for outcome in outcomes)


@pytest.mark.distributed
def test_heads_that_would_be_read_in_another_way_are_refused_by_name(tmp_path: Path) -> None:
    with_bias = make_reward_model(tmp_path / "bias", "llama", bias=True)
    several = make_reward_model(tmp_path / "several", "llama")
    config = AutoConfig.from_pretrained(several)
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(several)
    (several / "model.safetensors.index.json").unlink()
    bert = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=90,
    )
    bert.num_labels = 1
    BertForSequenceClassification(bert).save_pretrained(tmp_path / "bert")
    for folder, words in (
        (with_bias, "score.bias"),
        (several, "score.weight"),
        (tmp_path / "bert", "decoder"),
    ):
        with pytest.raises(RankError, match=words):
            run_ranks(1, _load, str(folder), {})


def test_the_scored_token_is_the_last_that_is_no_padding() -> None:
    assert scored_text([4, 5, 6], None) == [4, 5, 6, 6]
    assert scored_text([4, 0, 6, 0, 0], 0) == [4, 0, 6, 6]
    assert scored_text([0, 0], 0) == [0, 0]
    assert scored_text([], 0) == []


def save_adapted(source: Path, role: str, folder: Path) -> list[float]:
    """The scores of texts by a model with adapters and a new head, saved as an adapter."""
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    settings = {"new_head": True} if role == "reward" else {}
    model = sp.load(source, role=role, lora=lora, compute_dtype=torch.float32, **settings)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"score.weight"}
    assert not any(name.startswith("score.lora") for name in trained)
    sp.save_pretrained(model, folder, merge_lora=False)
    if role == "reward":
        return sp.scores(model, texts()[:3]).tolist()
    return [float(row[-1]) for row in sp.values(model, [[*tokens, 1] for tokens in texts()[:3]])]


@pytest.mark.distributed
@pytest.mark.parametrize("role", ["reward", "critic"])
def test_an_adapter_of_a_model_with_a_head_holds_the_head(tmp_path, role):
    """peft puts it on the base; without the head, which is trained in full, it had nothing to score with."""
    source = make_checkpoint(tmp_path / "base", "llama")
    found, *_ = run_ranks(2, save_adapted, source, role, tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = PAD
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    for tokens, value in zip(texts()[:3], found, strict=True):
        with torch.no_grad():
            assert model(input_ids=torch.tensor([tokens])).logits.item() == pytest.approx(value, abs=1e-5)


def load_with_adapted_head(source: Path) -> None:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "score"])
    sp.load(source, role="reward", lora=lora, new_head=True)


@pytest.mark.distributed
def test_adapters_of_the_head_are_refused(tmp_path):
    (outcome,) = run_ranks_outcomes(1, load_with_adapted_head, make_checkpoint(tmp_path, "llama"))
    assert outcome[2].startswith("L113 lora: ") and "the head 'score', which is trained in full" in outcome[2]
