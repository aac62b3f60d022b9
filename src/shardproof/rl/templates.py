"""Untrusted tokenizers and chat templates, run so that neither can end the run.

Templates have a deadline: jinja's sandbox keeps them from doing harm, not from looping forever.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from shardproof.foreign import without_nulls

T = TypeVar("T")
_LOOK_S = 0.05  # how often the deadline is looked at; a call that ends is noticed at once


class Overdue(Exception):
    """A call took longer than it may; `index` says which."""

    def __init__(self, index: int, seconds: float):
        self.index = index
        super().__init__(f"it took longer than {seconds:g} s")


class _Interrupted(BaseException):
    """Raised inside of the thread that is given up; no `except Exception` of a library holds it."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a RuntimeError where a library in Rust panics: the class that it raises is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":
            raise RuntimeError(str(error)) from error
        raise


def chat_template_of(
    tokenizer: Any, variables: Mapping[str, Any] | None = None, tools: Sequence[Any] | None = None
) -> str:
    """The chat template that a conversation goes through: the one among its variables, or the tokenizer's; "" if none."""
    own = (variables or {}).get("chat_template")
    try:
        return str(tokenizer.get_chat_template(own, list(tools) if tools else None))
    except (AttributeError, ValueError):  # of tokenizers that have none, or none of that name
        return str(own or getattr(tokenizer, "chat_template", None) or "")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without keys that have no value, which a table gives to all messages if one has them.

    Templates ask whether there are `tool_calls`, and not what they are. What a message says may be nothing, and so may
    what a call's arguments are.
    """
    found = []
    for message in messages:
        plain = without_nulls(message, keep=("content",))
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
        found.append(plain)
    return found


def _plain_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    plain = without_nulls(call, keep=("arguments",))
    if isinstance(plain.get("function"), Mapping):
        plain["function"] = without_nulls(plain["function"], keep=("arguments",))
    return plain


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    prompt: bool = True,
    closed: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as its tokenizer's chat template writes it. With `prompt` the model's next turn begins at its end.

    A conversation that ends in the model's own turn is a turn to finish, unless all turns are `closed`. `variables` are
    for the template, such as `enable_thinking`.
    """
    unfinished = prompt and not closed and messages[-1].get("role") == "assistant"
    return str(
        tokenizer.apply_chat_template(
            plain_messages(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=prompt and not unfinished,
            continue_final_message=unfinished,
            **(variables or {}),
        )
    )


def call_each(calls: Sequence[Callable[[], T]], seconds: float) -> list[T]:
    """What the calls return, in order. One that takes longer than `seconds` is ended, and raises `Overdue`.

    They run on a thread of their own, which stays for later calls: an exception can be raised inside of it from here,
    on any platform, in any thread of the caller and without signals. It ends what runs in Python, as a template's loops
    do.
    """
    return _THREAD.call_each(calls, seconds) if calls else []


class _Work:
    """Calls on their way through the thread, and what became of them."""

    def __init__(self, calls: Sequence[Callable[[], Any]]):
        self.calls = calls
        self.results: list[Any] = []
        self.failure: BaseException | None = None
        self.began = time.monotonic()  # the call that runs now
        self.done = threading.Event()

    def run(self) -> None:
        try:
            for call in self.calls:
                self.began = time.monotonic()
                self.results.append(call())
        except BaseException as error:
            self.failure = error
        finally:
            self.done.set()


class _DeadlineThread:
    """One thread for all calls: a reply in a conversation needs one call, and a thread for each would cost as much."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()

    def call_each(self, calls: Sequence[Callable[[], T]], seconds: float) -> list[T]:
        with self._lock:
            work = _Work(calls)
            thread = self._started()
            self._queue.put(work)
            try:
                while not work.done.wait(_LOOK_S):
                    if time.monotonic() - work.began > seconds:
                        raise Overdue(len(work.results), seconds)
            except BaseException:
                self._give_up(thread)
                raise
        if work.failure is not None:
            raise work.failure
        return work.results

    def _started(self) -> threading.Thread:
        # A forked process has the object and not the thread.
        if self._thread is None or not self._thread.is_alive():
            self._queue = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._queue,), name="chat-template", daemon=True
            )
            self._thread.start()
        return self._thread

    def _give_up(self, thread: threading.Thread) -> None:
        self._thread = None
        self._queue.put(None)  # if it ends the call after all
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted)
        )
        thread.join(1.0)


def _serve(calls: queue.SimpleQueue[_Work | None]) -> None:
    try:
        while (work := calls.get()) is not None:
            work.run()
            del work  # a call's results are not kept until the next one
    except _Interrupted:
        pass  # it came after the call had ended


_THREAD = _DeadlineThread()
