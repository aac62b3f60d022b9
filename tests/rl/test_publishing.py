"""A finished run's model for others: the adapter beside it, its card, its receipt, and the Hub."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import shardproof as sp
from shardproof.cli import app
from shardproof.config.load import from_json, load_recipe
from shardproof.errors import ConfigError
from shardproof.rl.hub import check_hub
from shardproof.rl.model_card import write_card
from tests.ranks import run_ranks
from tests.rl.hub_server import TOKEN, serving
from tests.rl.runs import TINY, lines, run_recipe, small_recipe

LORA = ("model.lora.r=4", "output.model_dtype=float32", "optimizer.lr=0.01", "train.steps=1")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 9)[None]).logits


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """{strategy: the folder of a run that trained adapters on two ranks}"""
    root = tmp_path_factory.mktemp("lora")
    for strategy in ("fsdp2", "fsdp1"):
        run_ranks(2, run_recipe, small_recipe(root / strategy, *LORA, f"model.strategy={strategy}"))
    return root


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_a_lora_run_leaves_its_adapter_beside_the_merged_model(lora_run, strategy):
    from peft import PeftModel

    run = lora_run / strategy
    path = json.loads((run / "config.json").read_text())["model"]["path"]
    merged = logits(AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32))
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, str(run / "adapter")))
    assert (adapted - before).abs().max() > 1e-3, "the adapter has learned something"
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-5)
    for name in ("model", "adapter"):
        assert sp.verify_pretrained(run / name) == []
    exports = [line for line in lines(run / "events.jsonl") if line.get("proof") == "export"]
    assert [line["details"]["path"] for line in exports] == ["model", "adapter"]
    for line in exports:
        digest = line["details"]["digest"]
        assert line["passed"] and sp.verify_pretrained(run / line["details"]["path"], digest) == []


@pytest.mark.distributed
def test_the_card_says_what_the_model_is_and_holds_its_receipts(lora_run):
    run = lora_run / "fsdp2"
    for name in ("model", "adapter"):
        card = ModelCard.load(run / name / "README.md")
        assert card.data.library_name == ("transformers" if name == "model" else "peft")
        assert card.data.base_model is None, "a folder of this machine is no model of the Hub"
        digest = json.loads((run / name / "receipt.json").read_text())["digest"]
        assert digest in card.text and f"--digest {digest[:16]}" in card.text
        for said in ("load of the policy on rank 0", "load of the policy on rank 1", "sync of the policy"):
            assert said in card.text
        assert "0 of them failed" in card.text and "standard error" in card.text
        assert "`model.lora.r`" in card.text and "torch" in card.text
        assert str(run.parent) not in card.text and str(TINY.parent) not in card.text
    assert "PeftModel.from_pretrained" in card.text


@pytest.mark.distributed
def test_a_changed_byte_is_named_with_its_tensor(lora_run, tmp_path):
    folder = copy(lora_run / "fsdp2" / "model", tmp_path / "model")
    weights = next(folder.glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    (finding,) = sp.verify_pretrained(folder)
    assert finding.code == "E404" and finding.tensor in finding.message
    assert "download the folder again" in str(finding)
    result = CliRunner().invoke(app, ["verify", str(folder)])
    assert result.exit_code == 3 and repr(finding.tensor) in result.output
    intact = CliRunner().invoke(app, ["verify", str(lora_run / "fsdp2" / "model")])
    assert intact.exit_code == 0 and "every tensor is unchanged since it was saved" in intact.output


@pytest.mark.distributed
def test_a_receipt_that_was_replaced_with_its_model_is_told_by_the_digest(lora_run):
    run = lora_run / "fsdp2"
    digest = json.loads((run / "adapter" / "receipt.json").read_text())["digest"]
    (finding,) = sp.verify_pretrained(run / "model", digest)
    assert "another model" in finding.message
    (finding,) = sp.verify_pretrained(run / "adapter", "ab")
    assert "another model" in finding.message, "two characters prove nothing"


def test_a_folder_without_a_receipt_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no receipt\.json"):
        sp.verify_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        sp.verify_pretrained(tmp_path / "nowhere")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "receipt.json").touch()
    with pytest.raises(ConfigError, match=rf"Fix: pass {tmp_path}/model"):
        sp.verify_pretrained(tmp_path)


@pytest.mark.distributed
def test_a_card_of_a_model_of_the_hub_names_it(lora_run, tmp_path):
    run = lora_run / "fsdp2"
    recipe = from_json(small_recipe(run, "output.push_to_hub=me/adder"))
    model = recipe.model.model_copy(update={"path": "Qwen/Qwen3-0.6B"})
    data = recipe.data.model_copy(update={"train": "hf:openai/gsm8k:main"})
    folder = copy(run / "model", tmp_path / "model")
    write_card(run, folder, recipe.model_copy(update={"model": model, "data": data}))
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "Qwen/Qwen3-0.6B" and card.data.datasets == ["openai/gsm8k"]
    assert "vllm serve me/adder" in card.text


@pytest.mark.distributed
def test_names_of_files_write_nothing_into_the_card(lora_run, tmp_path):
    run = lora_run / "fsdp2"
    recipe = from_json(small_recipe(run))
    data = recipe.data.model_copy(update={"train": "a`b\n---\nlicense: mit\n---\n# Owned\n/train.jsonl"})
    folder = copy(run / "model", tmp_path / "model")
    write_card(run, folder, recipe.model_copy(update={"data": data}))
    card = ModelCard.load(folder / "README.md")
    assert card.data.license is None and "\n# Owned" not in card.text and "\nlicense" not in card.text


@pytest.mark.distributed
def test_weights_that_were_put_beside_the_model_are_named(lora_run, tmp_path):
    """Engines that read every weight file of a folder, as vLLM does without an index, would load them."""
    folder = copy(lora_run / "fsdp2" / "model", tmp_path / "model")
    (folder / "more.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    (folder / "pytorch_model.bin").touch()
    findings = sp.verify_pretrained(folder)
    assert [finding.code for finding in findings] == ["E404", "E404"]
    assert "more.safetensors" in findings[0].message and "pytorch_model.bin" in findings[1].message


def copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    return target


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "shardproof", *words]


@pytest.mark.slow
def test_an_upload_that_fails_costs_nothing_and_is_made_later_with_the_command_it_names(tmp_path):
    """A whole run as a user starts it, the real client, and a stand-in for the Hub."""
    run = tmp_path / "my run"
    settings = [
        "train.steps=1",
        "train.ranks=1",
        "output.eval_every=0",
        "output.trackers=[]",
        f"output.folder={run}",
    ]
    with serving() as hub:
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
        hub.refuses = True
        words = command("train", str(TINY), *settings, "output.push_to_hub=me/adder")
        first = subprocess.run(words, env=env, capture_output=True, text=True)
        assert first.returncode == 0, first.stderr
        said = re.search(
            r"upload it with: (shardproof push .*--repo me/adder)", " ".join(first.stderr.split())
        )
        assert said is not None, first.stderr
        assert not hub.repos["me/adder"] and hub.private == {"me/adder": True}
        (event,) = [line for line in lines(run / "events.jsonl") if line["kind"] == "publish"]
        assert "may not write" in event["text"]
        hub.refuses = False
        second = subprocess.run(command(*shlex.split(said[1])[1:]), env=env, capture_output=True, text=True)
        assert second.returncode == 0, second.stderr
        assert f"{hub.url}/me/adder" in second.stdout
        sent = hub.repos["me/adder"]
    here = {path.name: path.read_bytes() for path in (run / "model").iterdir() if path.name[0] != "."}
    assert sent == here and {"README.md", "receipt.json", "model.safetensors"} <= sent.keys()
    assert hub.cards and "shardproof" in hub.cards[-1]


def test_what_would_stop_the_upload_is_said_before_the_run(monkeypatch, tmp_path):
    output = load_recipe(TINY, ["output.push_to_hub=me/adder"]).output
    assert not check_hub(load_recipe(TINY).output)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in check_hub(output)[0].message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (finding,) = check_hub(output)
    assert "not logged in" in finding.message and "hf auth login" in str(finding.fix)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert not check_hub(output)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["output.push_to_hub=adder"], "not of the form user/name"),
        (["output.push_to_hub=me/adder", "output.save_model=false"], "set output.save_model"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe(TINY, overrides)


def test_a_run_without_a_model_cannot_be_pushed(tmp_path):
    result = CliRunner().invoke(app, ["push", str(tmp_path), "--repo", "me/x"])
    assert result.exit_code == 2 and "has no model/ to upload" in result.output
    result = CliRunner().invoke(app, ["push", str(tmp_path)])
    assert result.exit_code == 2 and "pass --repo user/name" in result.output
