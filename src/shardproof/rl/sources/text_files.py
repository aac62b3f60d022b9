"""Rows in text files: an object per line, an array of objects, and tables of comma- or tab-separated values."""

from __future__ import annotations

import codecs
import csv
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from shardproof.errors import ShardproofError, fail
from shardproof.foreign import parse_json

Row = dict[str, Any]
Place = tuple[str, Row]  # where a row came from, in words, and the row
_MAX_CELL = 2**24  # characters of a cell; Python's own limit of 128 KiB is less than some answers have
_MAX_ARRAY = 4 * 2**30  # bytes of a file that is one array: it is read as a whole


def unusable(message: str, fix: str | None = None) -> ShardproofError:
    """The error for data that no run can use."""
    return fail("C005", "data", message, fix=fix)


def read_lines(file: IO[bytes], path: Path) -> Iterator[Place]:
    """The rows of a file with an object per line."""
    # In bytes: text mode reports an undecodable byte by its offset in a buffer, not by its line.
    for number, line in _lines(file, path):
        text = line.strip()
        if not text:
            continue
        place = f"{path}:{number}"
        if text.startswith(b"["):
            fix = "write one object per line, or name the file .json, in which an array may stand"
            raise unusable(f"{place} begins an array. Expected one object per line, not an array.", fix)
        row = parse_json(text, place, "data", code="C005")
        if not isinstance(row, dict):
            raise unusable(f"{place} is a JSON {type(row).__name__}, expected one object per line.")
        yield place, row


def read_json(file: IO[bytes], path: Path) -> Iterator[Place]:
    """The rows of a file that is an array of objects, or has an object per line."""
    head = file.read(4096)
    while head and not head.removeprefix(codecs.BOM_UTF8).strip():
        more = file.read(4096)
        if not more:
            break
        head += more
    if not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from read_lines(_after(head, file), path)  # type: ignore[arg-type]
        return
    raw = head + file.read(_MAX_ARRAY)
    if len(raw) > _MAX_ARRAY:
        raise unusable(
            f"{path} is an array of more than {_MAX_ARRAY} bytes.", "write one object per line as .jsonl"
        )
    yield from _objects(raw, path)


def _after(head: bytes, file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file of which the beginning was read."""
    parts = head.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    last = parts[-1] + file.readline()
    if last:
        lines.append(last)
    yield from lines
    yield from file


def _objects(raw: bytes, path: Path) -> Iterator[Place]:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise unusable(f"{path}:{line} is not valid JSON: {error}.") from error
    decoder = json.JSONDecoder()
    at, line, counted = text.index("[") + 1, 1, 0
    is_first = True
    while True:
        at = _skip(text, at)
        line, counted = line + text.count("\n", counted, at), at
        place = f"{path}:{line}"
        if at < len(text) and text[at] == "]" and is_first:
            break
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise unusable(f"{place} is not valid JSON: {error}.") from error
        if not isinstance(row, dict):
            raise unusable(f"{place} is a JSON {type(row).__name__}, expected an array of objects.")
        yield place, row
        is_first = False
        at = _skip(text, at)
        if at < len(text) and text[at] == ",":
            at += 1
            continue
        if at >= len(text) or text[at] != "]":
            line += text.count("\n", counted, at)
            found = repr(text[at]) if at < len(text) else "the end of the file"
            raise unusable(f"{path}:{line} is not valid JSON: expected ',' or ']', found {found}.")
        break
    rest = _skip(text, at + 1)
    if rest < len(text):
        raise unusable(f"{path} goes on after the end of its array: {text[rest : rest + 20]!r}.")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def read_table(file: IO[bytes], path: Path) -> Iterator[Place]:
    """The rows of a table with a line of column names. Every cell is text; nothing guesses what is a number."""
    csv.field_size_limit(_MAX_CELL)
    tabs = ".tsv" in path.suffixes[-2:]
    lines = (_text(line, number, path) for number, line in _lines(file, path))
    reader = csv.reader(lines, delimiter="\t" if tabs else ",", strict=True)
    columns: list[str] = []
    for place, cells in _records(reader, path):
        if not columns:
            columns = _checked_columns(cells, place)
        elif len(cells) != len(columns):
            fix = "quote cells that hold the separator, a quote or a line break"
            message = f"{place} has {len(cells)} cells; expected {len(columns)}, one for each of the columns {', '.join(columns)}."
            raise unusable(message, fix)
        else:
            yield place, dict(zip(columns, cells, strict=True))


def _records(reader: Any, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each record with the line that it begins in; blank lines are none."""
    while True:
        place = f"{path}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise unusable(
                f"{place} cannot be read: {error}.", 'close every quote; write "" for a quote in a cell'
            ) from error
        if cells:
            yield place, cells


def _checked_columns(cells: list[str], place: str) -> list[str]:
    columns = [cell.strip() for cell in cells]
    others = [mark for mark in (";", "\t", ",") if len(columns) == 1 and mark in columns[0]]
    if others:
        message = f"{place} is one column, {columns[0][:60]!r}: its cells look separated by {others[0]!r}."
        raise unusable(
            message, "separate cells by commas and name the file .csv, or by tabs and name it .tsv"
        )
    if "" in columns:
        raise unusable(
            f"{place}: column {columns.index('') + 1} has no name.", "name every column in the first line"
        )
    require_unique(columns, place)
    return columns


def require_unique(columns: Sequence[str], place: str) -> None:
    """Raise if two columns of a table have the same name: a row would have only one of them."""
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise unusable(f"{place} has the column {twice[0]!r} twice.", "give every column a name of its own")


def _lines(file: Iterable[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers, without the mark that some programs begin a file with."""
    number = 0
    try:
        for number, line in enumerate(file, 1):
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        raise unusable(f"{path}:{number + 1} cannot be read: {error}.") from error


def _text(line: bytes, number: int, path: Path) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        message = f"{path}:{number} is not UTF-8: {error.reason} at byte {error.start + 1} of the line."
        raise unusable(message, "save the file as UTF-8") from error
