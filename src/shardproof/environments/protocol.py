"""What an environment is, and what flows between it and the policy. Standard library only: workers import it anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

Message = dict[str, Any]  # {"role": ..., "content": ...}, as chat templates take them
Schema = dict[str, Any]  # of a tool, as chat templates take it: {"type": "function", "function": {...}}


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote: the tool's name and its arguments."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""  # where the model's format has one


@dataclass(frozen=True)
class Turn:
    """What the policy said in one turn, as an environment reads it."""

    text: str  # the whole turn, without the token that ended it
    content: str = ""  # without thoughts and tool calls; the same as `text` where the format has neither
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()  # what looks like a call and is none: why, for each
    number: int = 1  # of the policy's turn in the conversation
    finished: bool = True  # False: a limit of tokens cut the turn, and the conversation ends with it
    last: bool = False  # no turn of the policy follows, whatever the reply says


@dataclass(frozen=True)
class Opening:
    """How a conversation begins: messages in place of the row's prompt, and the tools that the policy may call."""

    messages: Sequence[Message] | str | None = None  # None: the row's prompt
    tools: Sequence[Schema] | None = None  # None: those of the environment


@dataclass(frozen=True)
class Reply:
    """An environment's answer to a turn."""

    messages: Sequence[Message] | str = ()  # a string is one message of the environment's first role
    reward: float | None = None  # for this turn
    done: bool = False  # the conversation is over
    fresh: bool = (
        False  # `messages` are the whole conversation from now on: the policy no longer reads what was before
    )
    facts: Mapping[str, float] = field(default_factory=dict)  # numbers for the metrics, as environment/NAME


class Environment:
    """One conversation about one data row. An object is made for each, by calling the class with `environment.options`.

    Subclasses define `step`, and usually `start`; these and `close` may be `async`. Objects live in worker processes, many
    in each: what waits (for a server, a sandbox) should be async, since a plain method keeps its worker from doing anything
    else.
    """

    roles: ClassVar[Sequence[str]] = ("user",)  # of the messages that it sends
    tools: Sequence[Schema] = ()  # that the policy may call
    # Whether `start` and the same turns lead to the same state again: a conversation whose worker died is rebuilt so.
    replayable: ClassVar[bool] = True
    # Longest time for one `start` or `step`; the worker sets it to `environment.timeout_s`.
    timeout_s: float = 30.0

    def start(self, row: dict[str, Any], seed: int) -> Opening | Sequence[Message] | str | None:
        """Begin a conversation about a copy of a data row. None: with the row's prompt.

        What is random should follow from `seed`. It depends on the run's seed, the step and the prompt's place in the
        batch: conversations that are compared, of one group, have the same. Evaluations have the same each time.
        """
        return None

    def step(self, turn: Turn) -> Reply | Sequence[Message] | str | None:
        """Answer the policy's turn. A string or messages: go on with them. None: the conversation is over."""
        raise NotImplementedError(f"{type(self).__name__} has no step(turn)")

    def close(self) -> None:
        """Give up what the conversation holds. Called once at its end, also after a failure."""

    @classmethod
    def rows(cls, split: str, **options: Any) -> Sequence[dict[str, Any]]:
        """The data rows of a split, for `data.train = "environment:SPLIT"`."""
        raise NotImplementedError(f"{cls.__name__} has no rows(split): name a data file instead")


@dataclass(frozen=True)
class Failure:
    """An environment that raised, hung, died or answered with something else: its conversation ends here."""

    error: str  # one line
    out_of_time: bool = False  # environment.max_seconds ended the conversation: a limit, not a fault


Answer = Opening | Reply | Failure
