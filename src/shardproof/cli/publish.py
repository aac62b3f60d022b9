"""`shardproof verify MODEL` and `shardproof push RUN`: a finished model, checked against its receipt or uploaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shardproof.cli.options import STOPPED_BY_FINDING, exit_code_of
from shardproof.errors import ShardproofError


def verify(
    model: Annotated[str, typer.Argument(help="a model or adapter folder with a receipt.json")],
    digest: Annotated[
        str | None,
        typer.Option(help="the digest from the run or the model card; its first 16 characters are enough"),
    ] = None,
) -> None:
    """Compare the weights in a folder with the receipt of the run that wrote them."""
    from shardproof.export.receipts import read_digest, verify_pretrained

    try:
        findings = verify_pretrained(model, digest)
    except ShardproofError as error:
        _end(error)
    for finding in findings:
        typer.echo(str(finding), err=True)
    if findings:
        raise SystemExit(STOPPED_BY_FINDING)
    typer.echo(f"{model}: every tensor is unchanged since it was saved, digest {read_digest(Path(model))}")


def push(
    run: Annotated[str, typer.Argument(help="the folder of a finished run")],
    repo: Annotated[
        str | None, typer.Option(help="user/name; by default the run's output.push_to_hub")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="create a public repository")] = False,
) -> None:
    """Upload the final model of a run to the Hugging Face Hub."""
    from shardproof.errors import fail
    from shardproof.rl.hub import push_model
    from shardproof.rl.place import read_state

    try:
        settings = (read_state(Path(run)).settings or {}).get("output") or {}
        target = repo or settings.get("push_to_hub")
        if not target:
            raise fail("C001", "hub", f"{run} names no repository.", fix="pass --repo user/name")
        private = not public and bool(settings.get("hub_private", True))
        typer.echo(f"uploaded to {push_model(Path(run), target, private)}")
    except ShardproofError as error:
        _end(error)


def _end(error: ShardproofError) -> NoReturn:
    typer.echo(str(error), err=True)
    raise SystemExit(exit_code_of(error)) from None
