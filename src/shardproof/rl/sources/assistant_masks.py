"""Which tokens of a conversation the assistant wrote: as its chat template marks them, or by how it writes each turn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardproof.errors import ShardproofError
from shardproof.rl.sources.encoding import call_all
from shardproof.rl.sources.text_files import unusable
from shardproof.rl.templates import panics_as_errors, render_chat

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
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        fix = "use a tokenizer with a chat template"
        raise unusable(f"{place}: messages need a chat template, but the tokenizer has none.", fix)
    find = _marked if _MARK.search(str(template)) else _by_turns
    try:
        found: Masked = call_all([partial(find, messages, tokenizer, variables, tools)], [place])[0]
    except ShardproofError:
        raise
    except Exception as error:
        raise unusable(f"{place}: the chat template rejects the conversation: {error}") from error
    if 1 not in found.mask[1:]:
        raise unusable(f"{place}: no token of the conversation is the assistant's.", "remove the row")
    return found


def _marked(
    messages: Sequence[Message], tokenizer: Any, variables: Mapping[str, Any], tools: Sequence[Message]
) -> Masked:
    with panics_as_errors():
        found = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tools=list(tools) or None,
            **variables,
        )
    return Masked(tuple(found["input_ids"]), tuple(found["assistant_masks"]))


def _by_turns(
    messages: Sequence[Message], tokenizer: Any, variables: Mapping[str, Any], tools: Sequence[Message]
) -> Masked:
    """What the template writes for an assistant's message, after what it writes to have one begin."""
    whole = render_chat(tokenizer, messages, tools, prompt=False, variables=variables)
    spans = []
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        end = render_chat(tokenizer, messages[: at + 1], tools, prompt=False, variables=variables)
        start = ""
        if at:
            start = str(
                tokenizer.apply_chat_template(
                    [dict(each) for each in messages[:at]],
                    tokenize=False,
                    add_generation_prompt=True,
                    tools=list(tools) or None,
                    **variables,
                )
            )
        if not (whole.startswith(end) and end.startswith(start)):
            raise ValueError(
                f"it writes message {at + 1} differently when others follow it, so that the assistant's tokens cannot be "
                "told apart; use a template with {% generation %}"
            )
        spans.append((len(start), len(end)))
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("only a fast tokenizer says which characters a token stands for")
    with panics_as_errors():
        found = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a < end and b > start for start, end in spans)) for a, b in found["offset_mapping"]]
    return Masked(tuple(found["input_ids"]), tuple(mask))
