"""Environments of the package verifiers: its rollout runs as it is, and its model calls are turns of the policy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from shardproof.environments.adapting import require_split, wrong_options
from shardproof.environments.model_caller import ModelCaller, shared_endpoint
from shardproof.environments.protocol import Environment, Opening, Reply, Turn
from shardproof.environments.verifiers_kind import Kind
from shardproof.user_code import describe_error

_wrong = functools.partial(wrong_options, "verifiers")


class Verifiers(Environment):
    """A rollout of an environment that is written for verifiers. The reward is the one of its own rewards or rubric.

    `id` names the environment as verifiers does: a package that is installed, or a module. `args` are its settings:
    fields of the taskset's config, or arguments of `load_environment`. The evaluation split is the taskset with
    `evaluation_args` in their place, or the first `evaluation_size` tasks, which then are not trained on. `size` is the
    number of tasks to train on, for tasksets without end. `env` holds further settings of verifiers' own `[env]` table,
    such as an agent's harness.
    """

    replayable = False  # of what others wrote nothing is known

    def __init__(
        self,
        id: str,
        args: Mapping[str, Any] | None = None,
        evaluation_args: Mapping[str, Any] | None = None,
        evaluation_size: int = 0,
        size: int | None = None,
        env: Mapping[str, Any] | None = None,
    ):
        options = {"args": args, "evaluation_args": evaluation_args, "evaluation_size": evaluation_size}
        self._id, self._kind = id, _load(id, json.dumps({**options, "size": size, "env": env}))
        self.tools = self._kind.tools
        self.roles = ("user", "tool") if self.tools else ("user",)  # type: ignore[misc]
        self._caller: ModelCaller | None = None

    @classmethod
    def rows(cls, split: str, **options: Any) -> list[dict[str, Any]]:
        """The tasks of a split: "train" or "evaluation"."""
        require_split("verifiers", split)
        rows = cls(**options)._kind.rows(split)
        if not rows:
            fix = "set options.evaluation_args or options.evaluation_size" if split == "evaluation" else None
            raise _wrong(f"{options['id']!r} has no tasks in the split {split!r}.", fix)
        return [{**row, "split": split} for row in rows]

    async def start(self, row: dict[str, Any], seed: int) -> Opening:  # type: ignore[override]
        """Run a rollout until it calls the model."""
        self._caller = ModelCaller(await shared_endpoint())
        opening = await self._caller.begin(self._kind.play(row, self._caller))
        if opening is None:
            await self._caller.work  # its own error, if it has one
            raise RuntimeError(f"a rollout of {self._id!r} ended before it called the model")
        return opening

    async def step(self, turn: Turn) -> Reply:  # type: ignore[override]
        """Let its rollout go on with this turn until it calls the model again, or has its reward."""
        assert self._caller is not None
        reply = await self._caller.answer(turn)
        if reply is not None:
            return reply
        reward, facts = await self._caller.work
        return Reply(reward=reward, done=True, facts=facts)

    async def close(self) -> None:  # type: ignore[override]
        """End its rollout."""
        if self._caller is not None:
            await self._caller.close()


@functools.lru_cache(maxsize=8)
def _load(id: str, options: str) -> Kind:
    """The environment of this id, made once for all conversations of a worker."""
    try:
        import verifiers
    except ImportError as error:
        fix = (
            "install it into an environment of its own (python -m venv envs; envs/bin/pip install 'verifiers>=0.4') "
            "and set environment.python='envs/bin/python'"
        )
        raise _wrong(f"the package verifiers cannot be imported: {error}.", fix) from error
    given = json.loads(options)
    name = id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    try:
        bundled = f"verifiers.v1.tasksets.{name.lower()}"  # those that come with verifiers
        has_bundled = (
            not hasattr(verifiers, "load_environment") and importlib.util.find_spec(bundled) is not None
        )
        module = importlib.import_module(bundled if has_bundled else name)
        if hasattr(module, "load_environment") and hasattr(verifiers, "load_environment"):
            from shardproof.environments.verifiers_rubrics import RubricEnvironment

            return RubricEnvironment(id, given)
        from shardproof.environments.verifiers_tasksets import TasksetEnvironment

        return TasksetEnvironment(id, given)
    except Exception as error:
        fix = "name an environment that is installed for the interpreter of environment.python, and correct its args"
        raise _wrong(f"{id!r} cannot be loaded: {describe_error(error)}.", fix) from error
