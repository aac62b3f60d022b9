"""The commands `shardproof report` and `shardproof watch`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shardproof.errors import ShardproofError, fail
from shardproof.report.page import PAGE_NAME, write_page
from shardproof.report.read import Run, RunReader, require_run_folder
from shardproof.text import printable

COMPARISON_NAME = "comparison.html"
_USAGE_EXIT = 2


def report(
    runs: Annotated[list[str], typer.Argument(help="run folders (the output.folder of each run)")],
    output: Annotated[
        str | None,
        typer.Option(
            help="file to write; default: report.html in the run folder, or comparison.html in the working directory for several runs"
        ),
    ] = None,
) -> None:
    """Write a run's report page, or one page that compares several runs."""
    with _errors_as_messages():
        folders = list({Path(run).resolve(): require_run_folder(Path(run)) for run in runs}.values())
        default = folders[0] / PAGE_NAME if len(folders) == 1 else Path(COMPARISON_NAME)
        path = Path(output) if output else default
        try:
            write_page(path, read_runs(folders))
        except OSError as error:
            message = f"{path} cannot be written: {error.strerror or error}."
            raise fail(
                "C001", "report", message, fix="pass --output with a file in a folder that you can write to"
            ) from error
    print(printable(path))


def watch(
    run: Annotated[str, typer.Argument(help="a run folder (the run's output.folder)")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: any free port")] = 0,
) -> None:
    """Serve a run's report page, updated live. Only this machine can open it."""
    from shardproof.report.server import WatchServer

    with _errors_as_messages():
        folder = require_run_folder(Path(run))
        server = WatchServer(folder, port)
    with server:
        number = server.server_address[1]
        print(
            f"Open {server.address} (from another machine, first run: ssh -L {number}:127.0.0.1:{number} HOST)"
        )
        print("Press Ctrl-C to stop watching. The run does not depend on it.", flush=True)
        # Shells let jobs in the background ignore it; whoever sends it means it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nStopped watching.")


def read_runs(folders: list[Path]) -> list[Run]:
    """The content of each run folder. Runs whose folders have the same name are named by their paths."""
    runs = [RunReader(folder).read(time.time()) for folder in folders]
    names = [run.name for run in runs]
    return [
        replace(run, name=str(folder)) if names.count(run.name) > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    try:
        yield
    except ShardproofError as error:
        print(error, file=sys.stderr)
        raise SystemExit(_USAGE_EXIT) from None
    except OSError as error:
        message = f"{error.filename or 'a file of the run'} cannot be read: {error.strerror or error}."
        print(fail("C001", "report", message, fix="pass a folder that you can read"), file=sys.stderr)
        raise SystemExit(_USAGE_EXIT) from None
