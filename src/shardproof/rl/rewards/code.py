"""The built-in reward `code`: the tests of a row that the completion's program passes, each run in the sandbox.

Every test has a process of its own. What the program printed, or its function returned, is compared here, outside of that
process, which never holds what is expected. A test that is code runs in the program's process, behind it, and ends with a
word that is drawn anew: to leave early, or to print what success looks like, is no success.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import secrets
import time
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from shardproof.environments.sandbox import Limits, Sandbox, Script
from shardproof.rl.rewards.calling import Measured
from shardproof.rl.rewards.options import number, one_of, text
from shardproof.rl.rewards.specs import Surroundings

_BLOCK = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("python", "py", "python3")
_OUTPUT_CHARS = 2**22  # of up to four bytes: all that the sandbox lets a program print
_SLACK_S = 30.0  # for a busy machine to end the last test
# The entry's concurrency is the limit: what waited for the sandbox would have lost of its time.
_AT_ONCE = 4096
_PREPARES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.Import, ast.ImportFrom, ast.Pass),
)

_CALL = """
import json as _json
_function = globals().get({name!r}) or getattr(globals()["Solution"](), {name!r})
_said = _json.dumps(_function(*_json.loads({given!r})))
"""
_END = """
import os as _os, sys as _sys
_sys.stdout.flush()
_os.write(1, ("\\n{word}\\n" + {said}).encode())
"""


class Case(NamedTuple):
    """One test: what the program reads and should print, or code that runs behind it, and what a function should return."""

    given: str = ""
    expected: str = ""
    code: str | None = None
    returns: Any = None
    is_call: bool = False


@dataclass(frozen=True)
class Code:
    """The share of a row's tests that the program in the completion passes, or 1 for all of them and 0 otherwise."""

    column: str = "tests"
    score: str = "share"
    fenced: bool = True  # the program is a block between ``` marks; else the whole completion
    timeout_s: float = 5.0
    total_s: float = 60.0
    memory_mb: int = 512
    max_tests: int | None = None
    prelude: str = ""  # code that runs before the program, such as "from typing import *"
    _sandbox: list[Sandbox] = field(default_factory=list, init=False, repr=False, compare=False)
    concurrency: ClassVar[None] = None  # as many at once as the recipe has workers

    def __post_init__(self) -> None:
        one_of("score", self.score, ("share", "all"))
        if not isinstance(self.column, str) or not isinstance(self.fenced, bool):
            raise ValueError("column is text, and fenced is true or false")
        text("prelude", self.prelude)
        try:
            compile(self.prelude, "<prelude>", "exec")
        except SyntaxError as error:
            raise ValueError(f"prelude is not Python: {error}") from error
        number("timeout_s", self.timeout_s, 0.01, 86400)
        number("total_s", self.total_s, 0.01, 86400)
        number("memory_mb", self.memory_mb, 16, 2**20, whole=True)
        if self.max_tests is not None:
            number("max_tests", self.max_tests, 1, 10**6, whole=True)

    @property
    def longest_s(self) -> float:
        """It limits itself: a program without end is a wrong one, not a reward that failed."""
        return self.total_s + _SLACK_S

    def prepare(self, around: Surroundings) -> None:
        """C001 if code cannot be limited on this machine."""
        limits = Limits(timeout_s=self.timeout_s, memory_mb=self.memory_mb, output_chars=_OUTPUT_CHARS)
        sandbox = Sandbox(limits, "reward 'code'", _AT_ONCE)
        sandbox.check()
        self._sandbox.append(sandbox)

    def check_row(self, row: dict[str, Any]) -> None:
        """ValueError if the row has no tests, or one that no program could pass, or any."""
        for case in cases_of(row, self.column)[: self.max_tests]:
            if not case.is_call and case.code is not None:
                _require_test(case.code, self.column)

    async def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> Measured:
        cases = cases_of(row, self.column)[: self.max_tests]
        program = program_of(completion) if self.fenced else completion
        if program is None:
            return Measured(0.0, {"no_program": 1.0, "timeouts": 0.0})
        until, passed, late = time.monotonic() + self.total_s, 0, False
        for case in cases:
            left = until - time.monotonic()
            try:
                held = await asyncio.wait_for(self._holds(program, case), left) if left > 0 else None
            except asyncio.TimeoutError:  # noqa: UP041  # of the whole, not of this test
                held = None
            passed += held is True
            late = held is None
            # What ran out of time once would do so again; and of all tests one that fails decides.
            if late or (self.score == "all" and not held):
                break
        value = passed / len(cases) if self.score == "share" else float(passed == len(cases))
        return Measured(value, {"no_program": 0.0, "timeouts": float(late)})

    async def _holds(self, program: str, case: Case) -> bool | None:
        """Whether the program passes; None if it ran out of time."""
        (sandbox,) = self._sandbox[:1]
        if case.code is None:
            script = Script(case.given.encode(errors="replace"), before=self.prelude)
            ran = await sandbox.run(program, script)
            said = ran.output.decode("utf-8", "replace")
            good = ran.status == 0 and not ran.left_out and _lines(said) == _lines(case.expected)
        else:
            word = secrets.token_hex(16)
            end = _END.format(word=word, said="_said" if case.is_call else "''")
            script = Script(module="program", before=self.prelude, behind=f"{case.code}\n{end}")
            ran = await sandbox.run(program, script)
            _, mark, said = ran.output.decode("utf-8", "replace").rpartition(f"\n{word}\n")
            good = ran.status == 0 and bool(mark)
            good = good and (_is_returned(said, case.returns) if case.is_call else not said)
        is_late = ran.ended is not None and ran.ended.startswith("stopped: it took")
        return None if is_late else good


