"""`shardproof explain CODE`: what the code at the start of a message means, and what to do about it."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from shardproof.cli.shipped import shipped
from shardproof.errors import did_you_mean
from shardproof.findings import CODES


def explain(
    code: Annotated[str, typer.Argument(help="the code that a message begins with, such as S207")],
) -> None:
    """Explain the code of a message: what happened, usual causes, and what to do."""
    wanted = code.strip().rstrip(":").upper()
    if wanted not in CODES:
        hint = did_you_mean(wanted, CODES)
        typer.echo(f"{code!r} is not a code of shardproof; codes look like S207.{hint}", err=True)
        raise SystemExit(2)
    typer.echo(section_of(shipped("faults.md", "docs/faults.md").read_text(encoding="utf-8"), wanted))


def section_of(page: str, code: str) -> str:
    """The section of a code in the page on faults, without its anchors."""
    section = page.split(f"\n## {code}:", 1)[1].split("\n## ", 1)[0]
    return f"{code}:" + re.sub(r"<a id=.*?></a>", "", section).rstrip()
