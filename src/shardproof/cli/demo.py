"""`shardproof demo`: two CPU ranks prove what they hold, find wrong bytes, and teach a careless model to add."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof.cli.options import Options, exit_code_of
from shardproof.cli.recipes import built_in_recipes
from shardproof.errors import ShardproofError, fail
from shardproof.terminal import Terminal, attached
from shardproof.text import duration, sanitise_logging

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

logger = logging.getLogger(__name__)

MARK = "demo.json"  # says that a folder is a demo's, and may be replaced by the next one
_RUN, _FAULTS, _RECIPE, _DATA = "run", "faults", "tiny.toml", "tiny"
_INTRODUCTION = """\
shardproof demo: a tiny model that adds carelessly learns to add correctly, with GRPO on 2 ranks on the CPU.
It takes about a minute and needs no network. It writes to {folder}/.
"""


def demo(
    output: Annotated[
        Path,
        typer.Option(file_okay=False, help="folder to write to; the folder of an earlier demo is replaced"),
    ] = Path("shardproof-demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="training steps, for a shorter demo")] = None,
) -> None:
    """Watch 2 CPU ranks prove what they hold, catch injected faults, and teach a careless model to add."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same demo on every machine
    started = time.monotonic()
    with attached() as terminal:
        try:
            recipe = prepare(output, steps)
            terminal.show(_INTRODUCTION.format(folder=output))
            _run(recipe, terminal)
            outcome = read_outcome(recipe)
        except ShardproofError as error:
            terminal.show(str(error))
            raise SystemExit(exit_code_of(error)) from None
        terminal.show("\n".join(describe_outcome(outcome, output, time.monotonic() - started)))


def prepare(output: Path, steps: int | None) -> Recipe:
    """The demo's recipe, copied with its model and data into a folder that is new, empty, or an earlier demo's."""
    from shardproof.config.load import load_recipe
    from shardproof.files import remove_folder

    fix = "pass --output with a folder that does not exist yet"
    try:
        if output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
            raise fail("C006", "demo", f"{output} holds files that the demo did not write.", fix=fix)
        output.mkdir(parents=True, exist_ok=True)
        (output / MARK).write_text(json.dumps({"made by": "shardproof demo"}) + "\n")
        for name in (_RUN, _FAULTS, _DATA):
            remove_folder(output / name)
        shutil.copyfile(built_in_recipes() / _RECIPE, output / _RECIPE)
        shutil.copytree(built_in_recipes() / _DATA, output / _DATA)
    except OSError as error:
        message = f"{error.filename or output} cannot be written: {error.strerror or error}."
        raise fail("C007", "demo", message, fix=fix) from error
    overrides = [f"output.folder={output / _RUN}"]
    if steps is not None:
        overrides += [f"train.steps={steps}", f"output.eval_every={steps}"]
    return load_recipe(output / _RECIPE, overrides)


def _run(recipe: Recipe, terminal: Terminal) -> None:
    from shardproof.cli.ranks import start_and_wait
    from shardproof.cli.readiness import require_start

    options = Options()
    require_start(recipe, options)
    logger.info("starting %d ranks ...", recipe.train.ranks)
    terminal.pause()  # rank 0 draws from here on
    code = start_and_wait(recipe, options, recipe.train.ranks or 2, run_demo_rank)
    if code:
        raise SystemExit(code)


def run_demo_rank(recipe_json: str, options: Options) -> None:
    """Show what this rank can prove, then train. Collective: every rank."""
    from shardproof.cli.ranks import run_attached

    sanitise_logging()
    with attached(rank=int(os.environ["RANK"])) as terminal:
        run_attached(recipe_json, options, terminal, first=_show_proofs)


def _show_proofs(recipe: Recipe, terminal: Terminal) -> None:
    """What each rank loaded, and what the checks say of bytes that were changed. Collective: every rank."""
    import torch.distributed as dist

    from shardproof.cli.demo_proofs import describe_faults, describe_load, inject_faults, load_model

    lines = ["", "1. Load: every rank reads its own shard and proves what it holds", ""]
    lines += describe_load(load_model(recipe))
    injected = inject_faults(recipe, Path(recipe.output.folder).with_name(_FAULTS))
    lines += ["", "2. Fault injection: one wrong bit, in three places", "", *describe_faults(injected)]
    lines += ["", f"3. Train: {recipe.train.steps} steps of {recipe.algorithm.name.upper()}", ""]
    if dist.get_rank() == 0:
        terminal.show("\n".join(lines))
    missed = [fault.change for fault in injected if not fault.findings]
    if missed:
        raise RuntimeError(f"not found: {missed}")


@dataclass(frozen=True)
class Outcome:
    """What a demo's run learned."""

    steps: int
    questions: int  # held out
    before: tuple[float, float]  # share of held-out questions answered correctly, and its standard error
    after: tuple[float, float]
    seconds: float  # of training


def read_outcome(recipe: Recipe) -> Outcome:
    """The outcome of a demo's run, from its folder."""
    raw = (Path(recipe.output.folder) / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in raw]
    evaluated = [row["metrics"] for row in rows if "eval/reward" in row["metrics"]]
    before, after = ((row["eval/reward"], row["eval/reward_se"]) for row in (evaluated[0], evaluated[-1]))
    assert recipe.data.evaluation is not None
    num_rows = len(Path(recipe.data.evaluation).read_text().splitlines())
    return Outcome(
        rows[-1]["step"], min(num_rows, recipe.output.eval_prompts), before, after, rows[-1]["time"]
    )


def describe_outcome(outcome: Outcome, output: Path, seconds: float) -> list[str]:
    """What was learned, and what to look at next."""
    run, command = output / _RUN, own_command()
    asked = f"{outcome.questions} sums that the model never saw, here or in its first training:"
    shares = [f"{share:.1%} ± {error:.1%}" for share, error in (outcome.before, outcome.after)]
    lines = [
        "",
        "4. Outcome",
        "",
        f"  {asked}",
        f"    before training:  {shares[0]} answered correctly (± one standard error)",
        f"    {f'after {outcome.steps} steps:':<16}  {shares[1]} answered correctly",
        f"  The demo took {duration(seconds)}, of which training {duration(outcome.seconds)}.",
        "",
        "5. What to look at next",
        "",
        "  The run's page: proofs, curves and samples, in your browser",
        f"    {run / 'report.html'}",
        "  The trained model, in transformers",
        f'    AutoModelForCausalLM.from_pretrained("{run / "model"}")',
        "  A check of any model",
        f"    {command} doctor {run / 'model'}",
        "  Training on your own data, with the demo's recipe",
        f"    {command} train {output / _RECIPE} data.train=mine.jsonl output.folder=mine",
        "  All commands",
        f"    {command} --help",
    ]
    if command != "shardproof" and Path(sys.prefix, "bin", "activate").is_file():
        activate = _relative(Path(sys.prefix, "bin", "activate"))
        lines += ["  To type just `shardproof`, run this once per shell", f"    source {activate}"]
    return lines


def own_command() -> str:
    """What calls this program again from the same folder."""
    name = Path(sys.argv[0])
    if name.name != "shardproof":
        return f"{_relative(Path(sys.executable))} -m shardproof"
    on_path = shutil.which("shardproof")
    return "shardproof" if on_path is not None and Path(on_path).samefile(name) else _relative(name)


def _relative(path: Path) -> str:
    # Not resolved: the python of a virtual environment is a link.
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
