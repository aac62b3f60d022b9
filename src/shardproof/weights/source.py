"""Where a model comes from: a folder, a hub id, or a seed."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from shardproof.errors import fail
from shardproof.foreign import MAX_TEXT_BYTES, is_inside, open_foreign, read_json
from shardproof.weights.reader import INDEX_NAME, Checkpoint, open_checkpoint

_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]
# What transformers opens by itself, when it is asked for a config or a tokenizer.
_TEXT_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")
_MAX_CONFIG_BYTES = 16 * 2**20
# A module is built for each of these, so an absurd number of them would take forever.
_COUNTED = re.compile(r"(^|_)(layers?|blocks?|experts|depth|stages)$")
_MAX_COUNT, _MAX_INTEGER = 2**14, 2**53
CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class RandomInit:
    """Random weights from the model's own initialisation and `seed`, equal for every world size and strategy."""

    config: PretrainedConfig
    seed: int = 0


@dataclass(frozen=True)
class ResolvedSource:
    """What a source turned out to be. `checkpoint` is None for random weights."""

    label: str
    folder: Path | None
    config: PretrainedConfig
    checkpoint: Checkpoint | None
    seed: int


def find_folder(source: str | os.PathLike[str], revision: str | None) -> Path | None:
    """The source's local folder, or None when this machine does not have it. Hub ids are fetched if allowed."""
    # os.path, unlike Path, does not raise for strings that cannot be a path: they do not exist.
    folder = Path(os.path.expanduser(source))
    if os.path.isdir(folder):
        return folder
    if (
        folder.is_absolute()
        or str(source).startswith((".", "~"))
        or str(source).count("/") > 1
        or not str(source)
    ):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        # HF_HUB_OFFLINE is read by huggingface_hub itself: offline, only its cache is looked at.
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=_HUB_PATTERNS))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError, ValueError):
        return None


def resolve_random(source: RandomInit) -> ResolvedSource:
    if not isinstance(source.config, PretrainedConfig):
        raise fail(
            "C001", "source", f"RandomInit needs a transformers config, got {type(source.config).__name__}."
        )
    label = f"random {source.config.model_type}, seed {source.seed}"
    return ResolvedSource(label, None, source.config, None, source.seed)


def resolve_folder(label: str, folder: Path, trust_remote_code: bool) -> ResolvedSource:
    """The folder's config and checkpoint, checked for what we do not load."""
    config = read_config(folder, trust_remote_code)
    return ResolvedSource(label, folder, config, open_checkpoint(folder), seed=0)


def read_config(folder: Path, trust_remote_code: bool, name: str = CONFIG_NAME) -> PretrainedConfig:
    """The folder's config; refuses quantized checkpoints, and models whose code lies beside their weights."""
    path = folder / name
    if not path.exists():
        raise fail("L101", "source", f"{folder} has no {name}.")
    raw = read_json(path, "source", inside=folder, max_bytes=_MAX_CONFIG_BYTES)
    _check_raw(raw, name)
    check_texts(folder)
    model_type = raw.get("model_type")
    for part in (raw, raw.get("text_config") or {}):
        if part.get("quantization_config"):
            method = part["quantization_config"].get("quant_method", "unknown")
            raise fail("L109", "source", f"{name} has a quantization_config (quant_method={method!r}).")
    if raw.get("auto_map") and model_type not in CONFIG_MAPPING and not trust_remote_code:
        code = ", ".join(sorted({str(value) for value in raw["auto_map"].values()}))
        raise fail(
            "L108", "source", f"model_type={model_type!r} is implemented by the repository itself ({code})."
        )
    kernels = None if trust_remote_code else _find_kernels(raw)
    if kernels is not None:
        raise fail("L108", "source", f"{name} asks for kernels from the hub: {kernels}.")
    # A model's own code is looked for beside the config, which transformers finds by the folder alone.
    where = folder if trust_remote_code and name == CONFIG_NAME else path
    try:
        return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    except Exception as error:  # a config class may raise anything on a value it does not expect
        raise fail("L114", "source", f"model_type={model_type!r}: {_reason(error)}") from error


def check_texts(folder: Path) -> None:
    """Raise unless what transformers reads in a folder are regular files of bounded size inside it."""
    for path in sorted(path for pattern in _TEXT_PATTERNS for path in folder.glob(pattern)):
        if not is_inside(path, folder) or not path.is_dir():
            open_foreign(path, "source", inside=folder, max_bytes=MAX_TEXT_BYTES).close()


def text_files(folder: Path) -> list[str]:
    """The names of a folder's config, tokenizer and templates: what `transformers` reads besides weights."""
    found = {path for pattern in _TEXT_PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found if path.name != INDEX_NAME)


def has_texts(folder: Path) -> bool:
    """Whether a folder has a config and a tokenizer."""
    return (folder / CONFIG_NAME).is_file() and any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_tokenizer_keys(folder: Path) -> None:
    """Raise for keys of tokenizer settings with terminal escapes: the tokenizers library prints keys unescaped."""
    for path in (folder / name for name in _TOKENIZER_SETTINGS):
        if path.is_file():
            found = read_json(path, "source", inside=folder)
            if path.name == "tokenizer.json":  # elsewhere in it keys are tokens, which may be anything
                found = found.get("added_tokens") if isinstance(found, dict) else None
            stack = [found]
            while stack:
                value = stack.pop()
                if isinstance(value, dict):
                    odd = next((key for key in value if not key.isprintable()), None)
                    if odd is not None:
                        raise fail("L103", "source", f"{path.name} has the key {odd[:100]!r}.")
                    stack += value.values()
                elif isinstance(value, list):
                    stack += value


def _check_raw(raw: Any, name: str) -> None:
    """Raise for a config that is not an object, or whose parts have wrong types or absurd numbers."""
    if not isinstance(raw, dict):
        raise fail("L103", "source", f"{name} is not valid: a JSON {type(raw).__name__}, expected an object.")
    if not isinstance(raw.get("model_type"), str | None):
        raise fail("L103", "source", f"{name}: model_type is not text.")
    for part, label in ((raw, ""), (raw.get("text_config"), "text_config.")):
        for key in ("text_config", "quantization_config", "auto_map"):
            value = part.get(key) if isinstance(part, dict) else None
            if not isinstance(value, dict | None):
                found = type(value).__name__
                raise fail("L103", "source", f"{name}: {label}{key} is a JSON {found}, expected an object.")
    stack: list[tuple[str, Any]] = [("", raw)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            stack += [(str(inner), item) for inner, item in value.items()]
        elif isinstance(value, list):
            stack += [(key, item) for item in value]
        elif isinstance(value, float) and math.isnan(value):  # inf may mean "no limit"
            raise fail("L103", "source", f"{name}: {key} is NaN.")
        elif isinstance(value, int):
            limit = _MAX_COUNT if _COUNTED.search(key) else _MAX_INTEGER
            if abs(value) > limit:
                raise fail(
                    "L103", "source", f"{name}: {key}={str(value)[:40]} is above the limit of {limit}."
                )


def _find_kernels(raw: Any) -> str | None:
    """What a config names as an implementation that transformers would fetch from the hub and run; None for nothing."""
    stack = [raw]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                if key.endswith("_implementation") and "/" in str(item):
                    return f"{key}={item!r}"[:200]
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return None


def _reason(error: Exception) -> str:
    """A library's error message, cut to 1,000 characters."""
    return (str(error) or type(error).__name__)[:1000]


def config_from_dict(data: dict[str, Any]) -> PretrainedConfig:
    """A config that another rank sent."""
    return AutoConfig.for_model(**data)
