"""Where a model comes from: a folder, a hub id, or a seed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from shardproof.checkpoint.reader import Checkpoint, open_checkpoint
from shardproof.errors import fail

_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]


@dataclass(frozen=True)
class RandomInit:
    """Weights drawn from `seed` as the model's own initialisation asks, the same at every world size and strategy."""

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
    folder = Path(source).expanduser()
    if folder.is_dir():
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
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError):
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


def read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The folder's config; refuses quantized checkpoints, and models whose code lies beside their weights."""
    path = folder / "config.json"
    if not path.exists():
        raise fail("L101", "source", f"{folder} has no config.json.")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        model_type = raw.get("model_type")
    except (ValueError, AttributeError) as error:
        raise fail("L103", "source", f"config.json is not valid: {error!r}.") from error
    for part in (raw, raw.get("text_config") or {}):
        if part.get("quantization_config"):
            method = part["quantization_config"].get("quant_method", "unknown")
            raise fail("L109", "source", f"config.json has a quantization_config (quant_method={method!r}).")
    if raw.get("auto_map") and model_type not in CONFIG_MAPPING and not trust_remote_code:
        code = ", ".join(sorted({str(value) for value in raw["auto_map"].values()}))
        raise fail(
            "L108", "source", f"model_type={model_type!r} is implemented by the repository itself ({code})."
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a config class may raise anything on a value it does not expect
        raise fail("L114", "source", f"model_type={model_type!r}: {error}") from error


def config_from_dict(data: dict[str, Any]) -> PretrainedConfig:
    """A config that another rank sent."""
    return AutoConfig.for_model(**data)
