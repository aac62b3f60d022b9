"""Claims on folders as processes leave them behind."""

from __future__ import annotations

import os
from pathlib import Path

from shardproof.folder_lock import LOCK_NAME, FolderLock


def leave_claim(folder: Path) -> None:
    """Leave the claim of a process of this host that was killed."""
    lock = FolderLock(folder)
    lock.acquire("test")
    text = (folder / LOCK_NAME).read_text()
    lock.release()
    (folder / LOCK_NAME).write_text(text.replace(f"process {os.getpid()} ", "process 999999999 "))
