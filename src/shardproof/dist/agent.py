"""torch's elastic agent as this project runs it: nodes authenticate each other, and a stop is not a failure.

One node needs no rendezvous, so nothing listens. Several nodes use torch's rendezvous, whose state is pickled in a store
that anyone on the network can write to. Here every state is signed with the run's secret, and unsigned state is never
unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

logger = logging.getLogger(__name__)

_FAILED_GRACE_S = 30  # for ranks that are ended because another one failed
_SAME_INTERRUPT_S = 1.0  # a terminal and a wrapper may both deliver one Ctrl-C
_TORCH_TIMEOUT_S = 900  # torch's own default for a rendezvous
_SIGNATURE_BYTES = 32


class OneNode(RendezvousHandler):
    """The rendezvous of a run on one node, complete from the start."""

    def __init__(self, run_id: str):
        self._run_id = run_id

    def get_backend(self) -> str:
        return "one-node"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        # The ranks have a store of their own, in a file; the address only says that they are on one host.
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing is open."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class SignedBackend(RendezvousBackend):
    """A backend whose states are signed; a state without this run's signature raises before it is unpickled."""

    def __init__(self, backend: RendezvousBackend, key: bytes):
        self._backend, self._key = backend, key

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._backend.set_state(self._sign(state) + state, token)
        return None if found is None else (self._checked(found[0]), found[1], found[2])

    def _sign(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _checked(self, signed: bytes) -> bytes:
        signature, state = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(state)):
            raise RendezvousStateError("a message at the rendezvous was not signed with this run's --rdzv-id")
        return state


def several_nodes(min_nodes: int, max_nodes: int, endpoint: str, secret: str) -> RendezvousHandler:
    """torch's dynamic rendezvous, signed with the secret that all nodes of the run share."""
    # torch 2.13 keeps one store over restarts, in which ranks then find what the ranks before them wrote.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run_id, key = derive(secret)
    params = RendezvousParameters(
        backend="c10d",
        endpoint=endpoint,
        run_id=run_id,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        timeout=_TORCH_TIMEOUT_S,
    )
    backend, store = create_backend(params)
    return create_handler(store, SignedBackend(backend, key), params)


def derive(secret: str) -> tuple[str, bytes]:
    """The name of the rendezvous, which anyone can read in the store, and the signing key, which it does not reveal."""
    derived = hashlib.pbkdf2_hmac("sha256", secret.encode(), b"shardproof rendezvous", 100_000, 48)
    return derived[:16].hex(), derived[16:]


class Agent(LocalElasticAgent):
    """Starts ranks and, when one fails, all of them again; exit codes in `final` prevent a restart.

    The first signal is forwarded to the ranks, which have `grace_s` to save. An interrupt after it kills them.
    """

    def __init__(self, spec: WorkerSpec, folder: str, final: Collection[int], grace_s: int):
        super().__init__(spec, DefaultLogsSpecs(log_dir=folder))
        self._final, self._grace_s = final, grace_s
        self._is_final = False
        self.killed = False  # by an interrupt that came after the first signal

    @property
    def started(self) -> bool:
        """Whether there were ranks."""
        return self._pcontext is not None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if any(failure.exitcode in self._final for failure in result.failures.values()):
            self._is_final, self._remaining_restarts = True, 0
        return result

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        """End the ranks, with the signal that was received or, where another rank failed, with SIGTERM."""
        grace_s = self._grace_s if death_sig is not None or self._is_final else _FAILED_GRACE_S
        number = death_sig if death_sig is not None else signal.SIGTERM
        with self._kill_on_interrupt():
            if self._pcontext is not None:
                if death_sig is not None:
                    logger.info("stopping the ranks; press Ctrl-C again to kill them")
                self._pcontext.close(number, grace_s)
            super()._shutdown(number)

    @contextlib.contextmanager
    def _kill_on_interrupt(self) -> Iterator[None]:
        """Inside the block further signals do not interrupt ranks that are saving; SIGINT kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        began = time.monotonic()

        def kill(*_: object) -> None:
            if self._pcontext is None or time.monotonic() - began < _SAME_INTERRUPT_S:
                return
            self.killed, ranks = True, set(self._pcontext.pids().values())
            for child in multiprocessing.active_children():
                if child.pid in ranks:
                    child.kill()

        handlers = {signal.SIGINT: kill, signal.SIGTERM: _ignore, signal.SIGHUP: _ignore}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ignore(*_: object) -> None:
    """Does nothing. SIG_IGN in its place would be inherited by processes that are started meanwhile."""


def make_spec(
    handler: RendezvousHandler,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_ranks: int,
    max_restarts: int,
) -> WorkerSpec:
    """What the agent starts on this node."""
    return WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=function,
        args=args,
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
