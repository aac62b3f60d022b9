"""One vLLM server among those of a run: whether it serves, who is at work on it, and what is wrong with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from shardproof.errors import ShardproofError, fail
from shardproof.findings import Finding
from shardproof.rollout.sync import Delivery, finding_of
from shardproof.rollout.vllm_client import Deadline, Refused, Unreachable

logger = logging.getLogger(__name__)

_GLANCE_S = 0.05


class Replica:
    """A server, and whether it serves. Who brings weights to it, or asks for its canary, holds its lock."""

    def __init__(self, delivery: Delivery):
        self.delivery = delivery
        self.lock = threading.Lock()
        self.serving = False
        self.repairing = False  # its watch has the lock, maybe for long
        self.look = threading.Event()  # its watch has something to do
        self.problem = ""  # what was said last about why it is out

    @property
    def name(self) -> str:
        """What it is called in messages and metrics."""
        return self.delivery.name

    def take(self, wait: bool, seconds: float) -> bool:
        """Whether this thread has the lock now. One that is being repaired is waited for only with `wait`."""
        limit = Deadline(seconds + self.delivery.server.settings.start_timeout_s)
        while not self.lock.acquire(timeout=_GLANCE_S):
            if limit.over or (self.repairing and not wait):
                return False
        return True

    def finding(self, error: Exception, stage: str, several: bool) -> Finding:
        """What went wrong: with the replica's name if there are several, and what the server wrote if it is ours."""
        finding, server = finding_of(error), self.delivery.server
        if not isinstance(error, ShardproofError):
            finding = replace(finding, stage=stage)
        if isinstance(error, Refused) and server.is_ours:
            finding = replace(finding, message=f"{finding.message} It wrote:\n{server.log_tail()}\n")
        if several:
            finding = replace(finding, message=f"replica {self.name}: {finding.message}")
        return finding


def side_by_side(
    replicas: Sequence[Replica], action: Callable[[Replica], object], stage: str, several: bool
) -> dict[str, Finding]:
    """Do something to replicas at the same time; returns what went wrong, by name."""

    def attempt(replica: Replica) -> Finding | None:
        try:
            action(replica)
        except (Unreachable, Refused, ShardproofError) as error:
            return replica.finding(error, stage, several)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            said = f"the server's answer was not understood ({type(error).__name__}: {error})."
            logger.debug("%s", said, exc_info=error)
            return replica.finding(fail("R505", stage, said), stage, several)
        return None

    if len(replicas) < 2:
        found = [attempt(replica) for replica in replicas]
    else:
        with ThreadPoolExecutor(len(replicas)) as pool:
            found = list(pool.map(attempt, replicas))
    return {r.name: finding for r, finding in zip(replicas, found, strict=True) if finding is not None}
