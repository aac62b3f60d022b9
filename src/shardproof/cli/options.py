"""What the user asked `shardproof train` for, besides the recipe, and the exit codes it answers with."""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.errors import ConfigError, ShardproofError

UNUSABLE, STOPPED_BY_FINDING = EXPLAINED = (2, 3)  # exit codes of ranks that print their findings
_OF_THE_RECIPE = ("L101",)  # what is wrong in a recipe, though it is found where models are loaded


@dataclass(frozen=True)
class Options:
    """The options of one `shardproof train`."""

    allow: tuple[str, ...] = ()
    from_step: int | None = None
    nnodes: str = "1"
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    max_restarts: int = 0
    quiet: bool = False


def exit_code_of(error: ShardproofError) -> int:
    """2 for a recipe or data that cannot be used, 3 for a run that a finding stopped."""
    is_unusable = isinstance(error, ConfigError) or error.code in _OF_THE_RECIPE
    return UNUSABLE if is_unusable else STOPPED_BY_FINDING
