"""Which tokens end a completion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from shardproof.errors import fail
from shardproof.foreign import read_json
from shardproof.rl.chat.template import Endless, Template, Unrenderable

_SAID = "Yes."  # by the model, in a conversation that shows what the chat template writes behind it
_GENERATION, _MODEL = "generation_config.json", "config.json"


def find_stop_ids(
    folder: Path, config: PretrainedConfig, tokenizer: Any, more: Sequence[int] = ()
) -> tuple[int, ...]:
    """The tokenizer's end of sequence, and the ends that the model's folder names; ids that cannot be drawn do not count.

    `more` are those of the recipe, all of which must be there.

    A chat model may end its turns with a token of which only its generation config knows. Without that file the model's
    own config is asked, as transformers does, but only for what is written there: what its class has for a default may be
    any token of another tokenizer.
    """
    found = _as_ids(tokenizer.eos_token_id, "the tokenizer")
    if (folder / _GENERATION).exists():
        found |= _ids_in(_read(folder, _GENERATION), _GENERATION)
    else:
        stated = _read(folder, _MODEL)
        found |= _ids_in(stated, _MODEL) | _ids_in(stated.get("text_config"), _MODEL)
    size = config.get_text_config().vocab_size
    if more and max(more) >= size:
        message = f"rollout.stop_ids: {max(more)} is no token, the model's vocabulary has {size} tokens."
        raise fail("C005", "data", message, fix="remove it, or use the ids of this model's tokenizer")
    return tuple(sorted(token for token in found | set(more) if 0 <= token < size))


def _read(folder: Path, name: str) -> dict[str, Any]:
    value = read_json(folder / name, "data", inside=folder)
    if not isinstance(value, dict):
        raise fail("L103", "data", f"{name} holds a JSON {type(value).__name__}, expected an object.")
    return value


def _ids_in(section: Any, name: str) -> set[int]:
    return _as_ids(section.get("eos_token_id"), name) if isinstance(section, dict) else set()


def unheeded_end(
    template: Template, stop_ids: Sequence[int], strings: Sequence[str]
) -> tuple[int, str] | None:
    """(id, text) of the special token that a chat template ends the model's turns with, if no completion ends there.

    Base models have such templates, and models that were trained with another template than their files tell of.
    """
    asked = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": _SAID}]
    try:
        _, said, behind = template.render(asked, prompt=False).rpartition(_SAID)
    except (Endless, Unrenderable):  # it may ask for more; prompts that go through it tell
        return None
    ends = [
        (token, text)
        for token, text in template.special_tokens.items()
        if text and behind.lstrip().startswith(text)
    ]
    if not said or not ends:
        return None
    token, text = max(ends, key=lambda end: len(end[1]))
    return None if token in stop_ids or any(string in behind for string in strings) else (token, text)


def _as_ids(value: Any, where: str) -> set[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for each in values:
        if not isinstance(each, int) or isinstance(each, bool):
            raise fail(
                "L103", "data", f"eos_token_id of {where} is {each!r}, expected an id or a list of ids."
            )
    return set(values)
