"""The section about what answers the policy: environments, tools and the limits of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from shardproof.config.numbers import Bound, Processes, Seconds, Tokens
from shardproof.config.section import Section, known_or_users

ENVIRONMENTS = ("tools", "reasoning_gym", "verifiers", "openenv")


class Interpreter(Section):
    """Limits of the Python interpreter that the policy may run code in."""

    timeout_s: Seconds = 5.0
    """Longest time for one run of code, in seconds."""
    memory_mb: Annotated[int, Bound(gt=0, le=2**20)] = 512
    """Most memory of one run, in MiB."""
    files_mb: Annotated[int, Bound(ge=0, le=2**20)] = 16
    """Largest file that code may write into its own temporary folder, in MiB. 0: it may write none."""
    network: bool = False
    """Allow network connections."""
    output_chars: Annotated[int, Bound(gt=0, le=10**7)] = 10_000
    """Most characters of output that the policy is shown."""


class Tools(Section):
    """What the policy may call, for `environment.name = "tools"`."""

    functions: list[str] = Field(default_factory=list)
    """Your typed Python functions as `module:function`. Their signatures and docstrings describe them to the
    model."""
    mcp: list[str] = Field(default_factory=list)
    """MCP servers: a command to start, such as `"python -m my_server"`, or the URL of one that runs."""
    python: Interpreter | None = None
    """Give the policy a Python interpreter, in a process with limits. `{}` takes the default limits."""


class Environment(Section):
    """What answers the policy in a conversation of several turns. Without this section the policy has one
    turn."""

    name: str = "tools"
    """`tools`, `reasoning_gym`, `verifiers`, `openenv`, or your own class as `module:name`. See
    docs/environments.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the environment's class."""
    tools: Tools = Tools()
    """What the policy may call, for `name = "tools"`."""
    tool_format: str | None = None
    """How the model writes tool calls: `hermes`, `llama`, `mistral`, `xml` and others, see
    docs/tools.md. By default the format that the model's chat template itself writes."""
    max_turns: Annotated[int, Bound(gt=0, le=1024)] = 4
    """Most turns of the policy in one conversation."""
    max_tokens: Tokens | None = None
    """Most tokens of one conversation, prompt included. By default the model's context is the limit."""
    max_seconds: Seconds | None = None
    """Longest time that the environment may take for one conversation, all its turns together. By default
    there is no limit besides `timeout_s` for each turn."""
    truncation: Literal["train", "mask"] = "train"
    """What happens to conversations that a limit of turns, tokens or time ended: `"train"` learns from them
    with the reward that they have, `"mask"` leaves them out of the update."""
    on_rewrite: Literal["refuse", "split", "keep"] = "refuse"
    """What happens if the chat template rewrites earlier turns, for example drops thoughts: `"refuse"` stops
    before the first step, `"split"` trains each turn as a sequence of its own, behind what the template
    shows at that turn, `"keep"` appends to the sampled tokens and ignores what the template would rewrite."""
    reward_weight: Annotated[float, Bound(ge=-1e6, le=1e6)] = 1.0
    """Factor of the environment's own rewards in the total."""
    timeout_s: Seconds = 30.0
    """Longest time for one call of the environment, in seconds. A call that takes longer fails, and so does
    its conversation."""
    num_workers: Processes = 2
    """Processes per rank that run the environment, each with many conversations at once."""
    max_reply_chars: Annotated[int, Bound(gt=0, le=10**8)] = 20_000
    """Most characters of one reply. What is longer is cut, and the policy is told so."""
    on_error: Literal["zero", "stop"] = "zero"
    """What a failed environment does: `"zero"` leaves the conversation out of the update and counts it,
    `"stop"` ends the run."""
    python: str | None = None
    """Python interpreter of the workers, for environments whose packages do not fit those of the run, such as
    `"../envs/bin/python"`. By default the run's own."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return known_or_users(name, ENVIRONMENTS)

    @model_validator(mode="after")
    def _has_tools(self) -> Environment:
        given = self.tools.functions or self.tools.mcp or self.tools.python is not None
        if self.name == "tools" and not given:
            raise ValueError(
                "tools: name at least one of functions, mcp or python, or name another environment"
            )
        if self.name != "tools" and given:
            raise ValueError(f"tools are for name='tools'; environment {self.name!r} brings tools of its own")
        return self
