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


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as its tokenizer's chat template writes it. With `prompt` the model's next turn begins at its end.

    `variables` are for the template, such as `enable_thinking`.
    """
    # A conversation that ends in the model's own turn is a turn to finish; a new one would follow a closed answer.
    unfinished = prompt and messages[-1].get("role") == "assistant"
    return str(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages],
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
