"""The vLLM servers of a run: one payload to all of them at once, and a watch over each. All of it runs on rank 0.

A server, called a replica here, *serves* if it carries the label of the committed version. One that fails or refuses a
sync, dies, or loses its weights is taken out: it serves nothing until a thread of its own has brought it to the
committed version, its canary has answered as it should, and it has the label again. So whatever the servers do, those
that serve have the same weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from shardproof.errors import error_for, fail
from shardproof.findings import Finding
from shardproof.rollout.replica import Replica, side_by_side
from shardproof.rollout.sync import Delivered, Delivery, Proof
from shardproof.rollout.vllm_client import Deadline, Unreachable
from shardproof.rollout.vllm_versions import Interface

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at a replica that serves
_MOST_WAIT_S = 10.0  # between two attempts to bring one back
_ANSWER_S = 15.0  # for a question that needs no work
_HEALTH_S = 5.0  # for a server that is asked before a sync whether it lives
_JOIN_S = 5.0


class Replicas:
    """The servers of a run."""

    def __init__(self, deliveries: Sequence[Delivery], sync_timeout_s: float):
        self.all = [Replica(delivery) for delivery in deliveries]
        self.committed: Delivered | None = None
        self._seconds = sync_timeout_s
        self._state = threading.Lock()  # of `committed` and who serves
        self._closed = threading.Event()
        self._asleep = False
        self._watches: list[threading.Thread] = []
        self._events: list[str] = []

    def start(self) -> None:
        """Start or find all servers, side by side; those that share a GPU one after the other.

        While a server starts, vLLM measures what of a GPU's memory is free, and must be the only one that takes some.
        """
        waiting = list(self.all)
        while waiting:
            now, places = list[Replica](), set[str]()
            for replica in waiting:
                server = replica.delivery.server
                alone = server.is_ours and server.served.device == "cuda"
                if not alone or server.place.devices not in places:
                    now.append(replica)
                if alone:
                    places.add(server.place.devices)
            problems = self._each(now, lambda replica: replica.delivery.server.ensure_up())
            if problems:
                raise error_for(list(problems.values())[:1])
            waiting = [replica for replica in waiting if replica not in now]

    def identify(self) -> Interface:
        """What the servers' version of vLLM has and takes; they must not differ in what dispatchers see."""
        found = [replica.delivery.identify(self._seconds) for replica in self.all]
        if len({interface.weight_versions for interface in found}) > 1:
            said = ", ".join(f"{r.name}: {i.version}" for r, i in zip(self.all, found, strict=True))
            message = f"the replicas run versions of vLLM that cannot be mixed ({said})."
            raise fail("R506", "rollout", message, fix="use one version of vLLM for all of them")
        return found[0]

    @property
    def serving(self) -> list[str]:
        """The names of those that serve the committed version."""
        with self._state:
            return [replica.name for replica in self.all if replica.serving]

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """Name and address of each; they stay when a server is started again."""
        return [(replica.name, replica.delivery.server.client.url) for replica in self.all]

    @property
    def version(self) -> int:
        """The version that is committed; -1 if none is."""
        return self.committed.version if self.committed is not None else -1

    def adopt(self, payload: Delivered | None) -> None:
        """Take what another transport has brought and committed everywhere; None while it is under way.

        Nothing of it lies here: a server that loses it is out until the next sync.
        """
        with self._state:
            self.committed = payload
            for replica in self.all:
                replica.serving = payload is not None

    # A sync.

    def deliver(
        self, payload: Delivered, lost: Mapping[str, Finding] | None = None, drawn: bool = False
    ) -> Proof:
        """Bring a payload to all replicas at once, or bring the last committed one again and raise.

        One that fails, or is among the `lost`, is taken out while the others go on. Only at the first sync, when nothing
        is served yet, all must succeed. With `drawn` the replicas first prove the weights of what they drew since they
        were last asked.
        """
        started = time.perf_counter()
        held: list[Replica] = []
        try:
            if drawn:
                self.check_alone(self.serving)
            failed = dict(lost or {})
            ready = self._stage(payload, held, failed)
            if self.committed is None and failed:
                ready = []
            failed |= self._each(ready, lambda r: r.delivery.commit(payload, Deadline(self._seconds)))
            done = [replica for replica in ready if replica.name not in failed]
            if not done:
                self._give_up(payload, held, failed)
            self._accept(payload, done)
        finally:
            for replica in held:
                replica.lock.release()
        for replica in self._named(failed):
            self._say_out(replica, failed[replica.name])
        self._start_watches()
        seconds: dict[str, float] = {}
        for replica in done:  # the slowest counts
            for part, taken in replica.delivery.seconds.items():
                seconds[part] = max(seconds.get(part, 0.0), taken)
        seconds["total"] = time.perf_counter() - started
        return Proof(payload.version, max(r.delivery.gap(payload) for r in done), seconds)

    def _stage(self, payload: Delivered, held: list[Replica], failed: dict[str, Finding]) -> list[Replica]:
        """Bring and prove a payload; returns where it is ready to be committed.

        First to those that serve, answer and are not being repaired. The others get it from their own watch; only if no
        replica takes the payload are they waited for here, and servers that died started again.
        """
        left = [replica for replica in self.all if replica.name not in failed]
        up = left
        if self.committed is not None:
            up = self._up([replica for replica in left if replica.serving])
        ready: list[Replica] = []
        for some, wait in ((up, False), (left, True)):
            asked = [replica for replica in some if replica not in held]
            free = [replica for replica in asked if replica.take(wait, self._seconds)]
            held += free
            if wait:
                busy = fail("R505", "sync", "the server is being repaired, and did not come back in time.")
                failed |= {r.name: self._finding(r, busy) for r in asked if r not in free}
            failed |= self._each(free, lambda replica: replica.delivery.stage(payload, self._seconds))
            ready = [replica for replica in held if replica.name not in failed]
            if ready:
                break
        return ready

    def _up(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Those of some replicas that answer."""
        found: list[Replica] = []

        def ask(replica: Replica) -> None:
            if replica.delivery.server.client.is_up(_HEALTH_S):
                found.append(replica)

        self._each(replicas, ask)
        return [replica for replica in replicas if replica in found]

    def _accept(self, payload: Delivered, done: Sequence[Replica]) -> None:
        with self._state:
            self.committed = payload
            self._asleep = False
            for replica in self.all:
                replica.serving = replica in done
                if not replica.serving:
                    replica.look.set()

    def _give_up(self, payload: Delivered, held: Sequence[Replica], failed: Mapping[str, Finding]) -> None:
        """Bring the last committed payload again, and raise."""
        first = next(iter(failed.values()))
        message = first.message
        if len(failed) > 1:
            more = "; ".join(finding.message.splitlines()[0] for finding in list(failed.values())[1:])
            message = f"no replica took the weights. {message} {more}"
        ending = self._roll_back(held)
        message = f"{message} Version {payload.version} was not committed; {ending}"
        raise fail(first.code, "sync", message, tensor=first.tensor, fix=first.fix)

    def _roll_back(self, held: Sequence[Replica]) -> str:
        """Bring the last committed payload again; says how that went."""
        old = self.committed
        if old is None:
            return "the engine has no weights."
        # The watches start those again that died, unless there is but one.
        able = self._up(held) or held if len(self.all) > 1 else held
        problems = self._each(able, lambda replica: replica.delivery.bring(old, self._seconds))
        with self._state:
            for replica in held:
                replica.serving = replica in able and replica.name not in problems
                replica.look.set()
        back = self.serving
        if problems:
            said = next(iter(problems.values())).message.splitlines()[0]
            where = "" if len(self.all) == 1 else f" at {len(problems)} of {len(self.all)} replicas"
            return f"version {old.version} could not be restored either{where} ({said}); this is tried again."
        who = "the server is" if len(self.all) == 1 else f"replicas {', '.join(back)} are"
        return f"{who} back at version {old.version}."

    # What was drawn.

    def moved(self, busy: bool) -> list[str]:
        """The names of those that serve and no longer say what they said when their weights were committed.

        They are not interrupted: if they are `busy`, only a large change counts here (see `Delivery.is_unchanged`).
        """
        moved: list[str] = []

        def ask(delivery: Delivery) -> None:
            if not delivery.is_unchanged(Deadline(self._seconds), busy):
                moved.append(delivery.name)

        self._question(self.serving, ask)
        return sorted(moved)

    def check_alone(self, names: Sequence[str]) -> None:
        """Interrupt the requests of these replicas, and raise if one does not say what it said at its commit.

        One that has died or lost its label is taken out: what it drew carries the label of weights that were proved.
        """
        found = self._question(names, lambda delivery: delivery.check_alone(Deadline(self._seconds)))
        wrong = [finding for finding in found.values() if finding.code == "R503"]
        if wrong:
            raise error_for(wrong[:1])

    def _question(self, names: Sequence[str], ask: Callable[[Delivery], None]) -> dict[str, Finding]:
        """Ask those of these replicas that serve something; those that fail are taken out. Returns why, by name."""

        def ask_one(replica: Replica) -> None:
            if not replica.take(False, self._seconds):
                return  # it is being repaired
            try:
                payload = self.committed
                if payload is None or not replica.serving:
                    return
                if not replica.delivery.is_current(payload, _ANSWER_S):
                    raise Unreachable("it has lost its label")
                ask(replica.delivery)
            finally:
                replica.lock.release()

        found = self._each(self._named(names), ask_one, stage="generate")
        self._notice(found)
        return found

    def _notice(self, problems: Mapping[str, Finding]) -> None:
        """Take out those that a question showed to be dead or wrong."""
        for replica in self._named(problems):
            self._say_out(replica, problems[replica.name])
            with self._state:
                replica.serving = False
            replica.look.set()

    def _named(self, names: Sequence[str] | Mapping[str, object]) -> list[Replica]:
        return [replica for replica in self.all if replica.name in names]

    # Sleep.

    def sleep(self) -> None:
        """Have all servers give up weights and KV cache. Nobody repairs one until the next sync."""
        with self._state:
            self._asleep = True
            for replica in self.all:
                replica.serving = False
        self._ask("/sleep?level=2")

    def wake(self) -> None:
        """Have all servers take their memory back."""
        self._ask("/wake_up")

    def _ask(self, path: str) -> None:
        """Post to all servers. One that died is left: the next sync starts another, which is awake."""
        alive = [replica for replica in self.all if not replica.delivery.server.has_died]
        problems = self._each(
            alive, lambda r: r.delivery.server.client.post(path, None, Deadline(self._seconds))
        )
        if problems:
            raise error_for(list(problems.values())[:1])

    # The watch over each replica.

    def _start_watches(self) -> None:
        if not self._watches:
            for replica in self.all:
                name = f"shardproof-replica-{replica.name}"
                watch = threading.Thread(target=self._watch, args=(replica,), name=name, daemon=True)
                self._watches.append(watch)
                watch.start()

    def _watch(self, replica: Replica) -> None:
        """Look at a replica now and then; bring one back that does not serve."""
        pause = _LOOK_S
        while not self._closed.is_set():
            replica.look.wait(pause)
            replica.look.clear()
            if self._is_well(replica):
                pause = _LOOK_S
                continue
            with replica.lock:
                # A sync may just have changed it.
                replica.repairing = not self._is_well(replica)
                try:
                    failed = replica.repairing and self._revive(replica) is not None
                except Exception:  # without its watch it would never come back
                    logger.exception("replica %s could not be repaired", replica.name)
                    failed = True
                replica.repairing = False
            pause = min(2 * pause, _MOST_WAIT_S) if failed else _LOOK_S

    def _is_well(self, replica: Replica) -> bool:
        """Whether there is nothing to do: it serves and has its label, or nobody wants it."""
        payload = self.committed
        if self._asleep or payload is None or self._closed.is_set():
            return True
        return replica.serving and replica.delivery.is_current(payload, _ANSWER_S)

    def _revive(self, replica: Replica) -> Finding | None:
        """Bring a replica to the committed version, starting its server if need be; returns what went wrong."""
        server = replica.delivery.server
        with self._state:
            was_serving, replica.serving = replica.serving, False
        if was_serving:
            gone = fail("R505", "sync", f"the server at {server.client.url} stopped or lost its weights.")
            self._say_out(replica, self._finding(replica, gone))
        if not server.has_died and not server.client.is_up(_ANSWER_S):
            if not server.is_ours:
                gone = fail("R505", "sync", f"no vLLM server answers at {server.client.url}.")
                return self._say_out(replica, self._finding(replica, gone))
            server.kill()  # it hangs: nothing that is asked of it would come to an end
        payload = None
        while payload is not self.committed and not self._closed.is_set():
            payload = self.committed
            assert payload is not None
            found = self._each([replica], partial(self._bring_current, payload))
            if found:
                return self._say_out(replica, found[replica.name])
        if replica.serving:
            replica.problem, version = "", payload.version if payload is not None else -1
            self._say(logging.INFO, f"replica {replica.name} is back at version {version}")
        return None

    def _say_out(self, replica: Replica, finding: Finding) -> Finding:
        """Warn that a replica is out, once for each reason."""
        if finding.message != replica.problem and not self._closed.is_set():
            replica.problem = finding.message
            self._say(logging.WARNING, f"{finding.code} {finding.message}\nIt is out until it is repaired.")
        return finding

    def _say(self, level: int, text: str) -> None:
        logger.log(level, "%s", text)
        self._events.append(text)

    def events(self) -> list[str]:
        """What happened to replicas since the last call: those that are out, and those that are back."""
        events, self._events = self._events, []
        return events

    def _bring_current(self, payload: Delivered, replica: Replica) -> None:
        """Bring the committed payload. If another one is committed meanwhile, this one does not get its label."""
        replica.delivery.stage(payload, self._seconds)
        # Memory of an older payload is written to again. What was read from it before this line was whole.
        if self.committed is not payload:
            return
        replica.delivery.commit(payload, Deadline(self._seconds))
        with self._state:
            replica.serving = self.committed is payload and not self._asleep

    def stop(self) -> None:
        """End the watches, and the servers that the run started. Starts no thread: the interpreter may be ending."""
        self._closed.set()
        for replica in self.all:
            replica.look.set()
            replica.delivery.server.begin_stop()
        for replica in self.all:
            replica.delivery.server.stop()
        for watch in self._watches:
            watch.join(_JOIN_S)

    def _each(
        self, replicas: Sequence[Replica], action: Callable[[Replica], object], stage: str = "sync"
    ) -> dict[str, Finding]:
        return side_by_side(replicas, action, stage, several=len(self.all) > 1)

    def _finding(self, replica: Replica, error: Exception) -> Finding:
        return replica.finding(error, "sync", several=len(self.all) > 1)
