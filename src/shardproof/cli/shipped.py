"""Files that belong to the package: inside it where it is installed, elsewhere in the repository in a clone."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(name: str, in_clone: str) -> Path:
    """A file or folder of the installed package, or where a clone has it; setup.py copies the one to the other."""
    inside = _PACKAGE / name
    return inside if inside.exists() else _PACKAGE.parents[1] / in_clone
