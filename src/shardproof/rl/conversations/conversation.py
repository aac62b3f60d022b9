"""One conversation: its tokens so far, what was said in each turn, and the trajectory that it becomes at its end."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardproof.environments.protocol import Failure, Message, Opening, Reply, Schema, Turn
from shardproof.rl.chat.format import ChatFormat, PlainFormat
from shardproof.rl.data import Prompt
from shardproof.rl.sources.rendering import Rendering
from shardproof.rollout.trajectory import TRUNCATED, Ending, Segment, Trajectory

_MAX_REPLY = 2000  # characters of a message that are kept beside the tokens


@dataclass(frozen=True)
class Rules:
    """What all conversations of a run follow: their format and their limits."""

    format: ChatFormat | PlainFormat
    is_templated: bool  # it is that of a chat template, and prompts go through it too
    decode: Callable[[Sequence[int], bool], str]  # (tokens, without special ones)
    prompt_column: str
    roles: Sequence[str]  # of the environment's messages
    tools: Sequence[Schema]
    max_turns: int
    max_tokens: int | None  # of one sequence; None: the model has no limit
    max_seconds: float | None
    splits: bool  # the template rewrites earlier turns: each turn is a sequence of its own
    masks: bool  # conversations that a limit ended are not trained on
    filler: tuple[int, ...]  # stands for the prompt of a conversation that failed before it had one
    reward_weight: float = 1.0  # of the environment's rewards in the total
    rendering: Rendering = field(default_factory=Rendering)  # the system prompt, and the template's variables
    speaks: bool = True  # no reward of the environment is 0; False: it has nothing to say then, as tools have


@dataclass
class Conversation:
    """A conversation that goes on until `ended` says why it does not."""

    prompt: Prompt
    seed: int  # of the policy's draws
    current: Trajectory  # the sequence that the policy reads and continues
    rules: Rules
    ended: Ending = ""
    error: str = ""  # of the environment, where that ended it
    earlier: list[Trajectory] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # all of them; kept where turns are split
    tools: Sequence[Schema] = ()
    seconds: float = 0.0  # of the environment
    turn: Turn | None = None  # the last one
    turns: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, list[float]] = field(default_factory=dict)
    spoke: bool = False  # the environment gave a reward

    @property
    def format(self) -> ChatFormat | PlainFormat:
        """How messages become tokens, with the row's own variables for the template."""
        return self.rules.format.with_variables(self.prompt.template)

    @property
    def number(self) -> int:
        """Of the policy's turns so far."""
        return len(self.turns)

    @property
    def draw_seed(self) -> int:
        """Of the policy's next turn: with one seed for all, every turn would draw the same numbers."""
        return turn_seed(self.seed, self.number)

    def begin(self, opening: Opening, max_new_tokens: int) -> None:
        """Take what the environment begins with: its own messages, or the row's prompt."""
        rules, prompt = self.rules, self.prompt
        self.tools = rules.tools if opening.tools is None else opening.tools
        given = prompt.row.get(rules.prompt_column)
        if opening.messages is not None:
            self.messages = as_messages(opening.messages, "user")
        elif given is not None:
            self.messages = as_messages(given, "user")
        if not self.messages:
            column = rules.prompt_column
            raise ValueError(f"start() gave no messages, and the row has no column {column!r}")
        self.messages = self._begun(self.messages)
        if opening.messages is None and opening.tools is None:
            segments: Sequence[Segment] = [Segment(prompt.tokens, "prompt")]
        else:
            segments = self.format.prompt(self.messages, self.tools)
        self.current = replace(self.current, segments=tuple(segments))
        if not self._has_room(segments, max_new_tokens):
            num = sum(len(segment.tokens) for segment in segments)
            raise ValueError(f"its {num} tokens leave no room for a turn: the limit is {rules.max_tokens}")

    def take(self, trajectory: Trajectory, max_new_tokens: int) -> Turn:
        """Take the policy's turn, which is the last segment; returns it as the environment reads it."""
        self.current = trajectory
        number = self.number + 1
        is_last = number == self.rules.max_turns or not self._has_room(trajectory.segments, max_new_tokens)
        said = trajectory.segments[-1].tokens
        self.turns.append({"text": "", "calls": [], "malformed": [], "reward": 0.0, "reply": []})
        turn = self.format.turn(
            said, trajectory.has_stop_token, number, is_last or not trajectory.finished, self.tools
        )
        self.turn = replace(turn, finished=trajectory.finished)
        self.turns[-1] |= {
            "text": self.turn.text,
            "calls": [asdict(call) for call in self.turn.calls],
            "malformed": list(self.turn.malformed),
        }
        return self.turn

    def answer(self, reply: Reply, max_new_tokens: int) -> None:
        """Take the environment's reply to the last turn: go on with it, or end."""
        assert self.turn is not None, "a reply follows a turn"
        messages = as_messages(reply.messages, self.rules.roles[0])
        self._note(reply, messages)
        limit = self.rules.max_seconds
        if not self.turn.finished:
            self.ended = "length"
        elif reply.done or not messages:
            self.ended = "done"
        elif self.number == self.rules.max_turns:
            self.ended = "turns"
        elif limit is not None and self.seconds >= limit:
            self.ended = "time"
        elif self.turn.last:
            self.ended = "tokens"
        else:
            self._go_on(messages, reply.fresh, max_new_tokens)

    def _note(self, reply: Reply, messages: Sequence[Message]) -> None:
        self.spoke |= reply.reward is not None
        reward = 0.0 if reply.reward is None else float(reply.reward)
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}, which is not a finite number")
        *before, last = self.current.segments
        weighed = replace(last, reward=self.rules.reward_weight * reward)
        self.current = replace(self.current, segments=(*before, weighed))
        shown = [
            {"role": str(m.get("role", "")), "content": str(m.get("content", ""))[:_MAX_REPLY]}
            for m in messages
        ]
        self.turns[-1] |= {"reward": reward, "reply": shown}
        for name, value in reply.facts.items():
            if math.isfinite(value):
                self.facts.setdefault(str(name), []).append(float(value))

    def _go_on(self, messages: list[Message], fresh: bool, max_new_tokens: int) -> None:
        rules = self.rules
        assert self.turn is not None
        whole = [*self.messages, self.format.message(self.turn), *messages]
        if fresh or rules.splits:
            whole = self._begun(messages) if fresh else whole
            segments = tuple(self.format.prompt(whole, self.tools))
        else:
            said = self.current.segments[-1].tokens
            ended_with = said[-1] if self.current.finished else None
            reply = self.format.reply(messages, ended_with, self.tools, self.current.has_stop_token)
            if not any(segment.tokens for segment in reply):
                self.ended = "done"  # nothing was said, and a turn would follow a turn
                return
            segments = (*self.current.segments, *reply)
        if not self._has_room(segments, max_new_tokens):
            self.ended = "tokens"
            return
        if fresh or rules.splits:
            self.earlier.append(self.current)
        self.messages = whole
        self.current = replace(self.current, segments=segments, finished=False)

    def _begun(self, messages: list[Message]) -> list[Message]:
        """Messages that the policy reads first, with the system prompt before them."""
        if not self.rules.is_templated:
            return messages
        return [dict(message) for message in self.rules.rendering.messages(messages)]

    def _has_room(self, segments: Sequence[Segment], max_new_tokens: int) -> bool:
        """Whether another turn of the policy fits behind these segments."""
        num = sum(len(segment.tokens) for segment in segments)
        return self.rules.max_tokens is None or num + max_new_tokens <= self.rules.max_tokens

    @property
    def place(self) -> str:
        """Where it is, for errors."""
        return f"turn {self.number}" if self.turns else "start"

    def fail(self, failure: Failure, version: int) -> None:
        """End it with a failure of the environment, or of what makes tokens of its messages.

        An environment that had no time left for the last turn did not fail: a limit ended the conversation.
        """
        is_limit = failure.out_of_time and bool(self.turns)
        self.ended, self.error = "time" if is_limit else "failed", " ".join(failure.error.split())
        if not self.current.sampled:
            # It stays a sequence of the batch, so that every group has its size; none of its tokens is trained on.
            self.current = self.current.extended(Segment((), "policy", (), version))

    def result(self) -> Trajectory:
        """The conversation as it is trained on and shown."""
        sequences = [*self.earlier, self.current]
        first = sequences[0].segments[0].tokens
        silent = not (self.rules.reward_weight and (self.rules.speaks or self.spoke))
        facts: dict[str, Any] = {
            **self.current.facts,  # of the engine
            "prompt": self.prompt.text if first == self.prompt.tokens else self.rules.decode(first, False),
            "turns": self.turns,
            "environment": {
                "seconds": self.seconds,
                "facts": self.facts,
                "error": self.error,
                "silent": silent,
            },
            **self.prompt.facts,
        }
        text = self._text()
        if self.rules.masks and self.ended in TRUNCATED:
            sequences = [_without_loss(sequence) for sequence in sequences]
        *earlier, last = sequences
        return replace(last, earlier=tuple(earlier), ended=self.ended, text=text, facts=facts)

    def _text(self) -> str:
        """What followed the prompt; of several sequences, what was said in them, a message per line."""
        if self.earlier:
            lines = [[turn["text"], *(reply["content"] for reply in turn["reply"])] for turn in self.turns]
            lines[-1] = lines[-1][:1]  # the policy did not read the last reply
            return "\n".join(line for turn in lines for line in turn)
        said = self.current.tokens[len(self.current.segments[0].tokens) :]
        return self.rules.decode(said[:-1] if self.current.has_stop_token else said, True)


def as_messages(given: Sequence[Message] | str, role: str) -> list[Message]:
    """Messages as a list; text is one message of that role, and no text is none."""
    if isinstance(given, str):
        return [{"role": role, "content": given}] if given else []
    return [dict(message) for message in given]


def turn_seed(seed: int, number: int) -> int:
    """63 bits that depend on a conversation's seed and how many turns came before; those of the first are `seed`."""
    if not number:
        return seed
    digest = hashlib.sha256(f"{seed}/turn {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _without_loss(sequence: Trajectory) -> Trajectory:
    return replace(sequence, segments=tuple(replace(s, trained=False) for s in sequence.segments))
