"""`receipt.json` beside a saved model: the digest of every tensor, so that whoever gets the folder can check it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardproof.errors import fail
from shardproof.export.manifest import ExportReceipt, Manifest
from shardproof.files import write_atomic
from shardproof.findings import Finding
from shardproof.foreign import read_json
from shardproof.weights.model_folder import RECEIPT_NAME
from shardproof.weights.reader import DTYPES, Checkpoint, open_checkpoint
from shardproof.weights.writer import TensorMeta

_FORMAT = 1
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_STAGE = "verify"
_FIX = "copy or download the folder again; what it holds is not what was saved"
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}


def write_receipt(folder: Path, receipt: ExportReceipt) -> None:
    """Write what a save sent into the folder that it wrote."""
    manifest = receipt.manifest
    tensors = [
        {
            "name": meta.name,
            "dtype": str(meta.dtype),
            "shape": list(meta.shape),
            "digest": str(manifest.digests[meta.name]),  # more digits than JSON's numbers hold everywhere
        }
        for meta in manifest.tensors
    ]
    content = {"format": _FORMAT, "version": receipt.version, "digest": receipt.digest, "tensors": tensors}
    write_atomic(folder / RECEIPT_NAME, json.dumps(content, indent=1) + "\n")


def verify_pretrained(folder: str | os.PathLike[str], digest: str | None = None) -> list[Finding]:
    """A finding for each tensor of a saved model or adapter that differs from its `receipt.json`; empty if none does.

    The receipt in the folder reveals damage. To detect that folder and receipt were both replaced, pass the `digest`
    from the run's `events.jsonl`, report or model card; its first 16 characters are enough.
    """
    place = Path(folder)
    manifest, total = _read(place)
    findings = []
    if manifest.total != total:
        findings.append(_finding(f"{RECEIPT_NAME} is damaged: its tensors do not add up to its own digest."))
    if digest is not None and (len(digest) < 16 or not manifest.total.startswith(digest.lower())):
        message = (
            f"{RECEIPT_NAME} belongs to another model: its digest is {manifest.total}, expected {digest}."
        )
        findings.append(_finding(message))
    checkpoint = open_checkpoint(place)
    changed = manifest.compare(_tensors(checkpoint), str(place), sent=RECEIPT_NAME)
    findings += [replace(finding, fix=_FIX) for finding in changed]
    # Without an index an engine may load every weight file that it finds.
    others = (path.name for path in place.iterdir() if path.suffix in _WEIGHTS)
    return findings + [
        _finding(f"{name} was not saved with the model.")
        for name in sorted(others)
        if name not in checkpoint.headers
    ]


def read_digest(folder: Path) -> str:
    """The digest that a folder's receipt states."""
    return _read(folder)[0].total


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for name in checkpoint.tensors:
        yield name, checkpoint.whole(name)


def _read(folder: Path) -> tuple[Manifest, str]:
    path = folder / RECEIPT_NAME
    if not path.is_file():
        fix = "pass a model or adapter folder that `shardproof train` wrote"
        inside = folder / "model"
        if (inside / RECEIPT_NAME).is_file():
            fix = f"pass {inside}"
        problem = f"holds no {RECEIPT_NAME}" if folder.is_dir() else "is not a folder"
        raise fail("C001", _STAGE, f"{folder} {problem}.", fix=fix)
    found: Any = read_json(path, _STAGE, code="L103")
    try:
        rows = [
            (TensorMeta(row["name"], _DTYPES[row["dtype"]], tuple(row["shape"])), int(row["digest"]))
            for row in found["tensors"]
        ]
        manifest = Manifest(
            found["version"], tuple(meta for meta, _ in rows), {m.name: value for m, value in rows}
        )
        return manifest, str(found["digest"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise fail("L103", _STAGE, f"{path} is not a receipt: {error!r}.") from error


def _finding(message: str) -> Finding:
    return Finding("E404", _STAGE, message, fix=_FIX)
