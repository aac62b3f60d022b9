"""Run a function on several ranks, in worker processes that outlive the call.

Importing torch and transformers costs seconds; a process group over a FileStore costs milliseconds. So the workers are
forked from a server that has done the imports once, are kept for the whole test session, and get a fresh process group
for every call. Rank r of every call is worker r.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

# Read by the fork server when it starts, hence by every worker.
RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # On some virtual machines whose processor reports AMX, a bf16 matmul dies of an illegal instruction in oneDNN.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
}
PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "peft",
    "shardproof.rl.loop",
]

MAX_KEPT = 8  # workers that outlive a call; only one test asks for more

Outcome = tuple[Any, ...]  # ("ok", value) | ("error", type name, message) | ("died", exit code)


class RankError(Exception):
    """At least one rank failed. `errors` maps a failed rank to (type name, message, traceback)."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]):
        self.errors = errors
        parts = [
            f"--- rank {rank}: {kind}: {message}\n{trace}" for rank, (kind, message, trace) in errors.items()
        ]
        super().__init__("\n".join([f"{len(errors)} rank(s) failed", *parts]))


class RankTimeout(RankError):
    """Some ranks did not finish in time; the traceback of those is the stack they were in."""


@dataclass(frozen=True)
class Call:
    """One function call on one rank, as it travels to the worker."""

    rank: int
    num_ranks: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    folder: str
    port: int
    backend: str | None
    group_timeout: float


@dataclass(frozen=True)
class Reply:
    """What one rank's call came to. `payload` is the pickled result of a call that succeeded."""

    payload: bytes | None = None
    error: tuple[str, str, str] | None = None
    exitcode: int | None = None

    @property
    def failure(self) -> tuple[str, str, str] | None:
        if self.payload is not None:
            return None
        return self.error or ("died", f"exit code {self.exitcode}", "")

    def outcome(self) -> Outcome:
        if self.payload is not None:
            return ("ok", pickle.loads(self.payload))
        if self.error is not None:
            return ("error", *self.error[:2])
        return ("died", self.exitcode)


def run_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    init_group: bool = True,
    backend: str = "gloo",
    group_timeout: float = 60,
) -> list[Any]:
    """Return fn(*args) of every rank, in the order of ranks; raise RankError if any rank failed.

    `fn` is a module-level function; its arguments and its result travel by value. The workers' environment is that of
    the first call, plus the variables torchrun would set.
    """
    replies = _pool.run(num_ranks, fn, args, timeout, backend if init_group else None, group_timeout)
    failures = {rank: reply.failure for rank, reply in enumerate(replies) if reply.failure is not None}
    if failures:
        raise RankError(failures)
    return [reply.outcome()[1] for reply in replies]


def run_ranks_outcomes(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    init_group: bool = True,
    backend: str = "gloo",
    group_timeout: float = 60,
) -> list[Outcome]:
    """Return ("ok", value), ("error", type name, message) or ("died", exit code) of every rank.

    Raises only RankTimeout.
    """
    replies = _pool.run(num_ranks, fn, args, timeout, backend if init_group else None, group_timeout)
    return [reply.outcome() for reply in replies]


def allow_several_ranks(allowed: bool) -> None:
    """Say whether the test that runs now carries the marker `distributed`; without it, one rank is all it gets."""
    _pool.several_ranks = allowed


def close_pool() -> None:
    """End every worker; the next call starts new ones."""
    _pool.close()


class _Worker:
    """One rank process and this end of its pipe."""

    def __init__(self, context: Any, rank: int, folder: Path):
        self.stacks = folder / f"stacks_{rank}_{time.monotonic_ns()}"
        self.connection, remote = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(remote, str(self.stacks)), name=f"rank {rank}", daemon=True
        )
        self.process.start()
        # The worker then holds the only copy of its end, so that its death reads as end of file here.
        remote.close()

    def send(self, call: Call) -> None:
        payload = pickle.dumps(call)
        # A worker that is already dead is reported by receive().
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(payload)

    def receive(self) -> Reply:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            return Reply(exitcode=self.process.exitcode)

    def request_stacks(self) -> None:
        # A worker that has not yet registered its handler would be ended by the signal.
        if self.stacks.exists() and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


