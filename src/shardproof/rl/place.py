"""The run's folder before a run: where it may lie, what is in it, and whether this recipe may go on there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardproof.checkpoints.folders import list_checkpoints, step_of
from shardproof.config.evaluation_sets import draws_of, held_out_sets, named_sources
from shardproof.config.judges import judge_paths
from shardproof.config.load import to_json
from shardproof.config.schema import Recipe
from shardproof.errors import ShardproofError, fail
from shardproof.files import write_atomic
from shardproof.foreign import is_inside, read_json
from shardproof.report.read import METRICS_NAME
from shardproof.rl.data import HeldOutPrompts, Prompt
from shardproof.rl.loggers import read_lines
from shardproof.rl.rewards.specs import JUDGE_CACHE
from shardproof.rl.same_run import (
    Digests,
    Resume,
    changed_content,
    changed_settings,
    check_resume,
    refuse_changes,
    take_digests,
)
from shardproof.text import without_secrets

SETTINGS_NAME = "config.json"
CHECKPOINTS, CRITIC, REFERENCE, MODEL, ADAPTER = "checkpoints", "critic", "reference", "model", "adapter"
BEST = "best"  # the model and the adapter of the best evaluation
BEST_NAME = "best.json"  # in there: which one it is
# What may hold passwords. A resume compares neither.
_PRIVATE = (("output", "tracker_options"), ("rollout", "vllm"))
_MARK = "shardproof"  # the key that tells a run's config.json from a model's
# What people keep beside a run before it starts.
_HARMLESS = (".log", ".txt", ".out", ".err", ".pid", ".toml", ".sh", ".md")


@dataclass(frozen=True)
class State:
    """What a folder holds of the earlier parts of a run."""

    settings: dict[str, Any] | None = None  # None: no run has been here
    digests: Digests = field(default_factory=dict)
    steps: tuple[int, ...] = ()  # of its checkpoints
    last_step: int = 0  # that its metrics tell of

    @property
    def is_used(self) -> bool:
        """Whether something would be lost or mixed up if another run began here."""
        return bool(self.steps or self.last_step)


def check_folder(recipe: Recipe, resume: Resume | None = None) -> State:
    """What the run's folder holds; raises if this recipe may not run there. Nothing is written."""
    how = resume or Resume()
    with _usable(recipe):
        state = _look(recipe, how)
        check_state(Path(recipe.output.folder), state, how)
        _check_settings(state, recipe, how)
    return state


def check_own(recipe: Recipe, resume: Resume) -> State:
    """What this host's folder holds; raises if it is another run's, or cannot be one's. Nothing is written.

    The checkpoints that a run goes on from may be on other hosts; they are not looked for.
    """
    with _usable(recipe):
        state = _look(recipe, resume)
        _check_settings(state, recipe, resume)
    return state


@contextmanager
def _usable(recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except ShardproofError:
        raise
    except (OSError, ValueError) as error:  # a name that no folder can have, or one that may not be looked at
        reason = getattr(error, "strerror", None) or error
        message = f"output.folder={recipe.output.folder!r} cannot be used: {reason}."
        raise fail("C007", "output", message, fix="use an output.folder that you can write to") from error


def check_state(folder: Path, state: State, resume: Resume) -> None:
    """Raise unless a run may go on from what its folder holds, or begin there."""
    if resume.from_step:
        _require_step(folder, state, resume.from_step)
    if state.is_used and resume.from_step != 0:
        _require_checkpoint(folder, state)


def _check_settings(state: State, recipe: Recipe, resume: Resume) -> None:
    if state.is_used and resume.from_step != 0:
        changes = changed_settings(state.settings or {}, recipe, with_sources=not state.digests)
        refuse_changes(Path(recipe.output.folder), changes, resume)


def _look(recipe: Recipe, resume: Resume) -> State:
    check_resume(resume)
    if not recipe.output.folder.strip():
        raise fail("C001", "output", "output.folder is empty.", fix="use a separate folder for the run")
    folder = Path(recipe.output.folder)
    if recipe.output.folder.startswith("~"):  # which a shell does not replace behind a "="
        message = f"output.folder={recipe.output.folder!r} would be a folder called {folder.parts[0]!r} here."
        raise fail(
            "C001",
            "output",
            message,
            fix="write the full path of your home folder, or ./~ if you mean a folder with this name",
        )
    _require_apart(folder, recipe)
    if os.path.lexists(folder) and not folder.is_dir():
        raise fail("C006", "output", f"{folder} is a file.", fix="use another output.folder")
    state = read_state(folder)
    if state.settings is None:
        _require_empty(folder)
    return state


def check_content(
    state: State, recipe: Recipe, prompts: Sequence[Prompt], held_out: HeldOutPrompts, resume: Resume
) -> None:
    """Raise if data or models hold other things than when the run in this state was begun."""
    if state.is_used and state.digests and resume.from_step != 0:
        now = take_digests(recipe, prompts, held_out)
        refuse_changes(Path(recipe.output.folder), changed_content(state.digests, now), resume)


def read_state(folder: Path) -> State:
    """What a folder holds of a run; what cannot be read there raises."""
    path = folder / SETTINGS_NAME
    if not os.path.lexists(path):
        return State()
    found = read_json(path, "output", code="C006")
    if not _is_settings(found):
        message = (
            f"{folder} holds a {SETTINGS_NAME} that no run wrote; a model's config may have the same name."
        )
        raise fail("C006", "output", message, fix="use another output.folder")
    mark = found.pop(_MARK, None)
    digests = mark.get("digests") or {} if isinstance(mark, dict) else {}
    if not _are_digests(digests):
        message = f"{path} is damaged: its digests of data and models cannot be read."
        raise fail("C006", "output", message, fix="restore the file, or use another output.folder")
    return State(found, digests, checkpoint_steps(folder / CHECKPOINTS), _last_step(folder))


def write_settings(folder: Path, recipe: Recipe, digests: Digests) -> None:
    """Note what the run in this folder is."""
    mark = {_MARK: {"format": 1, "digests": digests}}
    settings = json.loads(to_json(recipe))
    for section, key in _PRIVATE:
        settings[section][key] = without_secrets(settings[section][key])
    write_atomic(folder / SETTINGS_NAME, json.dumps(mark | settings, indent=2) + "\n")


def checkpoint_steps(root: Path) -> tuple[int, ...]:
    """The steps of the checkpoints in a folder, in order."""
    return tuple(step_of(path) for path in list_checkpoints(root)) if root.is_dir() else ()


def read_best(folder: Path) -> dict[str, Any] | None:
    """What a run's folder says of its best model; None if there is none that can be told from others."""
    path = folder / BEST / BEST_NAME
    try:
        found = read_json(path, "output", code="C006") if path.exists() else None
    except ShardproofError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("metric"), str):
        return None
    return found if all(isinstance(found.get(key), (int, float)) for key in ("step", "value")) else None


