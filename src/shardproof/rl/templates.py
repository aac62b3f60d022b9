"""Untrusted tokenizers and chat templates, run so that neither can end the run.

Templates have a deadline: jinja's sandbox keeps them from doing harm, not from looping forever.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

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


def call_each(calls: Sequence[Callable[[], T]], seconds: float) -> list[T]:
    """What the calls return, in order. One that takes longer than `seconds` is ended, and raises `Overdue`.

    They run on a thread of their own: an exception can be raised inside of it from here, on any platform, in any thread
    of the caller and without signals. It ends what runs in Python, as a template's loops do.
    """
    results: list[T] = []
    failure: list[BaseException] = []
    began = time.monotonic()

    def work() -> None:
        nonlocal began
        try:
            for call in calls:
                began = time.monotonic()
                results.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="chat-template", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and time.monotonic() - began > seconds:
                raise Overdue(len(results), seconds)
    finally:
        if thread.is_alive():
            _interrupt(thread)
    if failure:
        raise failure[0]
    return results


def _interrupt(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))
    thread.join(1.0)
