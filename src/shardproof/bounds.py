"""Numbers and their bounds, compared in one place: NaN is within no bound."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

from shardproof.errors import fail

# With the largest weight, totals are still finite in float32, and so are the squares that a deviation is made of.
MAX_REWARD, MAX_WEIGHT = 1e12, 1e6


def within(value: float, limit: float) -> bool:
    """Whether `value` is at most `limit`. NaN is not, on either side."""
    return value <= limit


def largest(values: Iterable[float]) -> float:
    """The largest value, or NaN if one of them is NaN; 0.0 for none. `max` would lose a NaN that is not the first."""
    found = [float(value) for value in values]
    if any(math.isnan(value) for value in found):
        return math.nan
    return max(found, default=0.0)


def require_number(
    stage: str,
    key: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> float:
    """`value` if it is finite and within its bounds, else a ConfigError that names `key` and the bounds."""
    if not isinstance(value, Real):
        raise fail("C001", stage, f"{key}={value!r} is not a number.", fix="pass a number")
    bounds = [
        (f"above {above}", above is None or value > above),
        (f"at least {at_least}", at_least is None or value >= at_least),
        (f"at most {at_most}", at_most is None or value <= at_most),
        (f"below {below}", below is None or value < below),
    ]
    # An integer may be too large for a float, and is finite all the same.
    if (isinstance(value, int) or math.isfinite(value)) and all(holds for _, holds in bounds):
        return value
    given = (above, at_least, at_most, below)
    asked = [text for (text, _), bound in zip(bounds, given, strict=True) if bound is not None]
    message = f"{key}={value} must be a finite number{' ' * bool(asked)}{' and '.join(asked)}."
    raise fail("C001", stage, message, fix="pass a number within these bounds")
