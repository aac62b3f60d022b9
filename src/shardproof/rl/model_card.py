"""README.md of the final model: what it is, what it reached, and the receipts of the run that made it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from shardproof.config.schema import Recipe
from shardproof.export.receipts import read_digest
from shardproof.files import write_atomic
from shardproof.foreign import read_json
from shardproof.model.roles import REWARD
from shardproof.report.read import EVENTS_NAME, FACTS_NAME, HEADLINES, METRICS_NAME
from shardproof.rl.algorithms.registry import find_algorithm
from shardproof.rl.loggers import read_lines

CARD_NAME = "README.md"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LOCAL = ("output.", "train.ranks")  # settings that say nothing about the model
_SHOWN = 200  # characters of a value


def write_card(run: Path, model: Path, recipe: Recipe, *, adapter: bool = False) -> None:
    """Write the card of a model, or of an adapter, that a run saved. The run's files say what is in it."""
    name, facts = recipe.output.push_to_hub or run.resolve().name, _facts(run)
    digest = read_digest(model)
    parts = [
        f"# {name}",
        _summary(recipe, facts, adapter),
        _results(run),
        _use(recipe, adapter),
        _receipts(run, digest),
        _verify(digest),
        _settings(facts),
        _versions(facts),
    ]
    text = "\n\n".join(part for part in parts if part)
    card = ModelCard(f"---\n{_metadata(recipe, adapter).to_yaml()}\n---\n\n{text}\n")
    write_atomic(model / CARD_NAME, str(card))


def _metadata(recipe: Recipe, adapter: bool) -> ModelCardData:
    base, parts = recipe.model.path, [each.source.split(":") for each in recipe.data.sources]
    datasets = [part[1] for part in parts if part[0] == "hf" and len(part) > 1] or None
    return ModelCardData(
        base_model=base if _is_on_hub(base) else None,
        datasets=datasets,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-classification" if _scores(recipe) else "text-generation",
        tags=["shardproof", "reinforcement-learning", recipe.algorithm.name.rpartition(":")[2]],
    )


def _scores(recipe: Recipe) -> bool:
    """Whether the model is a reward model, whose head gives a text one number."""
    return find_algorithm(recipe.algorithm.name).spec.role == REWARD


def _is_on_hub(path: str) -> bool:
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def _summary(recipe: Recipe, facts: Mapping[str, Any], adapter: bool) -> str:
    what = "A LoRA adapter for" if adapter else "Trained from"
    return (
        f"{what} {_source(recipe.model.path)} with {recipe.algorithm.name} for {recipe.train.steps} steps on "
        f"{_named(recipe)}, by shardproof {facts.get('shardproof') or ''}".rstrip()
        + ". Every hand-over of weights in this run was checked; the [receipts](#receipts) are below."
    )


def _named(recipe: Recipe) -> str:
    return ", ".join(_source(each.source) for each in recipe.data.sources)


def _source(path: str) -> str:
    """A model or a file as strangers may know it: of a folder of this machine no more than its last two names."""
    known = path.startswith(("hf:", "environment:")) or _is_on_hub(path)
    shown = path.removeprefix("hf:") if known else "/".join(Path(path).resolve().parts[-2:])
    # A name with line breaks would be read as more of the card.
    return f"`{' '.join(shown.split()).replace('`', chr(39))}`"


def _results(run: Path) -> str:
    lines = [(line["step"], line.get("metrics") or {}) for line in read_lines(run / METRICS_NAME)]
    measured = (name for name in HEADLINES if any(metrics.get(name) is not None for _, metrics in lines))
    headline = next(measured, None)
    if headline is None:
        return ""
    found = [(step, metrics) for step, metrics in lines if metrics.get(headline) is not None]
    rows = []
    for step, metrics in found if len(found) == 1 else (found[0], found[-1]):
        error = metrics.get(f"{headline}_se")
        rows.append(
            (
                int(metrics.get("eval/step", step)),
                f"{metrics[headline]:.4f}",
                "" if error is None else f"{error:.4f}",
            )
        )
    called = HEADLINES[headline]
    return f"## Held-out {called}\n\n" + _table(("after step", f"mean {called}", "standard error"), rows)


