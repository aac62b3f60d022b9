"""The options of commands that run on several hosts: each is one host's part of the same run."""

from __future__ import annotations

from typing import Annotated

import typer

Nnodes = Annotated[
    str | None,
    typer.Option(
        help="number of hosts, or a range such as 1:4; 1, or what the scheduler says",
        envvar="SHARDPROOF_NNODES",
    ),
]
RdzvEndpoint = Annotated[
    str | None,
    typer.Option(help="HOST:PORT where several hosts meet", envvar="SHARDPROOF_RDZV_ENDPOINT"),
]
RdzvId = Annotated[
    str | None,
    typer.Option(help="shared secret of the run, for several hosts", envvar="SHARDPROOF_RDZV_ID"),
]
LocalAddr = Annotated[
    str | None,
    typer.Option(help="this host's own address; default: the one that reaches the endpoint"),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0,
        help="how many times to restart after a rank or a host was lost",
        envvar=["SHARDPROOF_MAX_RESTARTS", "PET_MAX_RESTARTS"],
    ),
]
LostAfter = Annotated[
    float, typer.Option(min=5, help="seconds without a sign of life after which a host is lost")
]
HostWait = Annotated[
    float,
    typer.Option(min=0, help="seconds to wait for more hosts, once there are enough for --nnodes MIN:MAX"),
]
RdzvTimeout = Annotated[
    float, typer.Option(min=1, help="seconds to wait for enough hosts, at the start and after a loss")
]