def is_comparable(best: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether the best model was chosen by what chooses now: by the same metric, of as many rows, drawn alike."""
    metric = recipe.evaluation.best
    if metric is None:  # nothing chooses
        return True
    drawn = best.get("drawn")  # not in notes of earlier versions
    return best["metric"] == metric and drawn in (None, draws_of(metric, held_out_sets(recipe)))


def _is_settings(found: Any) -> bool:
    """Whether a JSON value is a run's settings; those of earlier versions have no mark."""
    return isinstance(found, dict) and all(
        isinstance(found.get(key), dict) for key in ("model", "train", "output")
    )


def _are_digests(found: Any) -> bool:
    return isinstance(found, dict) and all(
        isinstance(parts, dict) and all(isinstance(text, str) for text in parts.values())
        for parts in found.values()
    )


def _last_step(folder: Path) -> int:
    return max((line["step"] for line in read_lines(folder / METRICS_NAME) if "step" in line), default=0)


def _sources(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    roles = {"model": recipe.model, "reference": recipe.reference, "critic": recipe.critic}
    paths = {f"{name}.path": role.path for name, role in roles.items() if role is not None and role.path}
    for key, path in (paths | judge_paths(recipe)).items():
        yield key, Path(path).expanduser()
    for key, source in named_sources(recipe).items():
        if source and not source.startswith(("hf:", "environment:")):
            yield key, Path(source)


def _require_apart(folder: Path, recipe: Recipe) -> None:
    """Raise if the run would write into what it reads. A run beside its data is fine, one around them is not."""
    for key, source in _sources(recipe):
        if not source.exists():
            continue
        if is_inside(source, folder) or (source.is_dir() and is_inside(folder, source)):
            message = f"output.folder={str(folder)!r} and {key}={str(source)!r} overlap."
            raise fail("C006", "output", message, fix="use a separate output.folder for the run")


def _require_empty(folder: Path) -> None:
    """Raise if a folder in which no run has been holds something."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    names = [name for name in names if name != JUDGE_CACHE]  # its answers while pass rates were measured
    odd = [name for name in names if not name.startswith(".") and not name.endswith(_HARMLESS)]
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        message = f"{folder} holds {', '.join(odd[:3])}{more}, but no {SETTINGS_NAME} of a run."
        raise fail("C006", "output", message, fix="use another output.folder, or empty this one")


def _require_step(folder: Path, state: State, step: int) -> None:
    if step not in state.steps:
        there = ", ".join(map(str, state.steps)) or "none"
        message = f"--from {step}: {folder / CHECKPOINTS} holds no checkpoint of that step; it has {there}."
        raise fail("C006", "output", message, fix="choose one of these steps, or 0 to start over")


def _require_checkpoint(folder: Path, state: State) -> None:
    """Raise if checkpoints are gone: a run that begins again would replace what the steps without them came to."""
    settings = state.settings or {}
    output, planned = settings["output"], settings["train"].get("steps")
    save_every = output.get("save_every")
    is_complete = (folder / MODEL).exists() or (isinstance(planned, int) and state.last_step >= planned)
    had_one = is_complete or (isinstance(save_every, int) and 0 < save_every < state.last_step)
    if had_one and not state.steps:
        message = f"{folder} holds metrics of {state.last_step} steps, but no checkpoint to resume from."
        fix = f"restore {CHECKPOINTS}/, use another output.folder, or start over with --from 0"
        raise fail("C006", "output", message, fix=fix)
