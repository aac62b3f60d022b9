"""What makes two starts parts of one run: which settings may change in between, and what its data and models hold.

Settings that cannot change results are free. The others are fixed: a run goes on with another value only if the user
allows that key. Sources are compared by what they hold, so that a moved folder is still the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardproof.config.judges import judge_paths
from shardproof.config.load import all_keys, to_json
from shardproof.config.schema import Recipe
from shardproof.errors import ShardproofError, did_you_mean, fail
from shardproof.foreign import read_foreign
from shardproof.rl.data import HeldOutPrompts, Prompt, rows_digest
from shardproof.weights.reader import open_checkpoint
from shardproof.weights.source import find_folder

# A key stands for all keys below it. A key that is in none of these sets is fixed; a test asks for every key's place.
FREE = {
    *("model.strategy", "model.replicate", "model.cpu_offload", "model.sequence_parallel"),
    *("model.checkpoint_activations", "model.reshard_after_forward", "model.compile"),
    "model.trust_remote_code",
    "teacher",  # its content is compared where it is loaded; a server may move
    *("reference.strategy", "reference.cpu_offload", "reference.lr", "critic.strategy", "critic.cpu_offload"),
    *("rollout.batch_size", "rollout.cache_gib", "rollout.offload_policy", "rollout.sleep"),
    *("rollout.kv_cache_gib", "rollout.canary_tolerance"),
    "rollout.vllm",
    *("data.max_prompt_tokens", "data.too_long", "data.no_answer"),  # the rows that stay are compared
    *("data.pass_rates", "data.pass_rate_between"),
    *("reward.timeout_s", "reward.num_workers"),
    *("environment.timeout_s", "environment.num_workers", "environment.python"),
    *("train.steps", "train.micro_batch_tokens", "train.ranks", "train.max_consecutive_skips"),
    "train.deadline_s",
    *("evaluation.temperature", "evaluation.max_new_tokens", "evaluation.pass_at"),
    *("evaluation.top_p", "evaluation.top_k", "evaluation.min_p"),
    *("evaluation.majority", "evaluation.best"),
    "output",
}
FIXED = {
    *("model.random_init", "model.param_dtype", "model.compute_dtype", "model.lora"),
    *("critic.lr", "critic.lora"),
    *("rollout.engine", "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature"),
    *("rollout.top_p", "rollout.ahead", "rollout.order", "rollout.too_old", "rollout.replay_experts"),
    *("rollout.exact", "rollout.fp8", "rollout.top_k", "rollout.min_p", "rollout.repetition_penalty"),
    *("rollout.presence_penalty", "rollout.frequency_penalty", "rollout.min_new_tokens", "rollout.stop"),
    *("rollout.stop_ids", "rollout.include_stop", "rollout.row_overrides"),
    "algorithm",
    "environment",
    *("data.chosen_column", "data.rejected_column", "data.label_column", "data.messages_column"),
    *("data.train_on", "data.max_length", "data.on_max_length"),
    *("data.prompt_column", "data.answer_column", "data.completion_column", "data.chat"),
    *("data.chat_template_kwargs", "data.system_prompt", "data.on_system_prompt", "data.curriculum"),
    *("reward.functions", "reward.models", "reward.on_error", "reward.normalise", "reward.clip"),
    "optimizer",
    *("train.prompts_per_step", "train.seed"),
}
CONTENT = {
    "model.path",
    "reference.path",
    "critic.path",
    "teacher.path",
    "data.train",
    "data.evaluation",
    "evaluation.sets",
}

_MODEL_FILES = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)
_SHOWN_CHARACTERS = 60

Digests = Mapping[str, Mapping[str, str]]  # of each source, by its key: its parts


@dataclass(frozen=True)
class Resume:
    """How a run may go on: settings that may change although they can change results, and the step to go on from."""

    allow: tuple[str, ...] = ()
    from_step: int | None = None  # None: the newest checkpoint; 0: the beginning

    def allows(self, key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in self.allow)


@dataclass(frozen=True)
class Change:
    """A setting, or a part of a source, that is not what it was."""

    key: str
    old: Any
    new: Any
    part: str = ""

    def __str__(self) -> str:
        old, new = (_shown(value) for value in (self.old, self.new))
        return f"{_shown(self.key)}{f'[{self.part}]' if self.part else ''}={old} (now {new})"


def check_resume(resume: Resume) -> None:
    """Raise if a key that is allowed does not exist, or the step cannot be."""
    known = set(all_keys(Recipe))
    for key in resume.allow:
        if key not in known:
            message = f"--allow {key}: a recipe has no such key.{did_you_mean(key, known)}"
            raise fail("C001", "output", message, fix="name a section or a section.key of the recipe")
    if resume.from_step is not None and resume.from_step < 0:
        fix = "pass a step that has a checkpoint, or 0 to start over"
        raise fail("C001", "output", f"--from {resume.from_step}: a step cannot be negative.", fix=fix)


def kind_of(key: str) -> str | None:
    """ "free", "fixed" or "content"; None for a key that nobody has put anywhere."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for kind, names in (("free", FREE), ("fixed", FIXED), ("content", CONTENT)):
            if name in names:
                return kind
    return None


