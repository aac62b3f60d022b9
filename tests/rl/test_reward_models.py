"""Reward models in runs: what they read, what they add to rewards, how they are trained, and what goes wrong."""

from __future__ import annotations

import io
import json
import math
import shutil
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import shardproof as sp
from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.config.roles import RewardModel
from shardproof.errors import ConfigError
from shardproof.rl.checks import check_inputs
from shardproof.rl.judge_checks import check_judges
from shardproof.rl.reward_models import LoadedRewardModel, RewardModels, read_tokenizer
from shardproof.rl.sizing.recipe import Machine, estimate_run
from shardproof.rollout.trajectory import Reward, Trajectory
from shardproof.terminal import attached
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.background_runs import SETTINGS
from tests.rl.judges import TEACHER, TEMPLATE, make_reward_model, plain_scores
from tests.rl.runs import RECIPES, lines, numbers, run_recipe, small_recipe, trajectory

PAIRS = RECIPES / "tiny-reward-model.toml"
FEW = (
    "train.steps=4",
    "optimizer.schedule=constant",
    "train.prompts_per_step=5",
    "output.eval_prompts=7",
    "output.trackers=[]",
)


def models(*tables: str) -> str:
    return f"reward.models=[{', '.join(tables)}]"


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("judge") / "model")


