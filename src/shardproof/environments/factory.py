"""How a worker makes environments: the class or function that a recipe names, called with the recipe's options."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from shardproof.environments.answers import NotAnAnswer, as_json, schemas
from shardproof.environments.protocol import Environment
from shardproof.environments.spec import EnvironmentFacts
from shardproof.errors import ShardproofError, fail
from shardproof.user_code import describe_error, import_named


class Factory:
    """Makes environments. What it is given is tried out with one object, which tells the facts."""

    def __init__(self, name: str, options: Mapping[str, Any], timeout_s: float, max_reply_chars: int):
        self.name, self.max_reply_chars = name, max_reply_chars
        self._options, self._timeout_s = options, timeout_s
        self._first: Environment | None = None  # tried out, and closed
        self._call = import_named("environment", name)
        self._require_options()
        try:
            made = self.make()
        except NotAnAnswer as error:
            raise self._wrong(f"{error}.") from error
        except ShardproofError:  # of an environment of ours, which says what is wrong
            raise
        except (Exception, SystemExit) as error:
            raise self._wrong(f"cannot be made: {describe_error(error)}") from error
        self._first, self.facts = made, self._facts(made)
        _close(made)

    def make(self) -> Environment:
        """An environment for one conversation."""
        made = self._call(**deepcopy(dict(self._options)))
        if not isinstance(made, Environment):
            raise NotAnAnswer(f"makes a {type(made).__name__}, which is no shardproof.Environment")
        if made is self._first:
            raise NotAnAnswer("makes the same object again; each conversation needs one of its own")
        made.timeout_s = self._timeout_s
        return made

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The data rows of a split."""
        assert self._first is not None
        rows = list(self._first.rows(split, **deepcopy(dict(self._options))))
        if not all(isinstance(row, dict) for row in rows):
            raise NotAnAnswer("a row is not a dict")
        return rows

    def _facts(self, made: Environment) -> EnvironmentFacts:
        roles = made.roles
        if (
            not isinstance(roles, (list, tuple))
            or not roles
            or not all(isinstance(r, str) and r for r in roles)
        ):
            raise self._wrong(f"has roles={roles!r}, expected the roles of its messages, such as ('user',).")
        try:
            tools = schemas(made.tools)
            as_json(tools)
        except NotAnAnswer as error:
            raise self._wrong(f"cannot be used: {error}.") from error
        return EnvironmentFacts(tuple(roles), tuple(tools), bool(made.replayable))

    def _require_options(self) -> None:
        if not callable(self._call):
            raise self._wrong(f"is a {type(self._call).__name__}, expected a class or a function.")
        try:
            signature = inspect.signature(self._call)
        except ValueError:  # written in C, without a signature to look at
            return
        try:
            signature.bind(**self._options)
        except TypeError as error:
            taken = ", ".join(signature.parameters) or "none"
            raise self._wrong(f"does not fit environment.options: {error}. It takes: {taken}.") from error

    def _wrong(self, problem: str) -> ShardproofError:
        fix = (
            "correct environment.name or environment.options, or repair that class; see docs/environments.md"
        )
        return fail("C001", "environment", f"environment {self.name!r} {problem}", fix=fix)


def _close(environment: Environment) -> None:
    async def over(closing: Any) -> None:
        await closing

    with contextlib.suppress(Exception, SystemExit):
        closing: Any = environment.close()  # type: ignore[func-returns-value]
        if inspect.isawaitable(closing):
            asyncio.run(over(closing))
