"""A run's claim on its folder: who sees it, who holds it, and what the earlier parts of the run left in it.

Hosts need not share the folder. Then each host has one under the same setting, locked by one of its ranks, with the
checkpoint files of its own ranks; everything else is in the folder of rank 0. Hosts may come in another order when a run
is resumed, so rank 0 may have to fetch the history from another host first.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardproof.checkpoints.folders import step_of, sums_of
from shardproof.checkpoints.spread import Missing, Stock, find_missing, put_aside, take_stock
from shardproof.config.schema import Recipe
from shardproof.dist.collectives import together
from shardproof.dist.hosts import hosts
from shardproof.dist.shared_folder import on_host
from shardproof.dist.sharing import Places, find_places, one_place
from shardproof.dist.transfer import Transfer, transfer_files
from shardproof.errors import ShardproofError, error_for, fail
from shardproof.folder_lock import LOCK_NAME, FolderLock
from shardproof.foreign import read_json
from shardproof.report.read import EARLIER_NAME, FACTS_NAME
from shardproof.rl.loggers import LINES
from shardproof.rl.place import CHECKPOINTS, CRITIC, SETTINGS_NAME, State, check_own, check_state, read_state
from shardproof.rl.same_run import Resume
from shardproof.rl.trackers import STATE_NAME as TRACKERS_NAME

logger = logging.getLogger(__name__)

INCOMPLETE = "incomplete-"  # checkpoints that a save on several hosts did not finish
_HISTORY = (SETTINGS_NAME, FACTS_NAME, TRACKERS_NAME, EARLIER_NAME, *LINES)


class Claim:
    """This rank's part in the run's claim on its folder."""

    def __init__(self, recipe: Recipe, resume: Resume):
        self._recipe, self._resume = recipe, resume
        self.path = Path(recipe.output.folder)
        self.places = Places((0,))
        self.state = State()  # on rank 0
        self.interrupted: list[str] = []  # names of checkpoints that are now put aside
        self._lock: FolderLock | None = None

    @property
    def is_held(self) -> bool:
        """Whether this rank has locked a folder."""
        return self._lock is not None

    @property
    def is_lost(self) -> bool:
        """Whether another process has the folder that this rank locked, or it is gone."""
        return self._lock is not None and self._lock.is_lost()

    def take(self) -> None:
        """Lock the folder, on each host that has one of its own, and read what it holds.

        Raises C006 or C007 if this recipe may not run there, E407 if its newest checkpoint is not whole because a host
        is missing. Collective: every rank.
        """
        if hosts().num > 1:
            with together("output"):
                if dist.get_rank() == 0:
                    self._lock_folder()
            self.places = find_places(self.path, "output")
        else:
            self.places = one_place()
        if self.places.are_shared:
            with together("output"):
                if dist.get_rank() == 0:
                    self._lock_folder()
                    self._read(self._sort_out(take_stock(self._root, self.places, "output")))
            return
        self._say_who_keeps_what()
        with together("output"):
            if self.places.is_leader:
                self._lock_folder()
        self._fetch_history()
        stock = self._sort_out(take_stock(self._root, self.places, "output"))
        with together("output"):
            for name in self.interrupted if self.places.is_leader else ():
                put_aside(self._root, name, INCOMPLETE)
            if dist.get_rank() == 0:
                self._read(stock)

    def release(self) -> None:
        """Give the folder up."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def _root(self) -> Path:
        return self.path / CHECKPOINTS

    def _lock_folder(self) -> None:
        """Check that the folder on this host is the run's, or may be, and lock it."""
        if self._lock is not None:
            return
        lock = FolderLock(self.path)
        try:
            check_own(self._recipe, self._resume)
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire("output")
            self._lock = lock
            check_own(self._recipe, self._resume)  # until now another run may have been at work here
            self._end_saves()
        except ShardproofError as error:
            if not on_host():
                raise
            named = [replace(found, message=f"{on_host()}{found.message}") for found in error.findings]
            raise error_for(named) from error
        except OSError as error:
            message = f"{on_host()}{self.path} cannot be written: {error.strerror or error}."
            raise fail("C007", "output", message, fix="use an output.folder that you can write to") from error

    def _end_saves(self) -> None:
        """Take a save's claim from an earlier part of the run, so that it publishes nothing if it goes on later."""
        for name in (CHECKPOINTS, CRITIC):
            path = self.path / name / LOCK_NAME
            if path.is_file() and path.stat().st_size:
                lock = FolderLock(path.parent)
                lock.acquire("output")
                lock.release()

    def _read(self, stock: Stock) -> None:
        """Read what the run has come to, and check that it may go on. Rank 0 only."""
        steps = tuple(step_of(Path(name)) for name in stock.complete)
        self.state = replace(read_state(self.path), steps=steps)
        check_state(self.path, self.state, self._resume)

    def _sort_out(self, stock: Stock) -> Stock:
        """Note interrupted saves; raise if the checkpoint to go on from lacks files. Collective, unless all share one."""
        asked = self._resume.from_step
        complete = set(stock.complete)
        for name in reversed(stock.names):
            if asked == 0 or (asked is None and name in complete):
                break
            if name in complete or (asked is not None and step_of(Path(name)) != asked):
                continue
            missing: Missing = find_missing(self._root, name, stock, self.places, "output")
            if asked is None and missing.is_interrupted:
                self.interrupted.append(name)
                continue
            raise missing.error("output", stock.complete)
        return stock

    def _say_who_keeps_what(self) -> None:
        first, *others = self.places.names
        do = "do" if len(others) > 1 or "," in others[0] else "does"
        message = (
            "output.folder is not shared: %s %s not see the folder of host %s. Each host keeps the checkpoint files of "
            "its own ranks, host %s everything else"
        )
        who = f"host{'s' * (do == 'do')} {', '.join(others)}"
        logger.info(message, who, do, first, first)

    def _fetch_history(self) -> None:
        """Bring lines and settings of the run to rank 0 from the host that had it last. Collective: every rank."""
        with together("output") as told:
            if self.places.is_leader:
                told.mine = [_started(self.path), read_state(self.path).last_step, _history_of(self.path)]
        rows: list[Any] = self.places.of_leaders(told.rows)
        newest = [(started, last_step) for started, last_step, _ in rows]
        source = newest.index(max(newest))
        if source == 0:
            return
        logger.info("fetching the run's metrics and settings from host %s ...", self.places.names[source])
        rank = self.places.leader_of(source)
        transfers = [Transfer(name, size, crc, rank, 0) for name, size, crc in rows[source][2]]
        transfer_files(transfers, lambda name: self.path / name, "output")


def _started(folder: Path) -> str:
    """When the last part of a run that had its rank 0 here was started; "" if there was none."""
    try:
        found = read_json(folder / FACTS_NAME, "output", code="C006")
    except (ShardproofError, OSError):  # a run can go on without it
        return ""
    return str(found.get("started", "")) if isinstance(found, dict) else ""


def _history_of(folder: Path) -> list[tuple[str, int, int]]:
    """The files that tell what a run has come to, with their sizes and checksums."""
    lines = [Path(name).with_suffix(".superseded.jsonl").name for name in LINES]
    return sums_of(folder, {name for name in (*_HISTORY, *lines) if (folder / name).is_file()})
