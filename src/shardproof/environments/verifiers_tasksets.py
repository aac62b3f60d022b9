"""Tasksets of verifiers 0.4 and later: rows from the taskset, rewards from its tasks. Imported only where it is installed."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
    taskset_class,
)

from shardproof.environments.model_caller import ModelCaller, shared_endpoint
from shardproof.environments.model_endpoint import plain_messages
from shardproof.environments.protocol import Schema
from shardproof.environments.verifiers_chat import ID as CHAT
from shardproof.environments.verifiers_kind import Outcome, numbers_of

_NO_KEY = "SHARDPROOF_NO_KEY"  # the variable that holds the endpoint's key: it needs none


class TasksetEnvironment:
    """A taskset with its environment: verifiers' `Env` of that id."""

    def __init__(self, id: str, options: Mapping[str, Any]):
        for name in ("verifiers", "httpx", "aiohttp.access"):
            logging.getLogger(name).setLevel(logging.ERROR)  # they announce every rollout and every call
        _let_servers_import(sys.modules[taskset_class(id).__module__])
        self._id, self._env = id, dict(options["env"] or {})
        self._size, self._held_out = options["size"], options["evaluation_size"]
        self._args = {"train": options["args"] or {}, "evaluation": options["evaluation_args"]}
        self._made: dict[str, Any] = {}
        self._tasks: dict[str, list[Any]] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self.tools = _tools(self._environment("train"))

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The tasks of a split, as rows that find them again."""
        return [_row(task, index) for index, task in enumerate(self._load(split))]

    async def play(self, row: dict[str, Any], caller: ModelCaller) -> Outcome:
        """Run one episode of a row's task. Its calls come to the caller under the name of its trace."""
        split = row["split"]
        task = self._load(split)[row["index"]]
        if task.key != row["key"]:
            raise ValueError(
                f"task {row['index']} of {self._id!r} is another one now: its taskset is not the same twice"
            )
        await self._serve(split)
        url = (await shared_endpoint()).url
        client = EvalClientConfig(base_url=f"{url}/v1", api_key_var=_NO_KEY)
        context = ModelContext(model="policy", client=client)
        episode = await self._environment(split).run_episode(
            task, context, on_trace=lambda trace: caller.listen(trace.id)
        )
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
        facts = {name: value for trace in traces for name, value in numbers_of(trace.metrics).items()}
        for trace in traces:
            facts |= numbers_of(
                {name: each.score for name, each in trace.rewards.items() if each is not None}
            )
        return sum(trace.reward for trace in traces) / max(1, len(traces)), facts

    def _load(self, split: str) -> list[Any]:
        """The tasks of a split. Without settings of its own, the evaluation split is the head of the taskset."""
        if split not in self._tasks:
            taskset = self._environment(split).taskset
            begins, ends = 0, self._size
            if self._args["evaluation"] is None:
                begins, ends = (0, self._held_out) if split == "evaluation" else (self._held_out, ends)
                ends = ends if split == "evaluation" or ends is None else ends + begins
            if ends is None and not taskset.bounded:
                raise ValueError("the taskset has no end: set options.size")
            taskset = taskset if ends is None else taskset.take(ends)
            self._tasks[split] = list(taskset.skip(begins))
        return self._tasks[split]

    def _environment(self, split: str) -> Any:
        args = self._args[split]
        if args is None:
            return self._environment("train")
        if split not in self._made:
            taskset = {**args, "id": self._id}
            roles = _roles(self._id, self._env)
            self._made[split] = load_environment(
                resolve_env_config({**self._env, **roles, "taskset": taskset})
            )
        return self._made[split]

    async def _serve(self, split: str) -> None:
        """Have the environment's servers started, once: its shared tools, and what its agents call the model through."""
        key = split if self._args[split] is not None else "train"
        loop = asyncio.get_running_loop()
        if key not in self._serving or self._serving[key].done():
            ready: asyncio.Future[None] = loop.create_future()
            self._serving[key] = loop.create_task(self._hold(self._environment(key), ready))
            self._ready = {**getattr(self, "_ready", {}), key: ready}
        await asyncio.shield(self._ready[key])

    async def _hold(self, environment: Any, ready: asyncio.Future[None]) -> None:
        try:
            async with environment.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)


def _let_servers_import(module: ModuleType) -> None:
    """Let the processes that run its tools find a taskset that is not installed: one beside the recipe."""
    folder = Path(module.__file__ or "").resolve().parents[module.__name__.count(".")]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if not folder.is_relative_to(sys.prefix) and str(folder) not in given:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, given), str(folder)])


def _roles(id: str, env: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the agents: they run here, and chat with the task's tools, unless the environment says otherwise."""
    found = {}
    for name, info in env_config_type(id, env.get("id") or "").model_fields.items():
        if isinstance(info.default, AgentConfig):
            given = dict(env.get(name) or {})
            if "runtime" not in info.default.model_fields_set:
                given.setdefault("runtime", {"type": "subprocess"})
            if info.default.harness is None and default_harness_id(id) == "bash":
                given.setdefault("harness", {"id": CHAT})
            found[name] = given
    return found


def _row(task: Any, index: int) -> dict[str, Any]:
    data = task.data
    prompt = data.prompt if data.prompt is not None else ""
    wire = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [message_to_wire(m) for m in prompt]
    )
    if data.system_prompt:
        wire.insert(0, {"role": "system", "content": data.system_prompt})
    answer = getattr(data, "answer", None)
    row = {"prompt": plain_messages(wire), "index": index, "key": task.key}
    return row | ({"answer": answer} if isinstance(answer, (str, int, float)) else {})


def _tools(environment: Any) -> list[Schema]:
    """Schemas of the tools that the taskset and its tasks bring, as agents see them."""
    from mcp.server.mcpserver import MCPServer

    taskset = environment.taskset
    toolsets = [*taskset.toolsets(taskset.config), *type(taskset).task_type().toolsets(taskset.config.task)]
    found = []
    for toolset in toolsets:
        server, prefix = MCPServer("tools", log_level="ERROR"), toolset.server_name
        toolset.register(server)
        for tool in asyncio.run(server.list_tools()):
            function = {"description": tool.description or "", "parameters": tool.input_schema}
            found.append(
                {
                    "type": "function",
                    "function": {"name": f"{prefix}_{tool.name}" if prefix else tool.name, **function},
                }
            )
    return found
