"""What the user asked `shardproof train` for, besides the recipe, and the exit codes it answers with."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardproof.errors import ConfigError, ShardproofError

if TYPE_CHECKING:
    from shardproof.dist.start import Together

logger = logging.getLogger(__name__)

UNUSABLE, STOPPED_BY_FINDING = 2, 3  # exit codes of ranks that print their findings
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
    on: str | None = None  # "ray", or this machine
    local_addr: str | None = None
    lost_after_s: float = 30.0
    host_wait_s: float = 30.0
    rdzv_timeout_s: float = 600.0

    @property
    def together(self) -> Together:
        """How this host finds the others."""
        from shardproof.dist.start import Together

        return Together(
            self.nnodes,
            self.rdzv_endpoint,
            self.rdzv_id,
            self.local_addr,
            self.max_restarts,
            self.lost_after_s,
            self.host_wait_s,
            self.rdzv_timeout_s,
        )


def with_scheduler(options: Options, nnodes: str | None) -> Options:
    """The options, completed by what the scheduler's variables say where the user says nothing."""
    from shardproof.dist.schedulers import find_places, is_rank

    if nnodes == "1" or is_rank() or options.on is not None:
        return replace(options, nnodes=nnodes or "1")
    places = find_places(os.environ)
    if places.warning and nnodes is None:
        logger.warning("%s", places.warning)
    asked, endpoint = nnodes or places.nnodes or "1", options.rdzv_endpoint or places.endpoint
    if places.said_by and asked != "1":
        logger.info("%s: this run has %s hosts, which meet at %s", places.said_by, asked, endpoint)
    return replace(options, nnodes=asked, rdzv_endpoint=endpoint)


def exit_code_of(error: ShardproofError) -> int:
    """2 for a recipe or data that cannot be used, 3 for a run that a finding stopped."""
    is_unusable = isinstance(error, ConfigError) or error.code in _OF_THE_RECIPE
    return UNUSABLE if is_unusable else STOPPED_BY_FINDING
