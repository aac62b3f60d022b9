"""Rows as they lie in files and on the hub, each with its place in words."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from shardproof.errors import ShardproofError, did_you_mean, fail
from shardproof.foreign import open_foreign, parse_json

T = TypeVar("T")
Row = dict[str, Any]
Place = tuple[str, Row]  # where a row came from, in words, and the row

# hf:name[:config][:split]; a split may be a slice with a colon of its own, as in train[:100].
_HUB_SOURCE = re.compile(r"hf:([^:]+)(?::([^:\[]+)(?=:))?(?::([^:\[]+(?:\[.*\])?))?")


def read_rows(source: str) -> Iterable[Place]:
    """Each row of a file or a hub data set with its place; what cannot be read raises C005 with the place."""
    if source.startswith("hf:"):
        return _read_hub(source)
    path = Path(source)
    _require_file(path)
    if path.suffix in (".jsonl", ".json"):
        return _read_lines(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    message = f"{path} is not a .jsonl, .json or .parquet file, and not hf:name[:config][:split] or environment:SPLIT."
    raise unusable(message, fix="convert it to JSONL, one object per line; see docs/own-data.md")


def _read_lines(path: Path) -> Iterator[Place]:
    # In bytes: text mode reports an undecodable byte by its offset in a buffer, not by its line.
    with open_foreign(path, "data", code="C005") as file:
        for place, line in _numbered(file, f"{path}:"):
            text = line.removeprefix(codecs.BOM_UTF8).strip()
            if not text:
                continue
            if text.startswith(b"["):
                raise unusable(f"{place} begins an array. Expected one object per line, not an array.")
            row = parse_json(text, place, "data", code="C005")
            if not isinstance(row, dict):
                raise unusable(f"{place} is a JSON {type(row).__name__}, expected one object per line.")
            yield place, row


def _numbered(items: Iterable[T], prefix: str) -> Iterator[tuple[str, T]]:
    """Each item with its place; what the reader raises, of its own types or others', becomes a finding with the place."""
    iterator = iter(items)
    for number in itertools.count(1):
        place = f"{prefix}{number}"
        try:
            item = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise unusable(f"{place} cannot be read: {type(error).__name__}: {error}.") from error
        yield place, item


def _read_parquet(path: Path) -> Iterator[Place]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        fix = "pip install pyarrow, or convert the file to .jsonl"
        raise unusable(f"{path}: reading Parquet needs pyarrow, which is not installed.", fix) from error
    with open_foreign(path, "data", code="C005") as file:
        try:
            rows = pyarrow.parquet.read_table(file).to_pylist()
        except Exception as error:  # Arrow's own types, and Python's for values that it has no room for
            raise unusable(f"{path} cannot be read as Parquet: {type(error).__name__}: {error}.") from error
    yield from _numbered(rows, f"{path}, row ")


def _read_hub(source: str) -> Iterator[Place]:
    parts = _HUB_SOURCE.fullmatch(source)
    if parts is None:
        raise unusable(f"{source!r} is not hf:name[:config][:split], such as hf:openai/gsm8k:main:train.")
    name, config, split = parts[1], parts[2], parts[3] or "train"
    try:
        import datasets
    except ImportError as error:
        fix = "pip install datasets, or save the rows as .jsonl"
        raise unusable(
            f"{source}: hub data sets need the package datasets, which is not installed.", fix
        ) from error
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except Exception as error:
        # The library raises dozens of types, its own and those of its storage; offline is one of them.
        fix = "check the name, the config and the split, and that this machine reaches the hub or has it in its cache"
        raise unusable(f"{source} cannot be loaded: {type(error).__name__}: {error}", fix) from error
    for place, row in _numbered(dataset, f"{source}, row "):
        try:
            pickle.dumps(row)
        except Exception as error:
            raise unusable(f"{place} cannot be sent to a reward: {type(error).__name__}: {error}.") from error
        yield place, dict(row)


def _require_file(path: Path) -> None:
    """Raise with the nearest name if there is no such file; what cannot be read is found when it is opened."""
    # Of os.path, which says False of what can be no path or may not be looked at; pathlib's raise.
    if os.path.isdir(path):
        raise unusable(f"{path} is a folder, expected a file.")
    if os.path.exists(path):
        return
    siblings: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        siblings = os.listdir(path.parent)
    fix = "correct the path: it is looked up in the recipe's folder first, then in the working directory"
    raise unusable(f"{path} does not exist.{did_you_mean(path.name, siblings)}", fix)


def unusable(message: str, fix: str | None = None) -> ShardproofError:
    """The error for data that no run can use."""
    return fail("C005", "data", message, fix=fix)
