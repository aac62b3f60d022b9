"""Typed Python functions as tools: their schemas, and how they are run without holding up other conversations.

An async function runs in the worker's event loop. A plain one runs in a thread, because the loop serves many
conversations. Python cannot end a thread: one that takes too long is asked to stop by an exception, which ends Python
code but not a call into C that never comes back. Such a thread is left alone, up to a number of them; the conversation
is told and goes on. Code that keeps the interpreter lock itself stops the whole worker, which the pool then replaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import ctypes
import functools
import inspect
import os
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from shardproof.environments.arguments import as_declared
from shardproof.environments.protocol import Reply, Schema
from shardproof.environments.toolbox import Result, Tool, ToolError, ToolTimeout, as_text, describe
from shardproof.errors import fail
from shardproof.user_code import end_fork_of, import_named

_THREADS, _LEFT_ALONE = 32, 256  # plain functions that run at once; threads that may be given up, per worker
Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "shardproof_tool"


def tool(function: Method) -> Method:
    """Mark a method of a `ToolEnvironment` as a tool, and return it. Its signature and docstring describe it to the model."""
    setattr(function, _MARK, True)
    return function


class FunctionTool(Tool):
    """A function, or a method of the environment, as a tool."""

    def __init__(self, function: Callable[..., Any], method: str | None = None):
        self.schema = schema_of(function)
        self._function, self._method = function, method

    async def call(self, owner: object, arguments: dict[str, Any], seconds: float) -> Result:
        # A copy: what the function does to its arguments must not reach what is recorded of the turn.
        given = as_declared(self.parameters, copy.deepcopy(arguments))
        function = getattr(owner, self._method) if self._method else self._function
        call = functools.partial(function, **given)
        if inspect.iscoroutinefunction(function):
            return _shown(await _within(call(), seconds))
        result = await _in_thread(lambda: _shown(call()), seconds)
        return result if isinstance(result, str | Reply) else _shown(await _within(result, seconds))


def function_tools(functions: Sequence[str | Callable[..., Any]]) -> list[Tool]:
    """Tools of functions, each given as it is or as `module:function`."""
    found = [import_named("tool", each) if isinstance(each, str) else each for each in functions]
    return [FunctionTool(each) for each in found]


def method_tools(owner: type) -> list[Tool]:
    """Tools of the methods of a class that are marked with `tool`, in the order of their definition."""
    names = [
        name
        for base in reversed(owner.__mro__)
        for name, value in vars(base).items()
        if getattr(value, _MARK, False)
    ]
    return [FunctionTool(getattr(owner, name), method=name) for name in dict.fromkeys(names)]


def schema_of(function: Callable[..., Any]) -> Schema:
    """The schema that transformers makes of a function's signature and docstring; C001 by name if it cannot."""
    if not callable(function) or not hasattr(function, "__name__"):
        raise _refused(repr(function)[:100], "it is no function")
    name = f"{function.__module__}:{function.__qualname__}"
    if not inspect.getdoc(function):
        raise _refused(name, "it has no docstring")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _refused(name, f"its argument {parameter.name!r} cannot be given by name")
        if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls"):
            raise _refused(name, f"its argument {parameter.name!r} has no type")
    try:
        from transformers.utils import chat_template_utils
    except ImportError as error:
        message = f"{name!r} needs transformers to be described to the model: {error}."
        fix = "pip install transformers jinja2, for the interpreter that the workers run under"
        raise fail("C001", "tools", message, fix=fix) from error
    try:
        with _without_torch(chat_template_utils):
            schema = chat_template_utils.get_json_schema(function)
        _refuse_classes(function)
    except Exception as error:  # transformers' own kinds, and whatever evaluating annotations may raise
        raise _refused(name, describe(error)) from error
    return schema


@contextlib.contextmanager
def _without_torch(module: Any) -> Iterator[None]:
    """Keep transformers from importing torch (2 s and 200 MB per worker) just to know what a tensor's annotation is."""
    asked = getattr(module, "is_torch_available", None)
    if asked is None or "torch" in sys.modules:  # a function with a tensor in its signature has imported it
        yield
        return
    module.is_torch_available = lambda: False
    try:
        yield
    finally:
        module.is_torch_available = asked


def _refuse_classes(function: Callable[..., Any]) -> None:
    """Refuse annotations that a model cannot write: transformers describes every class that it does not know as an object."""
    for parameter, hint in typing.get_type_hints(function).items():
        if parameter in ("return", "self", "cls"):
            continue
        for each in _parts(hint):
            known = each in (
                int,
                float,
                str,
                bool,
                list,
                tuple,
                dict,
                type(None),
                Any,
            ) or typing.is_typeddict(each)
            if isinstance(each, type) and not known:
                raise TypeError(f"{parameter} is a {each.__name__}, which a model cannot write")


def _parts(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is typing.Literal:
        return
    parts = typing.get_args(hint)
    if not parts:
        yield hint
    for part in parts:
        yield from _parts(part)


def _refused(name: str, why: str) -> Exception:
    return fail(
        "C001",
        "tools",
        f"{name!r} cannot be a tool: {why}.",
        fix="annotate every argument with a plain type (str, int, float, bool, list, dict, Literal), and write a "
        "docstring that says what the function does and has a line for each argument under 'Args:'",
    )


def _shown(value: object) -> Any:
    return value if isinstance(value, Reply) or inspect.isawaitable(value) else as_text(value)


async def _within(work: Any, seconds: float) -> Any:
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:  # noqa: UP041  # another class in Python 3.10
        raise ToolTimeout from None


class _GivenUp(SystemExit):
    """Raised in a thread whose call took too long. A SystemExit ends a thread without a word."""


_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
_left_alone: set[threading.Thread] = set()


async def _in_thread(work: Callable[[], Any], seconds: float) -> Any:
    """What `work` returns, from a thread; ToolTimeout if it takes longer than `seconds`."""
    loop = asyncio.get_running_loop()
    slots = _slots.setdefault(loop, asyncio.Semaphore(_THREADS))
    until = loop.time() + seconds
    await _within(slots.acquire(), seconds)
    call = _Call(work, loop)
    try:
        return await _within(call.answer, until - loop.time())
    finally:
        if call.answer.cancelled():  # it took too long, or the conversation was given up
            call.give_up()
        _left_alone.difference_update([each for each in _left_alone if not each.is_alive()])
        if len(_left_alone) < _LEFT_ALONE:
            slots.release()


class _Call:
    """A plain function at work in a thread of its own."""

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop):
        self.answer: asyncio.Future[Any] = loop.create_future()
        self._work, self._loop = work, loop
        self._lock, self._over = threading.Lock(), False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="tool call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        process = os.getpid()
        value, error = None, None
        try:
            value = self._work()
        except BaseException as raised:  # a tool that exits its process is one that failed
            error = raised if isinstance(raised, Exception) else ToolError(describe(raised))
        end_fork_of(process)
        with self._lock:
            self._over = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, value, error)

    def _deliver(self, value: Any, error: Exception | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(error)

    def give_up(self) -> None:
        """Ask the thread to stop, and stop waiting for it."""
        with self._lock:  # until it has this lock the thread is there, and its identity is not another's
            if not self._over and self._thread.ident is not None:
                identity = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(_GivenUp))
                _left_alone.add(self._thread)
