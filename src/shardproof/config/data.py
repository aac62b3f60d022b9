"""The sections about data and what completions are worth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardproof.config.numbers import Bound, Processes, Seconds, Tokens
from shardproof.config.section import Section


class Data(Section):
    """The prompts, and which columns hold what."""

    train: str
    """Rows to train on: a `.jsonl`, `.json` or `.parquet` file, a hub data set as
    `hf:name[:config][:split]`, or rows that the environment has itself as `environment:SPLIT`."""
    evaluation: str | None = None
    """Held-out rows for evaluation, in the same formats. `output.eval_every` needs it."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of `{role, content}` messages."""
    answer_column: str | None = "answer"
    """Column with the expected answer, for reward functions. Set it to `none` if there is none."""
    completion_column: str = "completion"
    """Column with the completion to learn, for `algorithm.name = "sft"`."""
    chat: bool = False
    """Put text prompts through the tokenizer's chat template as a user message. Lists of messages always go
    through it."""
    max_prompt_tokens: Tokens | None = None
    """Refuse prompts with more tokens than this, before the run starts. By default the model's context is the
    limit."""


class Reward(Section):
    """One reward function and its weight."""

    name: str
    """`exact_match`, `numeric`, `regex`, `regex(pattern)`, `math_verify`, or your own function as
    `module:function`."""
    weight: Annotated[float, Bound(ge=-1e6, le=1e6)] = 1.0
    """Factor in the sum of all rewards. Negative: a penalty. 0: reported in the metrics but not learned from.
    """


class Rewards(Section):
    """What completions are worth: a weighted sum of reward functions."""

    functions: list[Reward] = Field(min_length=1)
    """The reward functions, such as `[{ name = "numeric" }, { name = "my_rewards:style", weight = 0.1 }]`.
    The first one decides `eval/pass@K`."""
    timeout_s: Seconds = 10.0
    """Longest time for one call of a reward function, in seconds. A call that takes longer is killed and
    counts as failed."""
    num_workers: Processes = 2
    """Processes per rank that run your reward functions. Raise it if `time/reward` is a large part of
    `time/step`."""
    on_error: Literal["zero", "stop"] = "zero"
    """What a failed reward does: `"zero"` leaves the completion out of the update and counts it, `"stop"`
    ends the run."""
