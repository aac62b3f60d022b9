"""How messages go through a chat template: the system prompt before them, and the template's variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardproof.config.schema import Recipe
from shardproof.errors import did_you_mean
from shardproof.foreign import without_inner_nulls, without_nulls
from shardproof.rl.sources.text_files import Row, unusable

Message = Mapping[str, Any]
TEMPLATE_COLUMN = "chat_template_kwargs"  # of a row's own variables for the chat template
TOOLS_COLUMN = "tools"  # of what a given conversation may call, as the chat template shows it
# What decides the form of what comes back, which the run decides itself.
_MARKS = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # tags that transformers adds to jinja's
_MAY_BE_NULL = ("default", "const")  # of a JSON schema: what a parameter may be
_OURS = frozenset(
    {
        *("conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "tokenizer"),
    }
)


@dataclass(frozen=True)
class Rendering:
    """What all prompts of a run have in common on their way through the chat template."""

    variables: Mapping[str, Any] = field(default_factory=dict)  # for the template
    system: str | None = None  # a message before every prompt
    on_system: str = "refuse"  # where a prompt begins with one of its own: "refuse", "keep" or "replace"

    @classmethod
    def of(cls, recipe: Recipe) -> Rendering:
        """What a recipe says of it."""
        data = recipe.data
        return cls(data.chat_template_kwargs, data.system_prompt, data.on_system_prompt)

    def messages(self, prompt: str | Sequence[Message]) -> list[Message]:
        """The prompt as messages, with the system prompt; raises ValueError where it has one of its own."""
        given: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        if self.system is None:
            return given
        first: Message = {"role": "system", "content": self.system}
        if not given or given[0].get("role") != "system":
            return [first, *given]
        if self.on_system == "refuse":
            raise ValueError(
                "data.system_prompt is set, and the prompt begins with a system message of its own; set "
                'data.on_system_prompt to "keep" or "replace"'
            )
        return given if self.on_system == "keep" else [first, *given[1:]]

    def variables_of(self, row: Row) -> dict[str, Any]:
        """The template's variables for a row: the run's, and its own over them."""
        return {**self.variables, **own_variables(row)}


def own_variables(row: Row) -> dict[str, Any]:
    """A row's own variables for the chat template."""
    return without_nulls(row.get(TEMPLATE_COLUMN) or {})


def own_tools(place: str, row: Row) -> list[dict[str, Any]]:
    """What a row's given conversation may call: a list of descriptions, also as JSON text; raises for anything else."""
    tools = row.get(TOOLS_COLUMN)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise unusable(f"{place}: column {TOOLS_COLUMN!r} is not valid JSON: {error}.") from error
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        message = f"{place}: column {TOOLS_COLUMN!r} holds {str(tools)[:40]!r}; expected a list of tools."
        raise unusable(message, "write each as an object with a JSON schema, or leave the column out")
    try:
        return [without_inner_nulls(each, _MAY_BE_NULL) for each in tools]
    except RecursionError as error:
        raise unusable(f"{place}: column {TOOLS_COLUMN!r} is nested too deeply.") from error


def check_variables(names: Sequence[str], template: str, where: str) -> None:
    """Raise if a variable is not the user's to set, or is none that the chat template reads."""
    if not template:
        return  # the prompt that needs one is refused
    for name in names:
        if name in _OURS:
            raise unusable(f"{where}: {name!r} is decided by the run, not by a variable of the template.")
        is_read = re.search(rf"\b{re.escape(name)}\b", template) is not None
        if not is_read and name not in ("chat_template", "documents"):
            known = _names_in(template)
            message = f"{where}: the chat template does not read {name!r}.{did_you_mean(name, known)}"
            raise unusable(message, "correct the name, or remove the variable: it would change nothing")


def _names_in(template: str) -> list[str]:
    """The variables that a template reads and does not set; none if it cannot be parsed."""
    try:
        from jinja2 import Environment, meta

        parser = Environment(extensions=["jinja2.ext.loopcontrols"])
        return sorted(meta.find_undeclared_variables(parser.parse(_MARKS.sub("", template))))
    except Exception:  # templates have tags of their own, and jinja its own types of errors
        return []
