"""The keys of data whose completions are given: supervised fine-tuning, preference pairs, labelled completions."""

from __future__ import annotations

from typing import Literal

from shardproof.config.numbers import Tokens
from shardproof.config.section import Section


class GivenColumns(Section):
    """Which columns hold the completions of algorithms that do not sample, and which of their tokens count."""

    completion_column: str = "completion"
    """Column with the completion to learn, for `sft` and `kto`: text, or a list of messages that follow the prompt's."""
    chosen_column: str = "chosen"
    """Column with the better completion of a pair, for `dpo` and `reward_model`: text, or a list of messages. Rows
    without a prompt column have it in both completions, as their common beginning."""
    rejected_column: str = "rejected"
    """Column with the worse completion of a pair."""
    label_column: str = "label"
    """Column that says whether a completion is desirable, for `kto`: true or false, 1 or 0, also as text."""
    messages_column: str | None = None
    """Column with whole conversations, for `sft`: lists of messages, in place of prompts and completions."""
    train_on: Literal["completion", "assistant", "all"] = "completion"
    """Which tokens `sft` learns: those of the completion, those of every assistant message, or all. Whole
    conversations need `"assistant"` or `"all"`."""
    max_length: Tokens | None = None
    """The most tokens that a given completion and its prompt may have together. By default the model's context."""
    on_max_length: Literal["refuse", "truncate", "drop"] = "refuse"
    """What happens to rows that are longer: `"refuse"` ends the start, `"truncate"` cuts their end off, and `"drop"`
    leaves them out. Rows of which nothing to learn remains are left out; the log says how many."""
