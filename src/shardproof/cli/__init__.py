"""The command line, `shardproof`. To add a command, write a function and register it here.

Commands import what they need when they run, so that `shardproof --help` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Annotated

from shardproof import __version__
from shardproof.cli.packages import require_packages

require_packages()  # before anything that needs them is imported

import typer  # noqa: E402

from shardproof.cli.data import data  # noqa: E402
from shardproof.cli.demo import demo  # noqa: E402
from shardproof.cli.explain import explain  # noqa: E402
from shardproof.cli.import_config import import_config  # noqa: E402
from shardproof.cli.publish import push, verify  # noqa: E402
from shardproof.cli.receive import receive  # noqa: E402
from shardproof.cli.recipes import recipes  # noqa: E402
from shardproof.cli.rendezvous import rendezvous  # noqa: E402
from shardproof.cli.train import train  # noqa: E402
from shardproof.doctor.commands import CountingCommand, doctor  # noqa: E402
from shardproof.doctor.estimate import estimate  # noqa: E402
from shardproof.report.commands import report, watch  # noqa: E402
from shardproof.text import sanitise_logging  # noqa: E402

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(train)
app.command()(data)
app.command()(rendezvous)
app.command()(demo)
app.command()(recipes)
app.command("import-config")(import_config)
app.command()(report)
app.command()(watch)
app.command()(verify)
app.command()(push)
app.command()(receive)
app.command()(explain)
app.command(cls=CountingCommand)(doctor)
app.command(cls=CountingCommand)(estimate)


def _show_version(wanted: bool) -> None:
    if wanted:
        packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers"))
        print(f"shardproof {__version__} (Python {platform.python_version()}, {packages})")
        raise typer.Exit


def _version(package: str) -> str:
    """The version of an installed package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="print versions of shardproof, Python and torch",
        ),
    ] = False,
) -> None:
    """Sharded RL post-training in which every rank can prove what it holds."""
    # Read when torch is imported. Its warnings about lost connections are stacks of C++; findings say the same in words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sanitise_logging()
