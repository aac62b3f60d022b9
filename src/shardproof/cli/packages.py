"""The packages that the command line needs, which `pip install shardproof` alone does not bring."""

from __future__ import annotations

import importlib.util

_NEEDED = ("typer", "rich", "pydantic")


def require_packages() -> None:
    """End with a clear message where one is missing."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise SystemExit(
                f"The shardproof command needs the package {name}, which is not installed.\n"
                "Fix: pip install 'shardproof[all]'"
            )