@pytest.mark.distributed
def test_scores_are_rewards_and_a_run_resumes_with_them(tmp_path: Path, reward_model: Path) -> None:
    """Of three ranks, one has no prompts in a step of two; the scores are those that transformers gives the texts."""
    more = (
        models(
            f'{{path="{reward_model}", format="text", weight=0.5}}',
            f'{{path="{reward_model}", format="text", name="other", weight=0.0, strategy="fsdp1"}}',
        ),
        "train.prompts_per_step=2",
        "output.samples_per_step=8",
        "output.save_every=1",
        "output.keep=5",
    )
    whole = tmp_path / "whole"
    run_ranks(3, run_recipe, small_recipe(whole, *more))
    samples = lines(whole / "samples.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    texts = [tokenizer(each["prompt"] + each["completion"])["input_ids"] for each in samples]
    end = tokenizer.eos_token_id
    expected = plain_scores(reward_model, [[*text, end] for text in texts])
    assert len(samples) >= 8
    for sample, score in zip(samples, expected, strict=True):
        assert sample["rewards"]["model"] == pytest.approx(score, abs=1e-5)
        assert sample["rewards"]["other"] == pytest.approx(score, abs=1e-5)
        total = sample["rewards"]["exact_match"] + 0.5 * score
        assert sample["reward"] == pytest.approx(total, abs=1e-5)
    first = trajectory(whole)[0]
    assert first["reward/model"] == pytest.approx(first["reward/other"], abs=1e-6)
    assert "eval/model" in trajectory(whole)[-1]

    cut = tmp_path / "cut"
    run_ranks(3, run_recipe, small_recipe(cut, *more, "train.steps=1"))
    run_ranks(3, run_recipe, small_recipe(cut, *more))
    assert numbers(cut) == numbers(whole)


@pytest.mark.distributed
def test_texts_that_cannot_be_read_fail_on_all_ranks(tmp_path: Path, reward_model: Path) -> None:
    short = models(f'{{path="{reward_model}", format="text", max_tokens=2}}')
    outcomes = run_ranks_outcomes(2, run_recipe, small_recipe(tmp_path / "short", short))
    assert all("R504" in outcome[2] and "more than 2" in outcome[2] for outcome in outcomes)
    template = models(f'{{path="{reward_model}"}}')
    outcomes = run_ranks_outcomes(2, run_recipe, small_recipe(tmp_path / "chat", template))
    assert all("C005" in outcome[2] and "no chat template" in outcome[2] for outcome in outcomes)
    bare = models(f'{{path="{TEACHER}", format="text"}}')
    outcomes = run_ranks_outcomes(2, run_recipe, small_recipe(tmp_path / "bare", bare))
    assert all("L104" in outcome[2] and "score.weight" in outcome[2] for outcome in outcomes)


def _judged(
    folder: str, batches: list[list[list[str]]], weight: float = 1.0
) -> tuple[list[list[str | float]], str]:
    """What a reward model makes of batches of prompts, each a list per rank, and what each terminal shows."""
    settings = RewardModel(path=folder, format="text", max_tokens=6, weight=weight)
    model = sp.load(folder, role="reward", compute_dtype=torch.float32)
    scorer = RewardModels([LoadedRewardModel(settings, model, read_tokenizer(settings))], 64)
    found, noticed, terminal = [], set[str](), io.StringIO()
    with redirect_stderr(terminal), attached():
        for per_rank in batches:
            made = [replace(said("1"), facts={"prompt": prompt}) for prompt in per_rank[dist.get_rank()]]
            rewards = scorer.added(made, [Reward(0.0) for _ in made], noticed)
            found.append([one.failures.get("model", one.parts["model"]) for one in rewards])
    return found, terminal.getvalue()


@pytest.mark.distributed
def test_a_text_that_cannot_be_read_is_shown_at_once_and_only_it_is_left_out(reward_model: Path) -> None:
    batch = [["1+2="], ["1+2=", "11111+22222="]]
    (first, shown), (second, nothing) = run_ranks(2, _judged, str(reward_model), [batch, batch])
    assert first == [second[0][:1]] * 2 and [len(each) for each in second] == [2, 2]
    assert second[0][1].startswith("the text has 14 tokens, more than 6")
    assert "warning: rank 1: reward 'model' failed: the text has 14 tokens" in shown
    assert shown.count("\n") == 1 and nothing == ""


@pytest.mark.distributed
def test_a_model_that_is_only_measured_ends_no_run(reward_model: Path) -> None:
    batch = [["11111+22222="], ["1111+2222=", "11111+22222="]]
    (first, _), (second, _) = run_ranks(2, _judged, str(reward_model), [batch], 0.0)
    assert [str(each)[:12] for each in first[0] + second[0]] == ["the text has"] * 3


def rm_recipe(folder: Path, *overrides: str) -> str:
    return to_json(load_recipe(PAIRS, [*FEW, f"output.folder={folder}", *overrides]))


@pytest.mark.distributed
def test_a_reward_model_is_trained_saved_and_resumed(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    save = ("output.save_every=2", "output.keep=5", "output.eval_every=2")
    run_ranks(2, run_recipe, rm_recipe(whole, *save))
    last = trajectory(whole)[-1]
    assert {"eval/loss", "eval/reward/accuracy", "eval/reward/margin", "reward/accuracy"} <= last.keys()
    run_ranks(2, run_recipe, rm_recipe(cut, *save, "train.steps=2"))
    run_ranks(2, run_recipe, rm_recipe(cut, *save))
    assert numbers(cut) == numbers(whole)
    # The folder is a sequence classifier, of which transformers and `sp.load` say the same.
    model = AutoModelForSequenceClassification.from_pretrained(whole / "model", dtype=torch.float32)
    assert type(model).__name__.endswith("ForSequenceClassification") and model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    rows = lines(RECIPES / "tiny" / "pairs-evaluation.jsonl")[:7]
    texts = [
        [*tokenizer(row["prompt"] + row[side])["input_ids"], tokenizer.eos_token_id]
        for row in rows
        for side in ("chosen", "rejected")
    ]
    scores = plain_scores(whole / "model", texts)
    assert run_ranks(1, _scores, str(whole / "model"), texts)[0] == pytest.approx(scores, abs=1e-5)
    # It is written in the source's 16 bits; the run evaluated its float32 weights.
    assert last["eval/reward/chosen"] == pytest.approx(sum(scores[::2]) / 7, abs=0.01)
    assert last["eval/reward/rejected"] == pytest.approx(sum(scores[1::2]) / 7, abs=0.01)


def test_a_trained_model_scores_batches_though_its_source_named_no_padding(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(TEACHER, source)
    config = json.loads((source / "config.json").read_text())
    assert config.pop("pad_token_id") == 0
    (source / "config.json").write_text(json.dumps(config))
    run_ranks(1, run_recipe, rm_recipe(run, f"model.path={source}", "train.steps=1", "output.eval_every=0"))
    model = AutoModelForSequenceClassification.from_pretrained(run / "model", dtype=torch.float32)
    padded = AutoTokenizer.from_pretrained(run / "model")(
        ["1+2=3", "11+22=33"], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        found = model(**padded).logits[:, 0].tolist()
    texts = [
        row[mask > 0].tolist()
        for row, mask in zip(padded["input_ids"], padded["attention_mask"], strict=True)
    ]
    assert found == pytest.approx(plain_scores(run / "model", texts), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "T303.*'llama'.*dropout.*\n.*to 0 in config.json"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "T303.*rotary"),
    ],
)
def test_models_whose_texts_cannot_be_compared_in_one_pass_are_refused_before_the_start(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TEACHER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    recipe = from_json(rm_recipe(tmp_path / "run", f"model.path={folder}"))
    with pytest.raises(sp.ShardproofError, match=message):
        check_inputs(recipe)
    check_inputs(from_json(small_recipe(tmp_path / "run", f"model.path={folder}")))


def _scores(folder: str, texts: list[list[int]]) -> list[float]:
    model = sp.load(folder, role="reward", compute_dtype=torch.float32)
    return sp.scores(model, texts).tolist()


@pytest.mark.distributed
def test_adapters_of_a_reward_model_are_trained_with_its_head(tmp_path: Path) -> None:
    """The head gets no adapter, and is saved beside those of the other layers; transformers and peft read both folders."""
    run_ranks(3, run_recipe, rm_recipe(tmp_path, "model.lora.r=2", "train.prompts_per_step=2"))
    assert lines(tmp_path / "metrics.jsonl")[-1]["metrics"]["grad_norm"] > 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["score"] and "score" not in config["target_modules"]
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.float32)
    base = AutoModelForSequenceClassification.from_pretrained(TEACHER, num_labels=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    text = torch.tensor([[3, 12, 4, 13, 5]])
    torch.testing.assert_close(adapted(text).logits, whole(text).logits, rtol=0, atol=0.01)
    for name, base_of in (("model", "path/to/this/folder"), ("adapter", "path/to/the/base/model")):
        card = (tmp_path / name / "README.md").read_text()
        assert "pipeline_tag: text-classification" in card and "vllm serve" not in card
        assert f'AutoModelForSequenceClassification.from_pretrained("{base_of}"' in card


@dataclass
class _Words:
    """A tokenizer of words, which writes a conversation in its own way."""

    chat_template: str = "own"
    eos_token_id: int = 99
    written: list[str] = field(default_factory=list)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert not options["add_generation_prompt"]
        return " ".join(f"<{each['role']}> {each['content']}" for each in messages)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        self.written.append(text)
        return {"input_ids": [*([7] if add_special_tokens else []), *range(1, 1 + len(text.split()))]}


@dataclass
class _Beginning:
    """A tokenizer for which every text is the same tokens."""

    bos_token_id: int | None
    eos_token_id: int = 99

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, 1, 2]}


def judge(tokenizer: Any, **settings: Any) -> LoadedRewardModel:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=20))
    model: Any = SimpleNamespace(model=SimpleNamespace(config=config))
    return LoadedRewardModel(RewardModel(path="somewhere", **settings), model, tokenizer)


