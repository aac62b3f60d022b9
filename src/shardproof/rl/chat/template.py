"""A tokenizer and its chat template: messages to text under a deadline, text to tokens with the places they came from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from shardproof.environments.protocol import Message, Schema
from shardproof.rl.templates import Overdue, call_each, panics_as_errors, render_chat

SECONDS = 10.0  # for one rendering; real templates take a millisecond
Span = tuple[int, int]


class Unrenderable(Exception):
    """The chat template or the tokenizer refuses these messages; the text says why, in one line."""


class Endless(Exception):
    """The chat template did not finish."""


class Template:
    """Renders conversations with a tokenizer's chat template, and encodes what it wrote."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None):
        self.tokenizer, self.variables = tokenizer, dict(variables or {})

    def render(
        self, messages: Sequence[Message], tools: Sequence[Schema] | None = None, *, prompt: bool = True
    ) -> str:
        """The conversation as text. With `prompt` the model's next turn begins at its end."""
        call = partial(render_chat, self.tokenizer, messages, tools, prompt=prompt, variables=self.variables)
        try:
            (text,) = call_each([call], SECONDS)
        except Overdue as error:
            raise Endless(f"the chat template did not finish: {error}") from error
        except (
            Exception
        ) as error:  # templates refuse conversations in their own words, with jinja's exceptions
            said = " ".join(str(error).split())[:300]
            raise Unrenderable(f"the chat template rejects the conversation: {said}") from error
        return text

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The text's tokens; with `special` those too that the tokenizer adds. A template writes them itself."""
        return self.encode_with_spans(text, special=special)[0]

    def encode_with_spans(self, text: str, *, special: bool = False) -> tuple[list[int], list[Span] | None]:
        """The text's tokens, and which characters each stands for; None where the tokenizer cannot tell."""
        told = bool(getattr(self.tokenizer, "is_fast", False))
        options = {"return_offsets_mapping": True} if told else {}
        try:
            with panics_as_errors():
                found = self.tokenizer(text, add_special_tokens=special, **options)
        except Exception as error:  # a tokenizer is made of untrusted files too
            said = f"{type(error).__name__}: {str(error)[:300]}"
            raise Unrenderable(f"the tokenizer fails on the conversation: {said}") from error
        return list(found["input_ids"]), list(found["offset_mapping"]) if told else None

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        """The text of tokens, with special tokens or without them."""
        with panics_as_errors():
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=not special))

    @property
    def source(self) -> str:
        """The template itself; all of them if the tokenizer has several by name."""
        return str(self.variables.get("chat_template") or getattr(self.tokenizer, "chat_template", ""))

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """The special tokens by their ids: the tokenizer's own, and those that were added as such."""
        found = dict(zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens))
        for token, added in getattr(self.tokenizer, "added_tokens_decoder", {}).items():
            if added.special:
                found[token] = added.content
        return {int(token): str(text) for token, text in found.items()}

    @cached_property
    def own_tokens(self) -> frozenset[int]:
        """Tokens that were added to the vocabulary, special or not: all others are pieces of ordinary text."""
        return frozenset(self.special_tokens) | set(getattr(self.tokenizer, "added_tokens_decoder", {}))

    def begins_special(self, text: str) -> bool:
        """Whether the text begins with a special token: what stands before it has no part in its tokens then."""
        return any(text.startswith(special) for special in self.special_tokens.values())

    def without_end(self, text: str, marks: Collection[str] = ()) -> str:
        """The text without the special tokens and spaces at its end; special tokens that mark tool calls stay."""
        ends = tuple(special for special in self.special_tokens.values() if special not in marks)
        text = text.rstrip()
        while text.endswith(ends):
            text = text.removesuffix(max((each for each in ends if text.endswith(each)), key=len)).rstrip()
        return text


def clean(message: Message) -> Message:
    """The message with content that every tokenizer reads: halves of surrogate pairs become replacement characters."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    try:
        content.encode()
    except UnicodeEncodeError:
        return {**message, "content": content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")}
    return message


def num_same(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
