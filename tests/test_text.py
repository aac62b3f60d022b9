"""Text of strangers on its way to a terminal: it is shown, and never obeyed."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shardproof.cli import app
from shardproof.doctor.report import print_matrix, print_report
from shardproof.doctor.results import Buffer, Examination, Report, Stage
from shardproof.errors import fail
from shardproof.findings import Finding
from shardproof.text import sanitise_logging, without_secrets
from tests.shard.test_bad_checkpoints import edit_config, edit_json

pytestmark = pytest.mark.fault

RECIPES = Path(__file__).parents[1] / "recipes"
# It clears the screen, sets the window's title, turns the text around; and it is markup of rich.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202e\u2028[bold][link=https://evil.example]x[/link][/]\\"


def assert_harmless(text):
    odd = {character for character in text if not character.isprintable() and character not in "\n\t"}
    assert not odd, f"{odd} in {text!r}"


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(RECIPES / "tiny" / "model", tmp_path / "model"))


def dry_run(model, *overrides):
    """What a dry run of the tiny recipe with this model prints; it must find something."""
    folder = f"output.folder={model.parent / 'run'}"
    arguments = ["train", str(RECIPES / "tiny.toml"), f"model.path={model}", folder, *overrides, "--dry-run"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code in (2, 3), found.output
    return found.output


def rename_a_tensor(model):
    tensors = load_file(model / "model.safetensors")
    tensors[f"model.norm{HOSTILE}.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors")


def refuse_in_the_template(model):
    template = f"{{{{ raise_exception({json.dumps(HOSTILE)}) }}}}"
    edit_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=template))


HOSTILE_MODELS = {
    "tensor names": (rename_a_tensor, []),
    "the family": (lambda model: edit_config(model, model_type=HOSTILE), []),
    "a config's value": (lambda model: edit_config(model, hidden_act=HOSTILE), []),
    "a config's key": (lambda model: edit_config(model, **{HOSTILE: 1, "hidden_size": HOSTILE}), []),
    "quantization": (lambda model: edit_config(model, quantization_config={"quant_method": HOSTILE}), []),
    "the chat template": (refuse_in_the_template, ["data.chat=true"]),
}


@pytest.mark.parametrize("hostile", HOSTILE_MODELS)
def test_dry_run_of_a_hostile_model(model, hostile):
    change, overrides = HOSTILE_MODELS[hostile]
    change(model)
    assert_harmless(dry_run(model, *overrides))


def test_dry_run_of_a_hostile_recipe(model):
    assert_harmless(dry_run(model, f"model.{HOSTILE}=1", f"train.steps={HOSTILE}"))
    assert_harmless(dry_run(model, f"data.train={HOSTILE}"))


def test_estimate_of_a_hostile_model(model, tmp_path):
    renamed = tmp_path / f"model{HOSTILE}".replace("/", "")
    model.rename(renamed)
    found = CliRunner().invoke(app, ["estimate", str(renamed), "--ranks", "1"])
    assert found.exit_code == 0, found.output
    assert_harmless(found.output)
    assert "[bold]" in found.output
    edit_config(renamed, model_type=HOSTILE)
    found = CliRunner().invoke(app, ["estimate", str(renamed), "--ranks", "1"])
    assert found.exit_code == 120
    assert_harmless(found.output)


@pytest.mark.slow
def test_doctor_of_a_hostile_model(model, tmp_path):
    rename_a_tensor(model)
    renamed = tmp_path / f"model{HOSTILE}".replace("/", "")
    model.rename(renamed)
    command = [sys.executable, "-m", "shardproof", "doctor", str(renamed), "--ranks", "1", "--dtypes", "fp32"]
    found = subprocess.run(
        command, capture_output=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    printed = (found.stdout + found.stderr).decode()
    assert found.returncode == 2, printed
    assert "L104" in printed and "L105" in printed
    assert_harmless(printed)


@pytest.mark.parametrize("show", [print_report, print_matrix])
def test_report_with_hostile_text(show):
    finding = Finding("L105", HOSTILE, HOSTILE, rank=0, tensor=HOSTILE, fix=HOSTILE)
    stage = Stage(HOSTILE, note=HOSTILE, findings=(finding,))
    buffer = Buffer(HOSTILE, 0, HOSTILE, (1,), 0, (1.0,))
    rows = (
        Examination(HOSTILE, (stage,), (buffer,)),
        Examination(HOSTILE, (Stage(HOSTILE, note=HOSTILE),), (buffer,), refused=finding),
    )
    for is_terminal in (False, True):
        output = io.StringIO()
        console = Console(file=output, width=1000, force_terminal=is_terminal, color_system=None)
        show(Report(HOSTILE, {HOSTILE: HOSTILE}, rows), console)
        printed = output.getvalue()
        if (
            is_terminal
        ):  # rich writes links and styles of its own through escape sequences, and none of them is ours
            assert "\x1b]" not in printed and "\x07" not in printed and "\x1b[2J" not in printed
        else:
            assert_harmless(printed)
        assert "[bold][link=https://evil.example]x[/link][/]\\" in printed


def test_findings_and_errors_are_shown_and_not_obeyed():
    assert_harmless(str(Finding("L105", HOSTILE, HOSTILE, rank=0, fix=HOSTILE)))
    assert_harmless(str(fail("C001", HOSTILE, HOSTILE)))
    assert Finding("L105", "map", HOSTILE).message == HOSTILE  # findings stay what they are for code and JSON


def test_log_lines_are_shown_and_not_obeyed():
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    logger = logging.getLogger("tests.foreign_text")
    logger.addHandler(handler)
    logger.propagate = False
    before = logging.getLogRecordFactory()
    try:
        sanitise_logging()
        sanitise_logging()  # a second call changes nothing
        logger.warning("a name: %s", HOSTILE)
        logger.warning(HOSTILE)
    finally:
        logging.setLogRecordFactory(before)
        logger.removeHandler(handler)
    assert "a name: " in output.getvalue()
    assert_harmless(output.getvalue())


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["train", "--rdzv-id", "se cret", "a.toml"], ["train", "--rdzv-id", "...", "a.toml"]),
        (["--rdzv-id=se cret"], ["--rdzv-id=..."]),
        (["--api-key", "x", "--port", "1"], ["--api-key", "...", "--port", "1"]),
        (
            {"mlflow": {"tracking_uri": "https://me:pw@host/x"}},
            {"mlflow": {"tracking_uri": "https://...@host/x"}},
        ),
        ({"api_key": "x", "hf_token": "y", "mode": "offline", "n": 1}, {"api_key": "...", "hf_token": "..."}),
        (['o.tracker_options={a={api_key="x y"}, b=1}'], ["o.tracker_options={a={api_key=...}, b=1}"]),
        (["output.tracker_options.wandb.api_key=x"], ["output.tracker_options.wandb.api_key=..."]),
    ],
)
def test_secrets_are_hidden(given, shown):
    rest = {"mode": "offline", "n": 1} if "mode" in given else {}
    assert without_secrets(given) == (shown | rest if rest else shown)


def test_what_is_no_secret_is_kept():
    kept = [
        "rollout.max_new_tokens=4",
        "train.micro_batch_tokens=16384",
        "http://host/a@b",
        "",
        "a token of it",
    ]
    assert without_secrets(kept) == kept
    assert without_secrets({"tokens": "4", "a": None, "b": [1.5, True]}) == {
        "tokens": "4",
        "a": None,
        "b": [1.5, True],
    }
