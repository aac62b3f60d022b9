"""Bytes as differences from older ones, block by block, in whichever form is smallest.

A block is compared in units of two bytes, which is one bf16 value. Changed units are named by their distances from each
other (a byte each, 255 meaning "255 further, and more follows") or by one bit per unit. Their new values are sent as
differences of the bit patterns that fit in a byte, since an optimizer step mostly moves a bf16 value to a neighbouring
one, or as they are. A block of which too much changed is sent as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_LARGE = -128  # in place of a difference that does not fit in a byte; the new value follows at the end
FORMS = ("same", "raw", "gaps", "bits")


class Damaged(ValueError):
    """An encoded block that no encoder writes."""


@dataclass(frozen=True)
class Encoded:
    """One block: its form, what its body is made of, and the body in parts that follow each other."""

    form: str
    size: int  # of the block itself
    changed: int = 0  # units
    large: int | None = None  # values that did not fit in a byte; None where all values are sent as they are
    parts: tuple[np.ndarray, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        return {"form": self.form, "size": self.size, "changed": self.changed, "large": self.large}


def encode(new: np.ndarray, old: np.ndarray | None) -> Encoded:
    """The smallest form of the bytes `new` for somebody who has the bytes `old`, or has nothing."""
    if old is None:
        return Encoded("raw", new.nbytes, parts=(new,))
    even = new.nbytes // 2 * 2
    after, before = new[:even].view(np.int16), old[:even].view(np.int16)
    differs = after != before
    positions = np.flatnonzero(differs)
    tail = () if even == new.nbytes else (new[even:],)
    if not len(positions) and (not tail or new[-1] == old[-1]):
        return Encoded("same", new.nbytes)
    gaps = np.diff(positions, prepend=0)
    num_gaps, num_bits = len(gaps) + int((gaps // 255).sum()), -(-len(differs) // 8)
    form, place_bytes = ("gaps", num_gaps) if num_gaps <= num_bits else ("bits", num_bits)
    if place_bytes + len(positions) >= new.nbytes:  # a byte for each value would be too much already
        return Encoded("raw", new.nbytes, parts=(new,))
    places = _escaped(gaps, num_gaps) if form == "gaps" else np.packbits(differs)
    values, large = _values(after[positions], before[positions])
    found = Encoded(form, new.nbytes, len(positions), large, (places, *values, *tail))
    return found if found.nbytes < new.nbytes else Encoded("raw", new.nbytes, parts=(new,))


def _escaped(gaps: np.ndarray, total: int) -> np.ndarray:
    """Gaps as bytes: 255 as often as it fits, then the rest."""
    out = np.full(total, 255, dtype=np.uint8)
    out[np.cumsum(gaps // 255 + 1) - 1] = gaps % 255
    return out


def _values(after: np.ndarray, before: np.ndarray) -> tuple[tuple[np.ndarray, ...], int | None]:
    """(parts, how many did not fit in a byte; None if all are sent as they are)."""
    moved = after - before  # wraps around, and so does the sum that undoes it
    large = (moved > 127) | (moved <= _LARGE)
    num_large = int(np.count_nonzero(large))
    if 2 * num_large >= len(after):
        return (after,), None
    small = moved.astype(np.int8)
    small[large] = _LARGE
    return (small, after[large]), num_large


def decode(described: dict[str, Any], body: np.ndarray, old: np.ndarray | None) -> np.ndarray:
    """The bytes that were encoded; may be a view of `body` or of `old`. Raises `Damaged` for a block of another make."""
    form, size, changed, large = (described.get(key) for key in ("form", "size", "changed", "large"))
    if form not in FORMS or not isinstance(size, int) or not isinstance(changed, int) or changed < 0:
        raise Damaged(f"unknown form {str(form)[:20]!r}")
    if large is not None and not (isinstance(large, int) and 0 <= large <= changed):
        raise Damaged("it has another number of large changes than it says")
    if form == "raw":
        _require(body.nbytes == size, "its length differs from what it says")
        return body
    _require(old is not None and old.nbytes == size, "it is a difference from something else")
    assert old is not None
    if form == "same":
        _require(not body.nbytes, "it says that nothing changed, and has content")
        return old
    new = old.copy()
    units, tail = new[: size // 2 * 2].view(np.int16), size % 2
    value_bytes = 2 * changed if large is None else changed + 2 * large
    at = body.nbytes - tail - value_bytes
    _require(at >= 0, "its length differs from what it says")
    positions = _positions(form, body[:at], len(units), changed)
    units[positions] = _read_values(body[at : at + value_bytes], units[positions], changed, large)
    if tail:
        new[-1] = body[-1]
    return new


def _positions(form: str, places: np.ndarray, num_units: int, changed: int) -> np.ndarray:
    if form == "bits":
        _require(len(places) == -(-num_units // 8), "its bits are not one per unit")
        positions = np.flatnonzero(np.unpackbits(places, count=num_units))
    else:
        positions = np.cumsum(places, dtype=np.int64)[places != 255]
        _require(not len(places) or places[-1] != 255, "its last position is missing")
    _require(len(positions) == changed, "it has another number of changes than it says")
    _require(not changed or positions[-1] < num_units, "it changes what lies behind its end")
    return positions


def _read_values(body: np.ndarray, before: np.ndarray, changed: int, large: int | None) -> np.ndarray:
    if large is None:
        return np.frombuffer(body.tobytes(), dtype=np.int16)
    moved = body[:changed].view(np.int8)
    values = before + moved  # wraps around
    escaped = moved == _LARGE
    _require(int(np.count_nonzero(escaped)) == large, "it has another number of large changes than it says")
    values[escaped] = np.frombuffer(body[changed:].tobytes(), dtype=np.int16)
    return values


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise Damaged(problem)
