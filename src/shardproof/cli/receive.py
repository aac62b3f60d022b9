"""`shardproof receive`: takes weights from trainers on other hosts, for the vLLM servers of this one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Annotated

import typer

from shardproof.cli.options import exit_code_of
from shardproof.errors import ShardproofError, fail

_STAGE = "receive"


def receive(
    secret_file: Annotated[
        str, typer.Option(help="a file with the secret that trainer and receiver share; mode 600")
    ],
    listen: Annotated[
        str, typer.Option(help="HOST:PORT to listen on; other machines reach it only if you name an address")
    ] = "127.0.0.1:8471",
) -> None:
    """Receive weights from a run on other hosts and show them to the vLLM servers of this host."""
    from shardproof.export.channel import parse_address, read_secret
    from shardproof.export.receiver import Receiver

    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    try:
        host, port = parse_address(listen, _STAGE, "--listen")
        key = read_secret(secret_file, _STAGE)
        try:
            receiver = Receiver(host, port, key)
        except OSError as error:
            message = f"cannot listen on {listen}: {os.strerror(error.errno) if error.errno else error}."
            raise fail("C007", _STAGE, message, fix="name an address of this host and a free port") from error
    except ShardproofError as error:
        typer.echo(str(error), err=True)
        raise SystemExit(exit_code_of(error)) from None
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    # The main thread waits for signals: a handler would not run while it waits for a connection.
    threading.Thread(target=receiver.serve, daemon=True).start()
    typer.echo(f"receiving weights on {receiver.address[0]}:{receiver.address[1]}")
    stop.wait()
    receiver.close()
