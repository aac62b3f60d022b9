"""Untrusted files, opened read-only: regular files of bounded size inside their folder."""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from shardproof.errors import fail

MAX_TEXT_BYTES = 256 * 2**20


def open_foreign(
    path: Path,
    stage: str,
    *,
    code: str = "L103",
    inside: Path | None = None,
    max_bytes: int | None = None,
    fix: str | None = None,
) -> BinaryIO:
    """A regular file, open for reading; anything else raises `code` with the file's name, and `fix` or the code's own.

    With `inside`, the file must lie in that folder once links are followed (see `is_inside`). FIFOs and devices are not
    waited for.
    """
    if inside is not None and not is_inside(path, inside):
        raise fail("L110", stage, f"{path.name} links to a place outside {inside}.")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise fail(code, stage, f"{path} cannot be opened: {reason}.", fix=fix) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise fail(code, stage, f"{path} is not a regular file.", fix=fix)
    if max_bytes is not None and found.st_size > max_bytes:
        os.close(descriptor)
        raise fail(code, stage, f"{path} has {found.st_size} bytes; the limit is {max_bytes}.", fix=fix)
    return os.fdopen(descriptor, "rb")


def read_foreign(
    path: Path,
    stage: str,
    *,
    code: str = "L103",
    inside: Path | None = None,
    max_bytes: int = MAX_TEXT_BYTES,
    fix: str | None = None,
) -> bytes:
    """The whole content of a foreign file."""
    with open_foreign(path, stage, code=code, inside=inside, max_bytes=max_bytes, fix=fix) as file:
        try:
            return file.read(max_bytes + 1)
        except OSError as error:
            raise fail(code, stage, f"{path} cannot be read: {error.strerror}.", fix=fix) from error


def read_json(
    path: Path, stage: str, *, code: str = "L103", inside: Path | None = None, max_bytes: int = MAX_TEXT_BYTES
) -> Any:
    """The JSON value in a foreign file. Text that is not UTF-8, not JSON or nested too deeply raises `code`."""
    raw = read_foreign(path, stage, code=code, inside=inside, max_bytes=max_bytes)
    return parse_json(raw, path.name, stage, code=code)


def parse_json(raw: bytes, label: str, stage: str, *, code: str = "L103", unique_keys: bool = False) -> Any:
    """The JSON value of foreign bytes. With `unique_keys` an object that has a key twice raises as well."""
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode()
        return json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except (ValueError, RecursionError) as error:  # both JSON's and UTF-8's errors are ValueErrors
        raise fail(code, stage, f"{label} is not valid JSON: {error}.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {max(keys, key=keys.count)!r} twice")
    return found


def without_nulls(given: Mapping[str, Any], keep: Collection[str] = ()) -> dict[str, Any]:
    """An object without the keys that have no value: a table gives every row the keys that any row has.

    Keys to `keep` may have none.
    """
    return {key: value for key, value in given.items() if value is not None or key in keep}


def without_inner_nulls(given: Any, keep: Collection[str] = ()) -> Any:
    """The same of an object and of all that lie in it."""
    if isinstance(given, Mapping):
        found = {key: without_inner_nulls(value, keep) for key, value in given.items()}
        return without_nulls(found, keep)
    if isinstance(given, list):
        return [without_inner_nulls(each, keep) for each in given]
    return given


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file lies in a folder once links are followed.

    A hub cache keeps a model's files in `blobs` and links to them from `snapshots/<commit>`; these links are inside.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    return any(real.is_relative_to(place) for place in allowed)
