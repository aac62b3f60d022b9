"""`shardproof rendezvous`: where hosts meet, apart from all of them, so that each of them may be lost."""

from __future__ import annotations

import logging
import time

from shardproof.cli.host_options import RdzvEndpoint, RdzvId
from shardproof.cli.options import exit_code_of
from shardproof.errors import ShardproofError, fail
from shardproof.terminal import attached

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


def rendezvous(
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
) -> None:
    """Let the hosts of a run meet here, so that the run survives the loss of any of them. Runs until it is stopped."""
    with attached(quiet=False, rank=0) as terminal:
        try:
            _serve(rdzv_endpoint, rdzv_id)
        except ShardproofError as error:
            terminal.show(str(error))
            raise SystemExit(exit_code_of(error)) from None


def _serve(endpoint: str | None, secret: str | None) -> None:
    from shardproof.dist.rendezvous import derive_key
    from shardproof.dist.signals import Signals
    from shardproof.dist.start import check_secret, parse_endpoint, serve_meeting

    host, port = parse_endpoint(endpoint)
    key = derive_key(check_secret(secret))
    with Signals() as signals:
        server = serve_meeting(host, port, key, keeps_on=True)
        if server is None:
            message = f"{endpoint} is not an address of this host, or its port is taken."
            raise fail("C002", "launch", message, fix="start it on the host that --rdzv-endpoint names")
        logger.info("hosts can meet at %s; stop with Ctrl-C", endpoint)
        while not signals.number:
            time.sleep(_LOOK_S)
        server.close(patience_s=0)