def _use(recipe: Recipe, adapter: bool) -> str:
    name = recipe.output.push_to_hub or "path/to/this/folder"
    kind = "AutoModelForSequenceClassification" if _scores(recipe) else "AutoModelForCausalLM"
    if adapter:
        base = recipe.model.path if _is_on_hub(recipe.model.path) else "path/to/the/base/model"
        code = (
            f"from peft import PeftModel\nfrom transformers import {kind}\n\n"
            f'base = {kind}.from_pretrained("{base}"{", num_labels=1" if _scores(recipe) else ""})\n'
            'model = PeftModel.from_pretrained(base, "path/to/this/folder")'
        )
        return f"## Use\n\n```python\n{code}\n```"
    code = (
        f"from transformers import {kind}, AutoTokenizer\n\n"
        f'model = {kind}.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    )
    served = "" if _scores(recipe) else f"\n\n```\nvllm serve {name}\n```"
    return f"## Use\n\n```python\n{code}\n```{served}"


def _receipts(run: Path, digest: str) -> str:
    """The load on each rank, the last sync, and the exports of the run's last part."""
    proofs = [line for line in read_lines(run / EVENTS_NAME) if line.get("kind") == "proof"]
    syncs = [line for line in proofs if line.get("proof") == "sync"][-1:]
    kept = [line for line in proofs if line.get("proof") in ("load", "resume")] + syncs
    last: dict[Any, Mapping[str, Any]] = {}
    for line in [*kept, *(line for line in proofs if line.get("proof") == "export")]:
        details = line.get("details") or {}
        last[line.get("proof"), line.get("role"), line.get("rank"), details.get("path")] = line
    rows = [_receipt(line) for line in last.values()]
    failed = sum(line.get("passed") is False for line in proofs)
    counts = f"{len(proofs)} checks in this run, {failed} of them failed."
    head = f"## Receipts\n\nDigest of this folder's weights: `{digest}`\n\n{counts}"
    return f"{head}\n\n{_table(('check', 'after step', 'passed', 'receipt', 'what was compared'), rows)}"


def _receipt(line: Mapping[str, Any]) -> tuple[Any, ...]:
    details, rank = line.get("details") or {}, line.get("rank")
    what = f"{line.get('proof')} of the {line.get('role')}" + ("" if rank is None else f" on rank {rank}")
    if details.get("path"):
        what += f" to {details['path']}/"
    return (
        what,
        line.get("step"),
        "yes" if line.get("passed") else "**no**",
        line.get("text"),
        line.get("compared"),
    )


def _verify(digest: str) -> str:
    command = f"shardproof verify path/to/this/folder --digest {digest[:16]}"
    return (
        "## Check these weights\n\nEvery tensor's digest is in `receipt.json`. This reads the weights and compares them:"
        f"\n\n```\npip install 'shardproof[cli]'\n{command}\n```"
    )


def _settings(facts: Mapping[str, Any]) -> str:
    changed = facts.get("changed") or {}
    rows = [
        (f"`{key}`", f"`{_shown(key, both.get('value'))}`", f"`{_shown(key, both.get('default'))}`")
        for key, both in changed.items()
        if not key.startswith(_LOCAL)
    ]
    head = "## Settings that differ from the defaults"
    return f"{head}\n\n{_table(('key', 'value', 'default'), rows)}" if rows else ""


def _shown(key: str, value: Any) -> str:
    if isinstance(value, str) and (key.endswith(".path") or key in ("data.train", "data.evaluation")):
        return _source(value).strip("`")
    return json.dumps(value)[:_SHOWN]


def _versions(facts: Mapping[str, Any]) -> str:
    packages = {"python": facts.get("python"), **(facts.get("packages") or {})}
    hardware = facts.get("hardware") or {}
    gpus = [str(gpu.get("name")) for gpu in hardware.get("gpus") or []]
    place = f"{len(gpus)} x {gpus[0]}" if gpus else str(hardware.get("cpu") or "CPU")
    listed = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return f"## Versions\n\n{listed}; {facts.get('ranks')} ranks on {place}."


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str("" if value is None else value).split()).replace("|", "\\|").replace("<", "&lt;")


def _facts(run: Path) -> dict[str, Any]:
    found = read_json(run / FACTS_NAME, "output", code="C006") if (run / FACTS_NAME).is_file() else {}
    return found if isinstance(found, dict) else {}
