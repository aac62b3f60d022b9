"""An environment that does what the turns say, for tests of its workers. Its conversations are named by their rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardproof.environments.pool import EnvironmentPool, EnvironmentSpec
from shardproof.environments.protocol import Answer, Failure, Reply, Turn

LONG_S = 60.0  # longer than anything here takes, unless it waits for what never comes

SOURCE = r'''
import asyncio, os, pathlib, re, signal, sys, threading, time
from shardproof import Environment, Opening, Reply, ToolCall, Turn

class Unspeakable(Exception):
    def __str__(self): raise KeyboardInterrupt

class Endless(Exception):
    def __str__(self): time.sleep(1000)

class Plain(Environment):
    """Does what a turn's text says, and answers how many turns it has had."""

    def __init__(self, closed=None):
        self.turns, self.closed = 0, closed

    def start(self, row, seed):
        self.row = row
        if row.get("start"):
            return getattr(self, row["start"])()
        return f"{row.get('name')} {seed}"

    def step(self, turn):
        self.turns += 1
        word, _, rest = turn.text.partition(" ")
        said = getattr(self, word)(*rest.split()) if word else None
        return Reply(f"{self.row.get('name')} {self.turns}") if said is None else said

    def close(self):
        if self.closed and hasattr(self, "row"):
            with open(self.closed, "a") as file:
                file.write(f"{self.row['name']}\n")

    @classmethod
    def rows(cls, split, **options):
        if split == "dies":
            os._exit(4)
        return {"train": [{"name": "train", "n": n} for n in range(3)], "numbers": [1], "sets": [{"a": {1}}]}[split]

    def go_on(self): pass
    def block(self, seconds): time.sleep(float(seconds))
    def hang(self): time.sleep(1000)
    def hang_and_catch(self):
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass
    def hang_in_c(self): re.match("(a+)+$", "a" * 60 + "b")
    def die(self): os._exit(7)
    def kill(self): os.kill(os.getpid(), signal.SIGKILL)
    def leave(self): sys.exit(3)
    def interrupt(self): raise KeyboardInterrupt
    def recurse(self): return self.recurse()
    def fail(self): raise ValueError("first line\nsecond line \ud800")
    def say_nothing(self): raise Unspeakable
    def say_never(self): raise Endless
    def close_loop(self):
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(asyncio.sleep(0))
        asyncio.get_event_loop().close()
    def flood(self): return "x" * 10_000_000
    def flood_opening(self): return "x" * 10_000_000
    def fork(self): return "child" if os.fork() == 0 else "parent"
    def change(self):
        self.row["name"] = "changed"
        self.row["inner"].append("changed")
        return str(self.row["inner"])
    def write(self):
        print('{"call": 1}', flush=True)
        sys.__stdout__.buffer.write(b"\x00" * 8)
        sys.stdout.flush()
    def write_everywhere(self):
        for name in os.listdir("/proc/self/fd"):
            try:
                if "socket" in os.readlink(f"/proc/self/fd/{name}"):
                    os.write(int(name), b"garbage" * 9)
            except OSError:
                pass
        time.sleep(1000)
    def child_holds_connection(self):
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(9)
    def emoji(self): return "\U0001f600 \u00e9 \x00 \u2028"
    def use_loops(self): return asyncio.run(asyncio.sleep(0.001, "a loop of its own"))
    def pid(self): return str(os.getpid())
    def returns(self, expression): return eval(expression)


class Async(Plain):
    async def start(self, row, seed):
        await self.meet()
        return super().start(row, seed)

    async def step(self, turn):
        await self.meet()
        said = super().step(turn)
        return await said if hasattr(said, "__await__") else said

    async def meet(self):
        await asyncio.sleep(getattr(self, "row", {}).get("wait_s", 0.001))

    async def wait(self): await asyncio.sleep(1000)
    async def interrupt_rank(self):
        os.kill(os.getppid(), signal.SIGINT)
        await asyncio.sleep(1000)
    async def wait_and_catch(self):
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    async def task_leaves(self): await asyncio.gather(self.exits())
    async def exits(self): sys.exit(5)
    async def task_dies(self):
        # Not in the call's own task: nobody notes whose code it is.
        asyncio.get_running_loop().call_later(0.01, os._exit, 8)
        await asyncio.sleep(1000)


class Together(Async):
    """All conversations wait for each other: their calls must be in progress at the same time."""
    number, arrived, everybody = 0, 0, None

    def __init__(self, number):
        super().__init__()
        Together.number = number

    async def meet(self):
        cls = Together
        cls.everybody = cls.everybody or asyncio.Event()
        cls.arrived += 1
        if cls.arrived == cls.number:
            cls.everybody.set()
        await cls.everybody.wait()


class Random(Plain):
    """Answers something else each time that it is asked."""
    def step(self, turn):
        super().step(turn)
        return os.urandom(8).hex()


class Once(Plain):
    replayable = False


class Roles(Plain):
    roles = ["tool", "user"]
    tools = [{"type": "function"}]


class AsyncClose(Plain):
    async def close(self):
        await asyncio.sleep(0.001)
        super().close()


class BadClose(Plain):
    def close(self):
        if getattr(self, "row", None):
            name = self.row["name"]
            if name == "raise":
                raise ValueError
            if name == "hang":
                time.sleep(1000)
            if name == "die":
                os._exit(1)


class NeverAsked(Environment):
    """Its worker dies when it is asked something, before any call begins."""
    def __init__(self):
        import pickle
        pickle.loads = lambda message: os._exit(11)


class InterruptsRank(Environment):
    def __init__(self):
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1000)


class Bare(Environment):
    pass


ONLY = Plain()


def make_one():
    return ONLY


def make(**options):
    return Plain(**options)
'''


@contextmanager
def pool_of(name: str, **settings: Any) -> Iterator[EnvironmentPool]:
    spec = EnvironmentSpec(f"scripted_users:{name}", **{"timeout_s": LONG_S, "num_workers": 1, **settings})
    with EnvironmentPool(spec) as pool:
        yield pool


def open_all(pool: EnvironmentPool, *names: str, **row: Any) -> dict[int, Answer]:
    """Open a conversation for each name; their answers by key."""
    for key, name in enumerate(names):
        pool.open(key, {"name": name, **row}, key)
    return dict(pool.answers())


def say(pool: EnvironmentPool, *texts: str, number: int = 1) -> list[Answer]:
    """Every conversation's answer to its text."""
    for key, text in enumerate(texts):
        pool.step(key, Turn(text, text, number=number))
    found = dict(pool.answers())
    return [found[key] for key in range(len(texts))]


def say_one(pool: EnvironmentPool, key: int, text: str) -> list[Answer]:
    """One conversation's answer."""
    pool.step(key, Turn(text, text))
    return [answer for _, answer in pool.answers()]


def texts(answers: list[Answer]) -> list[str]:
    """What was answered, in a few words."""
    return [_text(answer) for answer in answers]


def _text(answer: Answer) -> str:
    if isinstance(answer, Failure):
        return answer.error
    assert isinstance(answer, Reply) and not isinstance(answer.messages, str)
    return " ".join(message["content"] for message in answer.messages)
