"""Which tokens of a conversation the assistant wrote: as its chat template marks them, or by how it writes each turn."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardproof.errors import ShardproofError
from shardproof.rl.chat.template import num_same
from shardproof.rl.sources.encoding import call_all
from shardproof.rl.sources.text_files import unusable
from shardproof.rl.templates import chat_template_of, panics_as_errors, plain_messages, render_chat

logger = logging.getLogger(__name__)

_ELSE = (
    "use a template with {% generation %}, in the model's folder or in data.chat_template_kwargs.chat_template, or rows "
    "with a prompt and a completion"
)
_MARK = re.compile(r"{%-?\s*generation\s*-?%}")
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Masked:
    """A conversation's tokens, and 1 for each that the assistant wrote."""

    tokens: tuple[int, ...]
    mask: tuple[int, ...]


def masked_conversation(
    place: str,
    messages: Sequence[Message],
    tokenizer: Any,
    variables: Mapping[str, Any],
    tools: Sequence[Message] = (),
) -> Masked:
    """The conversation's tokens, and which of them the assistant wrote; raises if none is, or the template hides them."""
    template = chat_template_of(tokenizer, variables, tools)
    if not template:
        fix = "use a tokenizer with a chat template"
        raise unusable(f"{place}: messages need a chat template, but the tokenizer has none.", fix)
    find = _marked if _MARK.search(template) else _by_turns
    try:
        found: Masked = call_all([partial(find, messages, tokenizer, variables, tools)], [place])[0]
    except ShardproofError:
        raise
    except _Rewritten as error:
        message = f"{place}: the chat template rejects the conversation: {error}, so that the assistant's tokens cannot be told apart."
        raise unusable(message, _ELSE) from error
    except Exception as error:
        raise unusable(f"{place}: the chat template rejects the conversation: {error}") from error
    if 1 not in found.mask[1:]:
        fix = "remove the row"
        if any(message.get("role") == "assistant" for message in messages):
            fix = "put the template's {% generation %} around all that the assistant says"
        raise unusable(f"{place}: no token of the conversation is the assistant's.", fix)
    return found


def _marked(
    messages: Sequence[Message], tokenizer: Any, variables: Mapping[str, Any], tools: Sequence[Message]
) -> Masked:
    with panics_as_errors():
        found = tokenizer.apply_chat_template(
            plain_messages(messages),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tools=list(tools) or None,
            **variables,
        )
    return Masked(tuple(found["input_ids"]), tuple(found["assistant_masks"]))


class _Rewritten(ValueError):
    """The template writes a message in two ways, depending on what follows it."""


def _by_turns(
    messages: Sequence[Message], tokenizer: Any, variables: Mapping[str, Any], tools: Sequence[Message]
) -> Masked:
    """What the template writes for an assistant's message, after what it writes to have one begin."""
    render = partial(render_chat, tokenizer, tools=tools, closed=True, variables=variables)
    whole = render(messages, prompt=False)
    spans = []
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        turn = _without_close(render(messages[: at + 1], prompt=False), whole, tokenizer)
        if not whole.startswith(turn):
            raise _Rewritten(f"it writes message {at + 1} differently when others follow it")
        spans.append((_beginning(render, messages[:at], turn) if at else 0, len(turn)))
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("only a fast tokenizer says which characters a token stands for")
    with panics_as_errors():
        found = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a < end and b > start for start, end in spans)) for a, b in found["offset_mapping"]]
    return Masked(tuple(found["input_ids"]), tuple(mask))


def _without_close(text: str, whole: str, tokenizer: Any) -> str:
    """The text without special tokens that stand at the end of a conversation alone, such as the end of sequence."""
    closes = [each for each in map(str, tokenizer.all_special_tokens) if each]
    while not whole.startswith(text) and (close := next(filter(text.endswith, closes), "")):
        text = text.removesuffix(close)
    return text


def _beginning(render: Callable[..., str], before: Sequence[Message], turn: str) -> int:
    """Where the assistant's part of a text begins: at the end of what has an answer begin, or where the two part there.

    An answer may begin otherwise than the one that was asked for, without thoughts for example.
    """
    asked = render(before, prompt=True)
    start = num_same(asked, turn)
    if start < num_same(asked, render(before, prompt=False)):
        raise _Rewritten(
            f"it writes what stands before message {len(before) + 1} differently when it follows"
        )
    return start


def is_endless(tokens: Sequence[int], mask: Sequence[int], special: frozenset[int]) -> bool:
    """Whether the last turn that is learned stops right before a special token, and has none itself.

    The model would never learn to end its turns.
    """
    end = len(mask) - next((n for n, flag in enumerate(reversed(mask)) if flag), len(mask))
    start = end
    while start and mask[start - 1]:
        start -= 1
    learned = tokens[start:end]
    return end < len(tokens) and tokens[end] in special and special.isdisjoint(learned) and bool(learned)


def warn_of_endless(conversations: Sequence[tuple[Sequence[int], Sequence[int]]], tokenizer: Any) -> None:
    """Say in the log how many of (tokens, mask) leave the end of the assistant's turns out."""
    special = frozenset(tokenizer.all_special_ids)
    special |= {k for k, v in getattr(tokenizer, "added_tokens_decoder", {}).items() if v.special}
    num = sum(is_endless(*each, special) for each in conversations)
    if num:
        logger.warning(
            "%d of %d rows: the end of the assistant's turn is not learned, so that the model may not learn to stop: "
            "{%% endgeneration %%} stands before it in the chat template",
            num,
            len(conversations),
        )
