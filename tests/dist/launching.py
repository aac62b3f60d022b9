"""Programs that start ranks, each run in a process of its own: an agent takes over its process's signals."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from shardproof.dist.launch import init_distributed, shut_down
from shardproof.dist.start import Together, start_ranks


def echo(text: str) -> tuple[str, str, str]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], text


def make_groups(folder: str, text: str) -> tuple[list[int], str]:
    """The sums over three groups, made one after the other, and the text; the last group is left as it is.

    A file says what still runs when the interpreter's last exit handler does.
    """
    import torch
    import torch.distributed as dist

    atexit.register(
        _note_threads, folder, os.environ["RANK"]
    )  # handlers run in reverse: this is the last of all
    found = []
    for attempt in range(3):
        init_distributed("cpu")
        assert _threads(), "the thread that answers requests for stacks"
        value = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(value)
        found.append(int(value))
        if attempt < 2:
            shut_down()
            assert _threads() == []
    return found, text


def _note_threads(folder: str, rank: str) -> None:
    Path(folder, f"rank-{rank}").write_text(json.dumps(_threads()))


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("shardproof")]


def main() -> None:
    name, args, settings = json.loads(sys.argv[1])
    num_ranks = settings.pop("num_ranks")
    together = Together(**settings)
    found: dict[int, Any] = start_ranks(globals()[name], *args, num_ranks=num_ranks, together=together)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
