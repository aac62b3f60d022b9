"""What adapters to environments of other packages have in common: their splits, and how wrong options are refused."""

from __future__ import annotations

from shardproof.errors import ShardproofError, fail

_SPLITS = ("train", "evaluation")
EVALUATION_SEED = 1_000_000_000  # the first of the evaluation split; training has those below


def wrong_options(name: str, message: str, fix: str | None = None) -> ShardproofError:
    """The error for options that the environment of this name cannot take."""
    return fail("C001", "environment", f"{name}: {message}", fix=fix or "correct environment.options")


def require_split(name: str, split: str) -> None:
    """Raise C001 unless the split is one that adapters have."""
    if split not in _SPLITS:
        raise wrong_options(name, f"there is no split {split!r}: the splits are {' and '.join(_SPLITS)}.")
