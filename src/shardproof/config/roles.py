"""The sections about models that judge the policy: reward models, and a teacher."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import field_validator, model_validator

from shardproof.config.numbers import Bound, Count, CountOrNone, Seconds, Tokens
from shardproof.config.section import Section, StrategyName

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Names that no reward may have: metrics of all rewards, such as `reward/mean` and `eval/reward`, and parts that are not a
# reward's own.
RESERVED = (
    "mean",
    "std",
    "group_std",
    "solved",
    "greedy",
    "errors",
    "failed",
    "silent",
    "penalty",
    "environment",
    *("reward", "reward_se", "loss", "step", "version", "version_last"),
)


class RewardModel(Section):
    """A reward model: a sequence classifier with one label, sharded and attested like the policy."""

    path: str
    """Folder or hub id of the model, as `AutoModelForSequenceClassification` reads it, with its tokenizer. Every
    host needs the folder, or the network."""
    name: str = "model"
    """What metrics call its score: `reward/NAME`."""
    weight: Annotated[float, Bound(ge=-1e6, le=1e6)] = 1.0
    """Factor of the score in the sum of all rewards. 0: reported in the metrics but not learned from."""
    format: Literal["chat", "text"] = "chat"
    """What the model reads. `"chat"`: the prompt's messages and the completion, through the chat template of the
    model's own tokenizer. `"text"`: the prompt as the policy saw it and the completion, as plain text with the
    special tokens that its tokenizer adds."""
    strategy: StrategyName | None = None
    """Which version of PyTorch FSDP shards this model. By default `model.strategy`."""
    cpu_offload: bool | None = None
    """Keep this model's shards in host memory. By default `model.cpu_offload`."""
    max_tokens: Tokens | None = None
    """The most tokens of a text. A longer one is not scored: its completion is left out of the update and counted
    in `reward/failed`. By default as many as the model has positions for."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository. Enable it only for repositories that you trust."""

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise ValueError(
                f"{name!r} cannot name a reward model: use letters, digits, _ and -, and none of {', '.join(RESERVED)}"
            )
        return name


class Teacher(Section):
    """The model that `distillation` learns from: a folder that is loaded beside the policy, or a server."""

    path: str | None = None
    """Folder or hub id of the teacher's weights. It is sharded over the ranks like a reference. Its tokenizer must
    be the policy's."""
    strategy: StrategyName | None = None
    """Which version of PyTorch FSDP shards the teacher. By default `model.strategy`."""
    cpu_offload: bool | None = None
    """Keep the teacher's shards in host memory. By default `model.cpu_offload`."""
    trust_remote_code: bool = False
    """Run Python code from the teacher's repository. Enable it only for repositories that you trust."""
    url: str | None = None
    """A vLLM server that has the teacher, such as `http://localhost:8000`, instead of `path`. It scores at
    temperature 1, so `rollout.temperature` must be 1."""
    served_name: str | None = None
    """The name under which the server has the teacher. By default the first model that it lists."""
    key_variable: str | None = None
    """Environment variable with the server's API key. By default none is sent."""
    timeout_s: Seconds = 120.0
    """Longest time for the answer to one request, in seconds."""
    retries: CountOrNone = 4
    """How often a request is repeated after a failure, each time after a longer pause, before the run ends."""
    max_in_flight: Count = 16
    """Requests that each rank has open at a time."""
    requests_per_s: Annotated[float, Bound(gt=0.0, le=1e6)] | None = None
    """The most requests that each rank begins per second. By default as many as `teacher.max_in_flight` allows."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> Teacher:
        if (self.path is None) == (self.url is None):
            found = "neither" if self.path is None else "both"
            raise ValueError(f"a teacher has a path or a url, and this one has {found}")
        if self.url is not None and not self.url.startswith(("http://", "https://", "unix:")):
            raise ValueError(f"url={self.url!r} must begin with http://, https:// or unix:")
        of_path = {"strategy", "cpu_offload", "trust_remote_code"}
        of_url = {"served_name", "key_variable", "timeout_s", "retries", "max_in_flight", "requests_per_s"}
        odd = sorted((of_path if self.url is not None else of_url) & self.model_fields_set)
        changed = [key for key in odd if getattr(self, key) != type(self).model_fields[key].default]
        if changed:
            owner = "a teacher with a path" if self.url is not None else "a teacher with a url"
            raise ValueError(f"{changed[0]} is for {owner}")
        return self