def said(text: str, asked: Any = None) -> Trajectory:
    facts = {"prompt": "<policy's own> 1 + 2 =", **({} if asked is None else {"asked": asked})}
    return Trajectory((), text=text, facts=facts)


def test_conversations_are_written_by_the_models_own_template() -> None:
    words = _Words()
    begun = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "it is "}]
    texts = judge(words).texts([said("3", "1 + 2"), said("3", begun), said("3")])
    assert words.written == ["<user> 1 + 2 <assistant> 3", "<user> 1 + 2 <assistant> it is 3"]
    assert texts[:2] == [list(range(1, 7)), list(range(1, 9))]
    assert isinstance(texts[2], str) and "data.prompt_column" in texts[2]


def test_plain_text_is_the_policys_prompt_with_the_end_of_a_sequence() -> None:
    words = _Words()
    assert judge(words, format="text").texts([said(" 3")]) == [[7, *range(1, 8), 99]]
    assert words.written == ["<policy's own> 1 + 2 = 3"]
    # A beginning that the policy's template has written is not repeated.
    for begin, expected in ((1, [1, 2, 99]), (None, [1, 1, 2, 99]), (7, [1, 1, 2, 99])):
        assert judge(_Beginning(begin), format="text").texts([said("3")]) == [expected]


def test_texts_have_room_for_the_token_that_follows_them() -> None:
    assert judge(_Words()).max_tokens == 19
    assert judge(_Words(), max_tokens=5).max_tokens == 5
    (found,) = judge(_Words(), max_tokens=5).texts([said("3 4 5", "1 + 2")])
    assert found == "the text has 8 tokens, more than 5"


