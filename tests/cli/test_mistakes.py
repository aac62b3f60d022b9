"""Typical mistakes of users: each gives one message that names the culprit and the fix, and no traceback."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import socket
import tempfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shardproof.cli import app
from shardproof.cli.packages import require_packages
from shardproof.rl import preflight
from tests.rl.runs import RECIPES, TINY, small_recipe, write_rows

pytestmark = pytest.mark.fault

MODEL = RECIPES / "tiny" / "model"
FINDING = re.compile(r"^[A-Z]\d{3} ", re.MULTILINE)
Usage = namedtuple("Usage", "total used free")


@dataclass
class Desk:
    """Where a user makes a mistake: a folder of their own, and the tiny recipe."""

    path: Path
    patch: pytest.MonkeyPatch
    recipe: Path = TINY
    folder: str = ""
    without: set[str] = field(default_factory=set)  # packages that seem not to be installed

    def train(self, *arguments: str) -> tuple[int, str]:
        folder = f"output.folder={self.folder or self.path / 'run'}"
        command = ["train", str(self.recipe), folder, "output.eval_every=0", "train.ranks=2", *arguments]
        found = CliRunner().invoke(app, command)
        ended = found.exception is None or isinstance(found.exception, SystemExit)
        assert ended, f"{type(found.exception).__name__}: {found.exception}"
        return found.exit_code, found.output

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def rows(self, name: str, text: str) -> tuple[str]:
        return (f"data.train={self.write(name, text)}",)

    def model(self, change: Callable[[Path], object]) -> str:
        """The setting of a copy of the tiny model with something wrong in it."""
        copy = Path(shutil.copytree(MODEL, self.path / "model"))
        change(copy)
        return f"model.path={copy}"

    def run_of_three_steps(self) -> None:
        """An earlier run in the folder, without what a checkpoint holds."""
        run = self.path / "run"
        (run / "checkpoints" / "step-00000003").mkdir(parents=True)
        (run / "config.json").write_text(
            small_recipe(run, "train.steps=3", "train.ranks=2", "output.eval_every=0")
        )
        write_rows(run / "metrics.jsonl", [{"step": 3, "time": 1.0, "metrics": {}}])


@pytest.fixture
def desk(tmp_path, monkeypatch):
    made = Desk(tmp_path, monkeypatch)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in made.without else find(name, *rest)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return made


def assert_one_message(code: int, output: str, *named: str) -> None:
    assert code in (2, 3), output
    assert len(FINDING.findall(output)) == 1 and output.count("Fix: ") == 1, output
    assert "Traceback" not in output
    for each in named:
        assert each in output, f"{each!r} is not in: {output}"


# What the user adds to `shardproof train recipes/tiny.toml`, and what the message must say: the culprit and the fix.
SETTINGS = {
    "a key that does not exist": ("train.step=3", "'train.step', did you mean 'train.steps'?"),
    "a section that does not exist": ("training.steps=3", "'training', did you mean 'train'?"),
    "a key in the wrong section": ("train.lr=0.1", "unknown key 'train.lr'"),
    "text for a number": ("train.steps=many", "train.steps: Input should be a valid integer"),
    "a number out of range": ("train.steps=-1", "train.steps: Input should be greater than 0"),
    "an override without =": (
        "train.steps",
        "'train.steps' is not of the form key=value",
        "section.key=value",
    ),
    "an override below a value": ("train.steps.max=1", "'steps' is a value, not a section"),
    "an algorithm misspelt": ("algorithm.name=gpro", "algorithm.name", "Did you mean 'grpo'?"),
    "an engine misspelt": ("rollout.engine=vlm", "rollout.engine", "Did you mean 'vllm'?"),
    "an optimizer that does not exist": ("optimizer.name=adam", "'adam'", "Did you mean 'adamw'?"),
    "a schedule misspelt": ("optimizer.schedule=cosin", "optimizer.schedule", "'linear', 'cosine' or 'wsd'"),
    "a dtype misspelt": ("model.compute_dtype=bf16", "model.compute_dtype", "'bfloat16'"),
    "a group of one": ("rollout.group_size=1", "rollout.group_size=1", "needs at least 2"),
    "no reward": ("reward=none", "reward is missing", "reward.functions"),
    "a reward misspelt": ("reward.functions=[{name='exact_mach'}]", "Did you mean 'exact_match'?"),
    "a reward's module that is not there": (
        "reward.functions=[{name='no_such_module:score'}]",
        *("No module named 'no_such_module'", "PYTHONPATH"),
    ),
    "a reward that its module lacks": ("reward.functions=[{name='json:score'}]", "'json' has no 'score'"),
    "an evaluation without data": (
        "output.eval_every=2 data.evaluation=none",
        *("output.eval_every", "set data.evaluation"),
    ),
    "a model path that is not there": ("model.path=nowhere", "'nowhere'", "pass a folder or a hub id"),
    "a file as the model": (
        f"model.path={TINY}",
        "tiny.toml' is neither a folder",
        "pass a folder or a hub id",
    ),
    "a data file that is not there": (
        "data.train=nope.jsonl",
        "nope.jsonl does not exist",
        "correct the path",
    ),
    "a prompt column that is not there": (
        "data.prompt_column=question",
        *("no column 'question' (data.prompt_column); it has 'prompt', 'answer'", "set data.prompt_column"),
    ),
    "an answer column that is not there": (
        "data.answer_column=solution",
        *("no column 'solution' (data.answer_column)", "set data.answer_column"),
    ),
    "SFT without completions": ("algorithm.name=sft", "no column 'completion'", "set data.completion_column"),
    "chat without a template": ("data.chat=true", "the tokenizer has none", "set data.chat to false"),
    "prompts that are too long": (
        "data.max_prompt_tokens=2",
        "data.max_prompt_tokens=2",
        "raise data.max_prompt",
    ),
    "completions beyond the context": (
        "rollout.max_new_tokens=9999",
        *("rollout.max_new_tokens=9999 does not fit the model's", "lower rollout.max_new_tokens"),
    ),
    "copies that do not divide the ranks": ("model.replicate=3", "model.replicate=3", "divides the ranks"),
    "a home folder that no shell replaced": (
        "output.folder=~/runs",
        "'~/runs'",
        "write the full path of your home folder",
    ),
    "an empty output folder": ("output.folder=", "output.folder is empty", "use a separate folder"),
    "an output folder inside the model": (
        f"output.folder={MODEL}/run",
        "model.path",
        "use a separate output.folder",
    ),
}


@pytest.mark.parametrize("mistake", SETTINGS)
def test_a_setting_that_is_wrong(desk, mistake):
    settings, *named = SETTINGS[mistake]
    assert_one_message(*desk.train(*settings.split(), "--dry-run"), *named)


def no_arguments(desk):
    desk.write("own_reward.py", "def score():\n    return 1.0\n")
    return ("reward.functions=[{name='own_reward:score'}]",)


def several(desk):
    return ("model.sequence_parallel=3", "train.ranks=3")


def lora(desk):
    return ("model.lora.r=4", "model.lora.target_modules=['query']")


FILES = {
    "a recipe that is not there": (
        lambda desk: setattr(desk, "recipe", desk.path / "nope.toml"),
        *("nope.toml cannot be opened", "pass a recipe"),
    ),
    "a folder as the recipe": (
        lambda desk: setattr(desk, "recipe", RECIPES),
        *("is not a regular file", "pass a recipe"),
    ),
    "a recipe with a typo in its TOML": (
        lambda desk: setattr(desk, "recipe", desk.write("a.toml", "[model\npath = 'x'\n")),
        *("a.toml is not valid TOML", "line 1", "correct the line"),
    ),
    "a recipe in YAML": (
        lambda desk: setattr(desk, "recipe", desk.write("a.yaml", "model:\n  path: x\n")),
        *("a.yaml is not valid TOML", "recipes are TOML files"),
    ),
    "a recipe in JSON": (
        lambda desk: setattr(desk, "recipe", desk.write("a.json", '{"model": {"path": "x"}}')),
        *("a.json is not valid TOML", "recipes are TOML files"),
    ),
    "a recipe without a model": (
        lambda desk: setattr(desk, "recipe", desk.write("a.toml", "[train]\nsteps = 3\n")),
        *("'model' is missing", "'data' is missing"),
    ),
    "a data file without rows": (
        lambda desk: desk.rows("empty.jsonl", ""),
        *("empty.jsonl holds no rows", "data"),
    ),
    "a line that is no JSON": (
        lambda desk: desk.rows("bad.jsonl", '{"prompt": "1", "answer": "1"}\n{oops}\n'),
        *("bad.jsonl:2 is not valid JSON", "repair the data set"),
    ),
    "an array instead of objects": (
        lambda desk: desk.rows("array.jsonl", '["1+1=", "2"]\n'),
        *("array.jsonl:1", "one object per line"),
    ),
    "a comma that is not quoted": (
        lambda desk: desk.rows("rows.csv", "prompt,answer\n1+1=,2\n1,000+1=,1001\n"),
        *("rows.csv:3 has 3 cells; expected 2", "quote cells that hold the separator"),
    ),
    "data as text": (
        lambda desk: desk.rows("rows.txt", "prompt,answer\n"),
        *("rows.txt is not a .jsonl", "convert it to JSONL"),
    ),
    "a reward that takes no arguments": (
        no_arguments,
        *("'own_reward:score' cannot be called as (prompt, completion, row)", "reward"),
    ),
    "LoRA on layers that the model lacks": (lora, "{'query'} not found", "such as q_proj"),
    "sequence parallelism that does not divide the heads": (several, "the 2 attention heads", "divides 2"),
    "a model without config.json": (
        lambda desk: (desk.model(lambda model: (model / "config.json").unlink()),),
        *("model has no config.json", "pass a folder"),
    ),
    "a model without weights": (
        lambda desk: (desk.model(lambda model: (model / "model.safetensors").unlink()),),
        *("holds no safetensors file", "pass a folder"),
    ),
    "a model without a tokenizer": (
        lambda desk: (desk.model(lambda model: [path.unlink() for path in model.glob("tokenizer*")]),),
        *("there is none of tokenizer.json", "put the model's tokenizer files"),
    ),
    "pickled weights": (
        lambda desk: (
            desk.model(lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin")),
        ),
        *("pytorch_model.bin and no safetensors", "save_pretrained"),
    ),
    "a download that was cut off": (
        lambda desk: (
            desk.model(lambda model: (model / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")),
        ),
        *("model.safetensors", "download the file again"),
    ),
    "a folder with other files": (
        lambda desk: setattr(desk, "folder", str(desk.write("own/thesis.tex", "").parent)),
        *("holds thesis.tex", "use another output.folder"),
    ),
    "a file as the output folder": (
        lambda desk: setattr(desk, "folder", str(desk.write("notes", ""))),
        *("notes is a file", "use another output.folder"),
    ),
    "a run that was begun with another setting": (
        lambda desk: (desk.run_of_three_steps(), "optimizer.lr=0.5")[1:],
        *("was started with other settings", "optimizer.lr", "--allow"),
    ),
    "a step without a checkpoint": (
        lambda desk: (desk.run_of_three_steps(), "--from", "2")[1:],
        *("--from 2", "it has 3", "choose one of these steps"),
    ),
    "a key that cannot be allowed": (
        lambda desk: ("--allow", "train.step"),
        *("--allow train.step", "Did you mean 'train.steps'?"),
    ),
    "nodes in words": (lambda desk: ("--nnodes", "two"), "--nnodes 'two'", "write it like --nnodes 2"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_file_or_folder_that_is_wrong(desk, mistake):
    (desk.path / "own").mkdir()
    make, *named = FILES[mistake]
    arguments = make(desk) or ()
    assert_one_message(*desk.train(*arguments, "--dry-run"), *named)


def little_memory(desk):
    desk.patch.setattr(preflight, "available_memory", lambda: 2**20)
    return ()


def full_disk(desk):
    desk.patch.setattr(shutil, "disk_usage", lambda _: Usage(2**30, 2**30, 2**10))
    return ()


def read_only(desk):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    desk.patch.setattr(tempfile, "TemporaryFile", refuse)
    return ()


def few_gpus(desk):
    desk.patch.setattr(torch.cuda, "device_count", lambda: 1)
    return ()


def taken_port(desk):
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    desk.patch.setattr(preflight, "installed_version", lambda: None)
    desk.patch.setattr(desk, "taken", taken, raising=False)  # stays open as long as the desk
    port = taken.getsockname()[1]
    return ("rollout.engine=vllm", "rollout.vllm.mode=server", f"rollout.vllm.port={port}")


def open_server(desk):
    find = importlib.util.find_spec
    desk.patch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name == "vllm" else find(name, *rest)
    )
    desk.patch.setattr(preflight, "installed_version", lambda: None)
    return ("rollout.engine=vllm", "rollout.vllm.mode=server", "rollout.vllm.host=0.0.0.0")


def lacks(package, *settings):
    def make(desk):
        desk.without.add(package)
        return settings

    return make


MACHINES = {
    "too little memory": (little_memory, "of host memory", "lower train.ranks"),
    "too little disk": (full_disk, "free; ", "free space"),
    "a folder that may not be written": (read_only, "cannot be written: Permission denied", "output.folder"),
    "more ranks than GPUs": (few_gpus, "train.ranks=2 needs 2 GPUs; this machine has 1", "lower train.ranks"),
    "no peft": (lacks("peft", "model.lora.r=4"), "model.lora needs the package peft", "shardproof[lora]"),
    "no datasets": (
        lacks("datasets", "data.train=hf:openai/gsm8k"),
        *("needs the package datasets", "shardproof[data]"),
    ),
    "vLLM open to the network": (
        open_server,
        *("'0.0.0.0' can be reached from other machines", "use 127.0.0.1"),
    ),
    "no vLLM": (lacks("vllm", "rollout.engine=vllm"), "rollout.engine='vllm' needs", "shardproof[vllm]"),
    "several nodes without an endpoint": (
        lambda desk: ("--nnodes", "2"),
        *("needs --rdzv-endpoint", "pass --rdzv-endpoint HOST:PORT"),
    ),
    "several nodes without a secret": (
        lambda desk: ("--nnodes", "2", "--rdzv-endpoint", "here:29400"),
        *("needs --rdzv-id", "openssl rand"),
    ),
}


@pytest.mark.parametrize("mistake", MACHINES)
def test_a_machine_that_lacks_something(desk, mistake):
    make, *named = MACHINES[mistake]
    assert_one_message(*desk.train(*make(desk)), *named)  # a start, which ends before any rank is started


def test_a_port_that_is_in_use(desk):
    settings = taken_port(desk)
    desk.patch.setattr(importlib.util, "find_spec", lambda *_: object())
    assert_one_message(*desk.train(*settings), "cannot be used", "use another port, or 0 for a free one")


@pytest.mark.parametrize("package", ["pydantic", "typer", "rich"])
def test_a_command_line_without_its_packages(desk, package):
    desk.without.add(package)
    with pytest.raises(SystemExit) as ended:
        require_packages()
    assert f"needs the package {package}" in str(ended.value) and "shardproof[all]" in str(ended.value)


def test_a_python_that_is_too_old():
    check = runpy.run_path(str(RECIPES.parent / "scripts" / "check_python.py"))
    with pytest.raises(SystemExit) as ended:
        check["main"]((3, 10, 0))
    assert "needs Python 3.11 or newer" in str(ended.value) and "Fix: " in str(ended.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tran"], "Did you mean 'train'?"),
        (["train"], "Missing argument"),
        (["train", str(TINY), "--dryrun"], "--dry-run"),
        (["train", str(TINY), "--from", "newest"], "--from"),
    ],
)
def test_a_command_that_is_wrong(arguments, named):
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2 and named in found.output and "Traceback" not in found.output, found.output


def test_there_are_many_mistakes():
    assert len(SETTINGS) + len(FILES) + len(MACHINES) >= 60