def program_of(completion: str) -> str | None:
    """The last block that is called Python, or else the last one without a language; None if there is neither."""
    blocks = [(language.strip().lower(), text) for language, text in _BLOCK.findall(completion)]
    named = [text for language, text in blocks if language in _LANGUAGES]
    # Behind a program there may be a block of what it prints.
    found = named or [text for language, text in blocks if not language]
    return found[-1] if found else None


def cases_of(row: dict[str, Any], column: str) -> list[Case]:
    """The row's tests; ValueError if there are none.

    They are code, or a list of pieces of code; a list of {"input", "output"}; or {"inputs": [...], "outputs": [...]},
    also called "input" and "output", with "fn_name" if a function is to be called. All this also as JSON in text, or
    under "test_cases".
    """
    found: Any = row
    for key in [column] if column in row else column.split("."):
        if not isinstance(found, dict) or key not in found:
            raise ValueError(f"the row has no {column!r}")
        found = found[key]
    if isinstance(found, str) and found.lstrip()[:1] in ("{", "["):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise ValueError(f"the row's {column!r} is not valid JSON: {error}") from error
    if isinstance(found, dict) and "test_cases" in found:
        found = found["test_cases"]
    if isinstance(found, dict) and (columns := _columns(found)):
        (inputs, outputs), name = (found[key] for key in columns), found.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError(f"the row's {column!r} has not as many {columns[1]!r} as {columns[0]!r}")
        found = [{"input": a, "output": b, "fn_name": name} for a, b in zip(inputs, outputs, strict=True)]
    cases = [_case(each, column) for each in (found if isinstance(found, list) else [found])]
    if not cases:
        raise ValueError(f"the row's {column!r} is empty")
    return cases


def _columns(found: dict[str, Any]) -> tuple[str, str] | None:
    """The keys of all inputs and of all outputs, if that is how the tests are given."""
    if "inputs" in found and "outputs" in found:
        return "inputs", "outputs"
    are_lists = isinstance(found.get("input"), list) and isinstance(found.get("output"), list)
    return ("input", "output") if are_lists and found.get("fn_name") is None else None


def _case(given: Any, column: str) -> Case:
    if isinstance(given, str) and given.strip():
        return Case(code=given)
    if isinstance(given, dict) and "input" in given and "output" in given:
        if given.get("testtype") == "functional" and isinstance(given["input"], str):
            given = _with_arguments(given, column)
        if (name := given.get("fn_name")) is not None:
            return _call(name, given["input"], given["output"], column)
        if given["output"] is None:
            raise ValueError(f"the row's {column!r} has a test whose 'output' is null")
        return Case("" if given["input"] is None else _text(given["input"]), _text(given["output"]))
    raise ValueError(f"the row's {column!r} holds {type(given).__name__}; expected code or input and output")


def _with_arguments(given: dict[str, Any], column: str) -> dict[str, Any]:
    """A test as LiveCodeBench writes it, each argument as JSON in a line of its own, as one of a function."""
    metadata = given.get("metadata")
    name = given.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, dict) else None)
    if name is None:
        raise ValueError(
            f"the row's {column!r} has a test of testtype 'functional' without metadata.func_name or fn_name"
        )
    try:
        arguments = [json.loads(line) for line in given["input"].split("\n") if line.strip()]
        output = json.loads(given["output"])
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the row's {column!r} has a test of testtype 'functional' that is not JSON: {error}"
        ) from error
    return {"fn_name": name, "input": arguments, "output": output}


def _call(name: object, arguments: object, output: object, column: str) -> Case:
    if not isinstance(arguments, list):
        raise ValueError(f"the row's {column!r} has 'fn_name', and an 'input' that is no list of arguments")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the row's {column!r}: fn_name={name!r} is not the name of a function")
    try:
        given, _ = json.dumps(arguments), json.dumps(output)
    except TypeError as error:
        raise ValueError(f"the row's {column!r} cannot be written as JSON: {error}") from error
    return Case(code=_CALL.format(name=name, given=given), returns=output, is_call=True)


def _require_test(code: str, column: str) -> None:
    """ValueError for a test that is not Python, which no program passes, or that cannot fail, which every program passes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
            compile(tree, "<test>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the row's {column!r} has a test that is not Python: {error}") from error
    if all(map(_cannot_fail, tree.body)):
        raise ValueError(
            f"the row's {column!r} has a test that asserts and calls nothing, so that any program would pass it (checks "
            "that are in a function must be called; code that only prepares belongs into the option prelude)"
        )


def _cannot_fail(statement: ast.stmt) -> bool:
    """Whether a statement of a test only prepares something."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):  # a table, say, that was meant as JSON
        return not any(isinstance(part, ast.Call) for part in ast.walk(statement))
    if isinstance(statement, ast.If):  # the module in which tests run has another name
        is_main = ast.unparse(statement.test) in ("__name__ == '__main__'", "'__main__' == __name__")
        return is_main and all(map(_cannot_fail, statement.orelse))
    return isinstance(statement, _PREPARES)


def _is_returned(said: str, expected: Any) -> bool:
    """Whether JSON of the program's is what is expected; some data sets have each output in a list."""
    try:
        found, expected = json.loads(said), json.loads(json.dumps(expected))
        return bool(found == expected or [found] == expected)
    except (ValueError, RecursionError):
        return False


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Without space at the ends of lines and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
