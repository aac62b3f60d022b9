"""The folder that a model or an adapter is saved into: who owns it, and how its old content is replaced."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from shardproof.errors import ShardproofError, fail
from shardproof.files import PARTIAL, REMOVED, REPLACED, current_folder, replace_folder, sync_folder
from shardproof.folder_lock import LOCK_NAME, FolderLock
from shardproof.foreign import open_foreign, parse_json
from shardproof.weights.reader import INDEX_NAME, read_header
from shardproof.weights.writer import WRITER

STAGE = "save_pretrained"
ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CONFIG_NAME = "config.json"
RECEIPT_NAME = "receipt.json"  # of the weights beside it, and of no others
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


class ModelFolder:
    """The target of a save, and the hidden folder that it is written in until it is complete.

    A folder that holds only the model is replaced atomically. Into a folder with other files (an adapter into its base's),
    or one that cannot be replaced, the files are moved one by one, their description last.
    """

    def __init__(self, folder: Path, adapter_only: bool, nonce: str):
        self.target = Path(os.path.realpath(folder))
        self.adapter_only = adapter_only
        self._description = ADAPTER_CONFIG if adapter_only else CONFIG_NAME
        self._lock: FolderLock | None = None
        self.is_replaced = self._can_replace()
        place = self.target.parent if self.is_replaced else self.target
        self.partial = place / f"{PARTIAL}{self.target.name}-{nonce}"

    def _entries(self) -> list[Path]:
        if not self.target.is_dir():
            return []
        hidden = (PARTIAL, REMOVED, LOCK_NAME)
        return [path for path in sorted(self.target.iterdir()) if not path.name.startswith(hidden)]

    def _can_replace(self) -> bool:
        """Whether the whole folder may be exchanged: it is new, or all that is in it are files beside a model of ours."""
        parent = self.target.parent
        if os.path.ismount(self.target) or (parent.is_dir() and not os.access(parent, os.W_OK)):
            return False
        if Path(os.path.realpath(os.getcwd())).is_relative_to(self.target):
            return False  # this process would be left in a folder that is gone
        if not self.adapter_only:
            return True
        return not any(
            path.is_dir() or _is_weights(path) for path in self._entries() if path.name != ADAPTER_NAME
        )

    def check(self, source: Path | None, written: set[str]) -> None:
        """Raise E408 if something would be lost that no save wrote. Nothing has been written yet."""
        if self.target.exists() and not self.target.is_dir():
            raise fail("E408", STAGE, f"{self.target} is not a folder.")
        if not self.adapter_only and source is not None and Path(os.path.realpath(source)) == self.target:
            raise self._refused("is where the model was loaded from, and its files are in use")
        entries = self._entries()
        weights = [path for path in entries if _is_weights(path)]
        for path in weights:
            if (not self.adapter_only or path.name == ADAPTER_NAME) and not is_ours(path):
                raise self._refused(f"holds {path.name}, which shardproof did not write")
        for path in entries:
            if path.is_dir() and not path.is_symlink() and not self.adapter_only:
                raise self._refused(f"holds the folder {path.name}, which is not part of a model")
        mine = [ADAPTER_NAME] if self.adapter_only else [path.name for path in weights]
        is_ours_already = any((self.target / name).exists() for name in mine)
        clashes = sorted(path.name for path in entries if path.name in written and not _is_weights(path))
        if clashes and not is_ours_already:
            raise self._refused(f"holds {clashes[0]}, which shardproof did not write")

    def _refused(self, why: str) -> ShardproofError:
        return fail("E408", STAGE, f"{self.target} {why}.", fix="save into a new or empty folder")

    def begin(self) -> None:
        """Make the hidden folder, and remove those that interrupted saves left. Rank 0 only."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        aside = current_folder(self.target)
        if aside != self.target:
            os.rename(aside, self.target)
        if not self.is_replaced:
            self.target.mkdir(exist_ok=True)
        place, name = self.partial.parent, self.target.name
        for old in _leftovers(place, f"{PARTIAL}{name}", 1):
            _remove_if_dead(old)
        for hidden, nonces in ((PARTIAL, 2), (REPLACED, 1)):
            for old in _leftovers(place, f"{REMOVED}{hidden.lstrip('.')}{name}", nonces):
                shutil.rmtree(old, ignore_errors=True)
        self.partial.mkdir()
        if self.target.is_dir():
            shutil.copymode(self.target, self.partial)
        self._lock = FolderLock(self.partial)
        self._lock.acquire(STAGE)

    def publish(self, files: set[str]) -> None:
        """Make the folder hold the new files, of which `files` are the weights, instead of the old. Rank 0 only."""
        if self.is_replaced:
            self._carry_over(files)
            _sync_all(self.partial)
            self._unlock()
            replace_folder(self.partial, self.target)
            return
        self._unlock()
        _sync_all(self.partial)
        new = sorted(self.partial.iterdir(), key=lambda path: (path.name == self._description, path.name))
        if len(new) > 2 or _differ(self.partial / self._description, self.target / self._description):
            # Without it a mixture of old and new files does not load as a model.
            (self.target / self._description).unlink(missing_ok=True)
        for path in self._entries():
            if self._is_stale(path, files):
                path.unlink()
        for path in new:
            os.replace(path, self.target / path.name)
        sync_folder(self.target)
        self.partial.rmdir()

    def _is_stale(self, path: Path, files: set[str]) -> bool:
        """Whether a file of an earlier save has no place beside the new ones."""
        if self.adapter_only:
            return self.is_replaced and path.name == RECEIPT_NAME
        if path.name in files:
            return False
        return _is_weights(path) or path.name in (INDEX_NAME, ADAPTER_CONFIG, RECEIPT_NAME)

    def _carry_over(self, files: set[str]) -> None:
        """Link the folder's other files into the new one."""
        for path in self._entries():
            there = self.partial / path.name
            if not there.exists() and not self._is_stale(path, files):
                try:
                    os.link(path, there, follow_symlinks=False)
                except OSError:  # the file system has no hard links
                    shutil.copy2(path, there, follow_symlinks=False)

    def _unlock(self) -> None:
        if self._lock is not None:
            (self.partial / LOCK_NAME).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    def abort(self) -> None:
        """Remove what this save has written."""
        self._unlock()
        shutil.rmtree(self.partial, ignore_errors=True)


def is_ours(path: Path) -> bool:
    """Whether a safetensors file says in its header that a save of this package wrote it."""
    if path.suffix != ".safetensors":
        return False
    with open_foreign(path, STAGE, code="E408") as file:
        try:
            header = parse_json(read_header(file, path.name), path.name, STAGE)
        except ShardproofError:
            return False
    noted = header.get("__metadata__") if isinstance(header, dict) else None
    return isinstance(noted, dict) and WRITER.items() <= noted.items()


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS and not path.is_dir()


def _differ(one: Path, other: Path) -> bool:
    return not other.exists() or one.read_bytes() != other.read_bytes()


def _leftovers(place: Path, name: str, nonces: int) -> list[Path]:
    """What interrupted saves of this folder left: `name` with `nonces` random endings."""
    pattern = re.compile(re.escape(name) + "-[0-9a-f]{8}" * nonces)
    return [path for path in place.iterdir() if pattern.fullmatch(path.name)]


def _remove_if_dead(folder: Path) -> None:
    """Remove the hidden folder of a save whose process has ended, and with it its lock."""
    lock = FolderLock(folder)
    try:
        lock.acquire(STAGE)
    except (ShardproofError, OSError):
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()


def _sync_all(folder: Path) -> None:
    """Put everything in a folder on disk before it gets its name."""
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    sync_folder(folder)