def changed_settings(before: Mapping[str, Any], recipe: Recipe, *, with_sources: bool) -> list[Change]:
    """Settings that can change results and are not what a run was begun with.

    `with_sources` compares the spelling of paths too, for runs that did not note what their sources hold.
    """
    old, new = leaves(_completed(before)), leaves(json.loads(to_json(recipe)))
    ignored = ("free",) if with_sources else ("free", "content")
    return [
        Change(key, old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if kind_of(key) not in ignored and old.get(key) != new.get(key)
    ]


def changed_content(before: Digests, now: Digests) -> list[Change]:
    """Parts of sources that are not what they were. A part that only one side could read is not compared."""
    changes = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if old is None or new is None:
            changes.append(
                Change(key, "nothing" if old is None else "given", "nothing" if new is None else "given")
            )
            continue
        changes += [
            Change(key, old[part], new[part], part) for part in old if part in new and old[part] != new[part]
        ]
    return changes


def refuse_changes(folder: Path, changes: Iterable[Change], resume: Resume) -> None:
    """Raise with old and new values of what changed and is not allowed to."""
    refused = [change for change in changes if not resume.allows(change.key)]
    if not refused:
        return
    known = set(
        all_keys(Recipe)
    )  # what was written into the folder may hold any key; only these can be allowed
    options = " ".join(
        f"--allow {key}" for key in dict.fromkeys(change.key for change in refused) if key in known
    )
    message = f"{folder} was started with other settings: {', '.join(map(str, refused))}."
    raise fail(
        "C006",
        "output",
        message,
        fix="use the old values or another output.folder"
        + (f", or accept the change with {options}" if options else ""),
    )


def take_digests(
    recipe: Recipe, prompts: Sequence[Prompt], held_out: HeldOutPrompts
) -> dict[str, dict[str, str]]:
    """What the run's sources hold: rows of data, and each model's files with a sample of its weights."""
    found = {"data.train": _rows_of(prompts)}
    if not isinstance(recipe.data.train, str):
        found["data.train"]["sources"] = ", ".join(
            f"{each.name} x {each.weight}" if each.weight else each.name for each in recipe.data.sources
        )
    sets = {name: _rows_of(rows) for name, rows in held_out.items() if rows}
    if (default := sets.pop("", None)) is not None:
        found["data.evaluation"] = default
    if sets:
        found["evaluation.sets"] = {
            f"{name} {part}": text for name, of in sets.items() for part, text in of.items()
        }
    roles = {"reference.path": recipe.reference, "critic.path": recipe.critic}
    paths = {"model.path": recipe.model.path} | {
        k: role.path for k, role in roles.items() if role is not None and role.path
    }
    paths |= judge_paths(recipe)
    for key, path in paths.items():
        folder = find_folder(path, None)
        if folder is not None:
            found[key] = _model_digest(folder, drawn=key == "model.path" and recipe.model.random_init)
    return found


def _rows_of(prompts: Sequence[Prompt]) -> dict[str, str]:
    return {"rows": str(len(prompts)), "sha256": rows_digest(prompts)[:16]}


def _model_digest(folder: Path, drawn: bool) -> dict[str, str]:
    parts = {name: _file_digest(folder / name) for name in _MODEL_FILES}
    if not drawn:
        try:
            checkpoint = open_checkpoint(folder)
        except ShardproofError:  # another host has the weights, or the load will say what is wrong with them
            return parts
        state = f"{checkpoint.header_digest}/{checkpoint.sample_digest()}"
        parts["weights"] = hashlib.sha256(state.encode()).hexdigest()[:16]
    return parts


def _file_digest(path: Path) -> str:
    if not path.exists():
        return "absent"
    content = read_foreign(path, "output")
    with contextlib.suppress(ValueError, RecursionError):
        # Another layout of the same JSON is no change.
        content = json.dumps(json.loads(content), sort_keys=True).encode("utf-8", "replace")
    return hashlib.sha256(content).hexdigest()[:16]


def _completed(before: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings with today's defaults for keys that did not exist then."""
    try:
        return json.loads(to_json(Recipe.model_validate(before)))
    except ValidationError:  # a bound that is stricter today
        return dict(before)


def leaves(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's values by dotted key; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