def test_a_template_that_is_there_is_used(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path, TEMPLATE)
    tokenizer = read_tokenizer(RewardModel(path=str(folder)))
    (tokens,) = judge(tokenizer).texts([said("3", "1")])
    assert tokenizer.decode(tokens) == "1+3="


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.functions=[]"], "functions is empty"),
        ([models('{path="x", name="exact_match"}')], "two rewards are called"),
        ([models('{path="x", name="mean"}')], "cannot name a reward model"),
        (["algorithm.center_rewards_coef=0.1"], "for reward_model"),
        (["algorithm.name=reward_model"], "samples nothing"),
    ],
)
def test_recipes_that_cannot_work_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_recipe(tmp_path, *overrides)


@pytest.mark.distributed
def test_models_score_what_was_sampled_ahead_and_sequences_that_ranks_share(
    tmp_path: Path, reward_model: Path
) -> None:
    score = models(f'{{path="{reward_model}", format="text"}}')
    ahead = (*SETTINGS, "rollout.ahead=1", "train.steps=2", score)
    run_ranks(2, run_recipe, small_recipe(tmp_path / "ahead", *ahead))
    shared = ("model.sequence_parallel=2", "train.steps=1", "output.eval_every=1", score)
    run_ranks(2, run_recipe, small_recipe(tmp_path / "shared", *shared))
    for folder in ("ahead", "shared"):
        assert math.isfinite(trajectory(tmp_path / folder)[-1]["reward/model"])
    assert math.isfinite(trajectory(tmp_path / "shared")[-1]["eval/model"])


def test_the_memory_of_judges_is_counted(tmp_path: Path, reward_model: Path) -> None:
    score = models(f'{{path="{reward_model}", format="text", cpu_offload=true}}')
    machine = Machine(ranks=2, gpu_bytes=2**34)
    found = estimate_run(from_json(small_recipe(tmp_path, score)), machine, [8])
    assert found.fullest.host["reward/model weights"] > 0
    recipe = load_recipe(RECIPES / "tiny-distillation.toml", [f"output.folder={tmp_path}"])
    assert estimate_run(recipe, machine, [8]).fullest.device["teacher weights"] > 0
    trained = load_recipe(PAIRS, [f"output.folder={tmp_path}"])
    assert estimate_run(trained, machine, [8]).fullest.device["policy optimizer"] > 0


def test_a_dry_run_looks_at_judges(tmp_path: Path, reward_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    for path, options, message in (
        (reward_model, 'format="text"', None),
        (reward_model, "weight=1.0", "no chat template"),
        (TEACHER, 'format="text"', "L104.*score.weight"),
    ):
        recipe = from_json(small_recipe(tmp_path, models(f'{{path="{path}", {options}}}')))
        with pytest.raises(sp.ShardproofError, match=message) if message else nullcontext():
            check_judges(recipe, tokenizer)
    distilled = load_recipe(RECIPES / "tiny-distillation.toml", [f"output.folder={tmp_path}"])
    check_judges(distilled, tokenizer)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(sp.ShardproofError, match="R513"):
        check_judges(distilled, tokenizer)
