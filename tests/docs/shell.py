"""What the bash blocks of the documentation ask for: parsed as their programs would, and run where that is cheap."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Commands of the system, which a page shows only to say where the reader is.
SYSTEM = (
    "cat",
    "cd",
    "chmod",
    "cp",
    "export",
    "git",
    "head",
    "jq",
    "kubectl",
    "ls",
    "mkdir",
    "open",
    "python3",
    "rm",
    "sbatch",
    "scp",
    "set",
    "source",
)
SYSTEM += (
    "ssh",
    "tail",
    "tensorboard",
    "wandb",
    "trackio",
    "mlflow",
    "xdg-open",
    "tar",
    "unzip",
    "df",
    "du",
    "free",
)
LAUNCHERS = {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}


def commands(code: str) -> list[list[str]]:
    """The commands of a block as lists of words, without comments and environment variables."""
    joined = code.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        for part in re.split(r"\s(?:&&|\||;)\s", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
                words = words[1:]
            if words and "$(" not in words[0]:
                found.append(words)
    return found


def check_syntax(code: str) -> None:
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def do(words: list[str], run: bool) -> None:
    """Check one command, and run it if it is ours, cheap and `run`."""
    program = words[0].removeprefix(".venv/bin/")
    if program == "shardproof":
        shardproof(words[1:], run)
    elif program == "torchrun":
        torchrun(words[1:], run)
    elif program in ("python", "python3"):
        python(words[1:], run)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets or "=" in word for word in words[1:]), f"make has no such target: {words}"
    elif program in ("pip", "uv"):
        pip(words[1:])
    elif program == "ray":
        inner = words[words.index("--") + 1 :]
        do([word for word in inner if word != "env" and not re.fullmatch(r"[A-Z_]+=.*", word)], run)
    elif program == "vllm":
        assert words[1] == "serve"
    else:
        assert program in SYSTEM, f"{program!r} is not a command that pages use; see tests/docs/shell.py"


def pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        asked = re.fullmatch(r"(?:shardproof|\.|.*\.whl)\[([\w,]+)\]", word)
        for extra in asked[1].split(",") if asked else ():
            assert extra in extras, f"there is no extra {extra!r}"


def torchrun(words: list[str], run: bool) -> None:
    rest = list(words)
    while rest and rest[0].startswith("--"):
        name, has_value, _ = rest.pop(0).partition("=")
        assert name in LAUNCHERS, f"torchrun {name}"
        if not has_value:
            rest.pop(0)
    python(rest, run)


def python(words: list[str], run: bool) -> None:
    if words[:2] == ["-m", "shardproof"]:
        shardproof(words[2:], run)
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, f"there is no module {words[1]}"
    elif words[0] != "-c":
        assert Path(words[0]).exists() or (ROOT / words[0]).exists() or not run, f"there is no {words[0]}"


def shardproof(words: list[str], run: bool) -> None:
    """Parse a command of ours; then check a recipe by a dry run, and run what reads files only."""
    from typer.main import get_command

    from shardproof.cli import app

    if words[0].startswith("--"):
        return call(words) if run else None
    name, *rest = words
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    params = command.make_context(name, list(rest), resilient_parsing=False).params
    if not run:
        return None
    if name == "train":
        return train(params)
    if name == "data" and params["measure"] is None:
        return call(words)
    if name == "estimate" and any(Path(word).exists() for word in rest):
        return call(words)
    return None


def train(params: dict[str, Any]) -> None:
    """Check the recipe of a command, by a dry run if its model and data are here. vLLM may not be installed."""
    from shardproof.config.load import load_recipe

    overrides = list(params["overrides"] or ())
    recipe = load_recipe(params["recipe"], overrides)
    needed = [recipe.model.path, *(each.source for each in recipe.data.sources)]
    if all(Path(path).exists() for path in needed) and recipe.rollout.engine != "vllm":
        call(["train", params["recipe"], *overrides, "--dry-run"])


def call(words: list[str]) -> None:
    """Run a command of ours in this process, as if nobody had started ranks; its exit code must be 0."""
    from shardproof.cli import app

    said = io.StringIO()
    ranks = {
        name: os.environ.pop(name, None) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            app(words, standalone_mode=False)
    except SystemExit as end:
        assert not end.code, f"shardproof {' '.join(words)}: exit code {end.code}\n{said.getvalue()[-2000:]}"
    finally:
        os.environ.update({name: value for name, value in ranks.items() if value is not None})
