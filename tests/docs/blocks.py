"""The code blocks of a page: how they are found, and what is done with each kind of them.

A page is a story that is told in one folder, from its first block to its last:

- python blocks run in one namespace; those that a sentence says to save, as in "Save this as `reward.py`:", are also saved
- toml blocks are recipes or parts of one, and are checked against the schema
- bash blocks are parsed, and their `shardproof` commands run as far as one process on a CPU can: `train` as a dry run

Comments that readers of the page do not see say the rest:

    <!-- ranks: 2 -->                        the page runs on so many ranks
    <!-- not run: needs a GPU -->            the next block is only parsed, for one of REASONS
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

REASONS = (
    "needs a GPU",
    "needs a vLLM server",
    "needs several machines",
    "downloads a model",
    "part of another program",
    "needs packages of its own",
)
SHOWN = ("", "text")  # what a program prints: nothing to run
RUN = ("python", "bash", "toml", "json")

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--\s*(ranks|not run):\s*(.*?)\s*-->")
_SAVED = re.compile(r"[Ss]ave\s[\w\s]*\bas\s+`([\w./-]+)`")


@dataclass(frozen=True)
class Block:
    """One code block."""

    line: int
    language: str
    code: str
    saved_as: str | None = None
    not_run: str | None = None  # why


@dataclass
class Page:
    """The blocks of a page that are not mere output, and what its comments ask for."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    ranks: int = 1


def read_page(path: Path) -> Page:
    """The blocks of a page, in their order."""
    text, page, end = path.read_text(), Page(path), 0
    for fence in _FENCE.finditer(text):
        between, end = text[end : fence.start()], fence.end()
        comments = dict(_COMMENT.findall(between))
        page.ranks = int(comments.get("ranks", page.ranks))
        if fence[2] in SHOWN:
            continue
        paragraph = re.sub(r"<!--.*?-->", "", between, flags=re.DOTALL).strip().rpartition("\n\n")[2]
        saved = _SAVED.search(paragraph)
        indent = fence[1]
        code = "".join(line.removeprefix(indent) for line in fence[3].splitlines(keepends=True))
        page.blocks.append(
            Block(
                line=text.count("\n", 0, fence.start()) + 1,
                language=fence[2],
                code=code,
                saved_as=saved[1] if saved else None,
                not_run=comments.get("not run"),
            )
        )
    return page