class _Pool:
    """Workers by rank, started when first needed and replaced when found dead."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.folder: Path | None = None
        self.several_ranks = True

    def run(
        self,
        num_ranks: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        backend: str | None,
        group_timeout: float,
    ) -> list[Reply]:
        if num_ranks > 1 and not self.several_ranks:
            raise RuntimeError(f"a test on {num_ranks} ranks needs the marker `distributed`")
        workers = self._ensure(num_ranks)
        port = _free_port()
        try:
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                for rank, worker in enumerate(workers):
                    worker.send(Call(rank, num_ranks, fn, args, folder, port, backend, group_timeout))
                replies = self._collect(workers, time.monotonic() + timeout)
        except BaseException:
            # A worker still busy with this call would answer the next one with this one's result.
            self.close()
            raise
        for worker in self.workers[MAX_KEPT:]:
            worker.end()
        del self.workers[MAX_KEPT:]
        return replies

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _ensure(self, num_ranks: int) -> list[_Worker]:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        for name, value in RANK_ENV.items():
            os.environ.setdefault(name, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(num_ranks):
            if rank < len(self.workers) and self.workers[rank].process.is_alive():
                continue
            worker = _Worker(context, rank, self.folder)
            if rank < len(self.workers):
                self.workers[rank].end()
                self.workers[rank] = worker
            else:
                self.workers.append(worker)
        return self.workers[:num_ranks]

    def _collect(self, workers: list[_Worker], deadline: float) -> list[Reply]:
        replies: dict[int, Reply] = {}
        while len(replies) < len(workers):
            pending = {w.connection: rank for rank, w in enumerate(workers) if rank not in replies}
            ready = multiprocessing.connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._timed_out(workers, replies)
            for connection in ready:
                rank = pending[connection]
                replies[rank] = workers[rank].receive()
        return [replies[rank] for rank in range(len(workers))]

    def _timed_out(self, workers: list[_Worker], replies: dict[int, Reply]) -> RankTimeout:
        errors = {rank: reply.failure for rank, reply in replies.items() if reply.failure is not None}
        stuck = [rank for rank in range(len(workers)) if rank not in replies]
        for rank in stuck:
            workers[rank].request_stacks()
        # The handler writes from inside the signal; there is nothing to wait on.
        time.sleep(0.5)
        for rank in stuck:
            path = workers[rank].stacks
            stack = path.read_text() if path.exists() else "(the worker had not started)"
            errors[rank] = ("timeout", "no answer in time; its stack was:", stack)
        return RankTimeout(errors)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection: Any, stacks: str) -> None:
    """Answer calls until the other end of the pipe closes. Runs in the worker."""
    # An interrupt from the keyboard reaches the whole foreground group; the test process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    # What the imports left is never garbage; without this every collection below would walk all of it.
    gc.collect()
    gc.freeze()
    with open(stacks, "w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            reply = _answer(request)
            gc.collect()
            connection.send_bytes(pickle.dumps(reply))


def _answer(request: bytes) -> Reply:
    try:
        call: Call = pickle.loads(request)
        with _rank_environment(call):
            # Pickled here, by value: the pipe's own pickler would move tensors through shared memory, whose file
            # descriptors run out and whose owner may be gone by the time the result is read.
            return Reply(payload=pickle.dumps(call.fn(*call.args)))
    except BaseException as error:
        return Reply(error=(type(error).__name__, str(error), traceback.format_exc()))


@contextlib.contextmanager
def _rank_environment(call: Call) -> Iterator[None]:
    """A process that looks as torchrun starts it, whatever the calls before this one left behind."""
    import numpy
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.debug

    environment = dict(os.environ)
    os.environ.update(
        RANK=str(call.rank),
        WORLD_SIZE=str(call.num_ranks),
        LOCAL_RANK=str(call.rank),
        LOCAL_WORLD_SIZE=str(call.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
    )
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    try:
        if call.backend is not None:
            store = dist.FileStore(os.path.join(call.folder, "store"), call.num_ranks)
            dist.init_process_group(
                call.backend,
                store=store,
                rank=call.rank,
                world_size=call.num_ranks,
                timeout=timedelta(seconds=call.group_timeout),
            )
            # A rank that is done before another has connected would close the connection that the other waits for.
            dist.barrier()
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # DTensor remembers the meshes of earlier calls, whose groups are gone.
        torch.distributed.tensor.debug._clear_sharding_prop_cache()
        # A group that could not be made still counts, and the ranks of the next one would wait under different names.
        dist.distributed_c10d._world.group_count = 0
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        os.environ.clear()
        os.environ.update(environment)


_pool = _Pool()
# Registered after multiprocessing's own handler, so it runs before it.
atexit.register(close_pool)
