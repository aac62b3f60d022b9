"""Settings that configs of several libraries have alike: data, trackers, evaluation, steps, and what is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from shardproof.config.imported.draft import Draft, Foreign

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
MAX_ROWS = 2**20  # the most that a recipe may say
NO_MODEL = "path/to/model"
KEEP_ALL = 1_000_000  # checkpoints: more than a run writes, for the libraries keep all unless a config says otherwise


def hub_source(name: str, config: str | None = None, split: str | None = None) -> str:
    """A data set on the hub as recipes name it; local files stay as they are."""
    if name.endswith((".jsonl", ".json", ".parquet", ".csv", ".tsv")) or name.startswith(("/", "./", "~")):
        return name
    return ":".join(part for part in ("hf", name, config, split) if part)


def train_sources(files: Sequence[str]) -> str | list[str] | list[dict[str, str]]:
    """Files as `data.train` has them: those of one name in several folders are called after their folders, too."""
    if len(files) == 1:
        return files[0]
    names = [PurePosixPath(file).stem for file in files]
    if len(set(names)) == len(names):
        return list(files)
    longer = ["-".join(PurePosixPath(file).with_suffix("").parts[-2:]) for file in files]
    if len(set(longer)) < len(longer):
        longer = [f"{name}-{number}" for number, name in enumerate(longer, 1)]
    return [{"source": file, "name": name} for file, name in zip(files, longer, strict=True)]


def trackers(draft: Draft, named: Any, origin: str) -> None:
    """The trackers that both know, and which of the others are missed."""
    names = [named] if isinstance(named, str) else list(named or [])
    known = list(TRACKERS) if "all" in names else [name for name in names if name in TRACKERS]
    draft.put("output.trackers", known, origin)
    for name in names:
        if name not in (*TRACKERS, "all", "none", "console"):
            draft.gaps[f"{origin}={name!r}"] = "name a class of yours in output.trackers"


def evaluate_all(draft: Draft, library: str) -> None:
    """Evaluate on every held-out row: recipes take the first ones unless they say otherwise."""
    if draft.values.get("output.eval_every"):
        draft.put("output.eval_prompts", MAX_ROWS, f"{library} evaluates on every row")
    elif draft.values.pop("evaluation.sets", None) is not None:
        draft.gaps["held-out sets beside the first"] = (
            "nothing is evaluated: set output.eval_every, and name them"
        )


def draw_evaluations(draft: Draft, foreign: Foreign, section: str, keys: Sequence[str]) -> None:
    """How evaluations draw where the library says that apart from training: recipes draw as in training, unless they say it.

    The default of each of the keys, and what is below it, draws from all tokens.
    """
    for key in keys:
        own = max(foreign.take(f"{section}.{key}", 0), 0)
        is_drawn = draft.values["evaluation.temperature"] > 0
        if is_drawn and own != draft.values.get(f"rollout.{key}", 0):
            draft.put(f"evaluation.{key}", own, f"{section}.{key}")


def held_out(draft: Draft, files: Sequence[str], origin: str) -> None:
    """The files to evaluate on: the first, and the others as sets of their own."""
    if files:
        draft.put("data.evaluation", files[0], origin)
    if len(files) > 1:
        more = [{"name": f"set{number}", "source": file} for number, file in enumerate(files[1:], 2)]
        draft.put("evaluation.sets", more, origin)


def as_list(files: Any) -> list[str]:
    """One file or several as a list."""
    return [files] if isinstance(files, str) else list(files or [])


def fill_in_missing(draft: Draft, *, rewarded: bool) -> None:
    """Ask for what every recipe needs and this config does not say."""
    if "model.path" not in draft.values:
        draft.ask("model.path", NO_MODEL, "the model's folder or hub id")
    if "data.train" not in draft.values:
        draft.ask("data.train", "train.jsonl", "the rows to train on")
    if rewarded and not {"reward.functions", "reward.models"} & draft.values.keys():
        draft.ask("reward.functions", [{"name": "exact_match"}], "your reward functions")
    if "output.folder" not in draft.values:
        draft.ask("output.folder", "runs/imported", "the folder of the run")


def steps(draft: Draft, limit: Any, epochs: Any, updates: int, origin: str, epochs_key: str) -> None:
    """`train.steps`, from a limit in optimizer updates or, where there is none, as a question about the data."""
    if isinstance(limit, (int, float)) and limit > 0:
        draft.put("train.steps", math.ceil(limit / updates), origin)
        return
    what = f"{epochs_key}={epochs:g}: passes over the data times rows, divided by prompts_per_step"
    draft.ask("train.steps", 1000, what)


def whole(draft: Draft, key: str, value: float, what: str, origin: str) -> int:
    """A count that the recipe needs whole; where it is not, the nearest one is to be checked."""
    number = max(1, round(value))
    if number == value:
        draft.put(key, number, origin)
    else:
        draft.ask(key, number, f"{what} would be {value:g} ({origin})")
    return number


def as_policy(draft: Draft, foreign: Foreign, critic: str, policy: str, own: Mapping[str, Any]) -> None:
    """Note what a config says otherwise about its critic, which is updated as the policy is but for its learning rate;
    `own` are keys of both, with the library's own values."""
    for key, default in own.items():
        value = foreign.take(f"{critic}.{key}")
        meant = foreign.take(f"{policy}.{key}", default)
        if value is not None and value != meant:
            draft.gaps[f"{critic}.{key}={value!r}"] = f"the critic has the policy's, which is {meant!r}"


def measure_from_engine(draft: Draft, origin: str) -> None:
    """Ratios that are measured from what the engine drew with."""
    draft.put("algorithm.trust_region", "behaviour", origin)
    draft.put("algorithm.correction", "none", f"{origin}: the ratio is the correction")
    for key in ("tis_cap", "icepop_bounds"):
        draft.values.pop(f"algorithm.{key}", None)
