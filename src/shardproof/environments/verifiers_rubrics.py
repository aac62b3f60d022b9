"""Environments of verifiers 0.1: `load_environment`, turns of `MultiTurnEnv` and a `Rubric`. Imported only where it is installed."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any

import verifiers

from shardproof.environments.model_caller import ModelCaller, shared_endpoint
from shardproof.environments.model_endpoint import plain_messages
from shardproof.environments.protocol import Schema
from shardproof.environments.verifiers_kind import Outcome, numbers_of

_CALL_S = 86_400.0  # the pool's deadlines decide, not the program's own


class RubricEnvironment:
    """What a module's `load_environment` makes."""

    def __init__(self, id: str, options: Mapping[str, Any]):
        logging.getLogger("verifiers").setLevel(logging.ERROR)
        if options["env"]:
            raise ValueError("options.env is for tasksets of verifiers 0.4 and later")
        self._made = verifiers.load_environment(id, **(options["args"] or {}))
        self._evaluation = options["evaluation_args"] and verifiers.load_environment(
            id, **options["evaluation_args"]
        )
        self._size, self._held_out = options["size"], options["evaluation_size"]
        self.tools: list[Schema] = [_schema(tool) for tool in getattr(self._made, "tool_defs", None) or ()]

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The data set's rows. An environment's own evaluation data set comes before a part that is held out."""
        if split == "evaluation" and self._evaluation:
            data = self._evaluation.get_eval_dataset()
        elif split == "evaluation" and not self._held_out:
            data = (
                self._made.build_eval_dataset()
            )  # get_eval_dataset would fall back to the rows that are trained on
            if data is None:
                return []
        else:
            begins = self._held_out if split == "train" else 0
            data = self._made.get_dataset()
            ends = self._held_out if split == "evaluation" else len(data)
            data = data.select(range(begins, min(ends, len(data))))
        if split == "train" and self._size is not None:
            data = data.select(range(min(self._size, len(data))))
        rows = json.loads(json.dumps([dict(row) for row in data], default=str))
        return [{**row, "prompt": plain_messages(row["prompt"]), "input": row} for row in rows]

    async def play(self, row: dict[str, Any], caller: ModelCaller) -> Outcome:
        """Run one rollout and its rubric."""
        endpoint, name = await shared_endpoint(), uuid.uuid4().hex
        caller.listen(name)
        client = verifiers.ClientConfig(
            api_base_url=endpoint.url_of(name),
            api_key_var="SHARDPROOF_NO_KEY",
            timeout=_CALL_S,
            max_retries=0,
        )
        made = self._evaluation if row["split"] == "evaluation" and self._evaluation else self._made
        output = await made.run_rollout(row["input"], client, "policy", {})
        if output.get("error"):
            raise RuntimeError(str(output["error"]))
        return float(output["reward"]), numbers_of(output["metrics"])


def _schema(tool: Any) -> Schema:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
