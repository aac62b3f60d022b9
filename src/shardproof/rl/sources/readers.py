"""Rows as they lie in files and on the hub, each with its place in words."""

from __future__ import annotations

import contextlib
import glob
import gzip
import itertools
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from shardproof.errors import did_you_mean
from shardproof.foreign import open_foreign
from shardproof.rl.sources.text_files import (
    Place,
    read_json,
    read_lines,
    read_table,
    require_unique,
    unusable,
)

T = TypeVar("T")

# hf:name[:config][:split]; a split may be a slice with a colon of its own, as in train[:100].
_HUB_SOURCE = re.compile(r"hf:([^:]+)(?::([^:\[]+)(?=:))?(?::([^:\[]+(?:\[.*\])?))?")
_KNOWN = ".jsonl, .json, .csv, .tsv or .parquet"
_GLOB = re.compile(r"[*?\[]")


def read_rows(source: str) -> Iterable[Place]:
    """Each row of files or of a hub data set with its place; what cannot be read raises C005 with the place."""
    if source.startswith("hf:"):
        return _read_hub(source)
    return itertools.chain.from_iterable(map(_read_file, files_of(source)))


def files_of(source: str) -> list[Path]:
    """The files that a local source names, in the order of their names: itself, a folder's, or those of a pattern."""
    if not source.strip():
        raise unusable(f"{source!r} names no file.", "name a file, a folder or a data set")
    path = Path(source)
    # Of os.path, which says False of what can be no path or may not be looked at; pathlib's raise.
    if os.path.isdir(path):
        found = sorted(each for each in path.iterdir() if _reader_of(each) is not None and each.is_file())
        if not found:
            raise unusable(f"{path} is a folder without a {_KNOWN} file.")
        return found
    if not os.path.exists(path) and _GLOB.search(source):
        found = sorted(Path(each) for each in glob.glob(source, recursive=True) if os.path.isfile(each))
        if not found:
            raise unusable(f"no file matches {source!r}.", "correct the pattern; quote it in a shell")
        return found
    _require_file(path)
    return [path]


def _read_file(path: Path) -> Iterator[Place]:
    reader = _reader_of(path)
    if reader is None:
        message = f"{path} is not a {_KNOWN} file, and not hf:name[:config][:split] or environment:SPLIT."
        raise unusable(message, fix="convert it to JSONL, one object per line; see docs/own-data.md")
    if path.suffix == ".gz":
        with open_foreign(path, "data", code="C005") as packed, gzip.GzipFile(fileobj=packed) as file:
            yield from _unpacked(reader(cast(IO[bytes], file), path), path)
        return
    with open_foreign(path, "data", code="C005") as file:
        yield from reader(file, path)


def _unpacked(rows: Iterator[Place], path: Path) -> Iterator[Place]:
    try:
        yield from rows
    except (OSError, EOFError, zlib.error) as error:
        raise unusable(f"{path} cannot be unpacked: {error}.") from error


def _reader_of(path: Path) -> Callable[[IO[bytes], Path], Iterator[Place]] | None:
    suffixes = path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:]
    if path.name.startswith("."):
        return None
    readers: dict[str, Callable[[IO[bytes], Path], Iterator[Place]]] = {
        ".jsonl": read_lines,
        ".json": read_json,
        ".csv": read_table,
        ".tsv": read_table,
    }
    if suffixes == [".parquet"]:
        return _read_parquet
    return readers.get(suffixes[0]) if suffixes else None


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


def _read_parquet(file: IO[bytes], path: Path) -> Iterator[Place]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        fix = "pip install pyarrow, or convert the file to .jsonl"
        raise unusable(f"{path}: reading Parquet needs pyarrow, which is not installed.", fix) from error
    try:
        # In this thread alone: threads of Arrow's own that still know the file when Python ends may end the process first.
        table = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
        names, batches = table.schema_arrow.names, table.iter_batches(use_threads=False)
    except Exception as error:  # of Arrow's own types
        raise unusable(f"{path} cannot be read as Parquet: {type(error).__name__}: {error}.") from error
    require_unique(names, str(path))
    yield from _numbered((row for batch in batches for row in batch.to_pylist()), f"{path}, row ")


def _read_hub(source: str) -> Iterator[Place]:
    parts = _HUB_SOURCE.fullmatch(source)
    if parts is None:
        raise unusable(f"{source!r} is not hf:name[:config][:split], such as hf:openai/gsm8k:main:train.")
    try:
        import datasets
    except ImportError as error:
        fix = "pip install datasets, or save the rows as .jsonl"
        raise unusable(
            f"{source}: hub data sets need the package datasets, which is not installed.", fix
        ) from error
    try:
        dataset = _load_hub(datasets.load_dataset, parts[1], parts[2], parts[3])
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


def _load_hub(load: Callable[..., Any], name: str, config: str | None, split: str | None) -> Any:
    """A data set's rows. One part after the name is a split, or a config if there is no such split."""
    try:
        return load(name, config, split=split or "train")
    except ValueError:
        if config is not None or split is None or "[" in split:
            raise
        with contextlib.suppress(ValueError):
            return load(name, split, split="train")
        raise


def _require_file(path: Path) -> None:
    """Raise with the nearest name if there is no such file; what cannot be read is found when it is opened."""
    if os.path.exists(path):
        return
    siblings: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        siblings = os.listdir(path.parent)
    fix = "correct the path: it is looked up in the recipe's folder first, then in the working directory"
    raise unusable(f"{path} does not exist.{did_you_mean(path.name, siblings)}", fix)
