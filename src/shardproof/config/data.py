"""The section about data: where prompts come from, which of them are used, and how they are rendered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardproof.config.given import GivenColumns
from shardproof.config.numbers import Bound, Decay, Fraction, Tokens
from shardproof.config.section import Section

Weight = Annotated[float, Bound(ge=0.0, le=1e6)]  # 0: nothing


class Source(Section):
    """One of several sources of rows."""

    source: str
    """The rows, in the formats of `data.train`."""
    name: str = ""
    """What metrics and samples call it, as in `reward/mean/NAME`. By default the name of its file, folder or data
    set."""
    weight: Annotated[float, Bound(gt=0.0, le=1e6)] | None = None
    """Its part of the prompts, relative to the weights of the others. Give all sources one, or none: without
    weights every row counts alike, as if all rows were in one file."""
    prompt_column: str | None = None
    """Column with the prompt. By default `data.prompt_column`."""
    answer_column: str | None = None
    """Column with the expected answer. By default `data.answer_column`."""

    @model_validator(mode="before")
    @classmethod
    def _names_its_answers(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("answer_column") == "none":
            raise ValueError(
                "answer_column='none' of one source would mean that of all: set data.answer_column='none', and name the "
                "column of each source that has answers"
            )
        return data


class Curriculum(Section):
    """Prompts by how often the policy solves them: pools from which a step's prompts are drawn."""

    easy: Weight = 0.1
    """Weight of prompts whose pass rate is above `easy_above`."""
    useful: Weight = 0.8
    """Weight of prompts in between, and of those that were never measured."""
    hard: Weight = 0.1
    """Weight of prompts whose pass rate is below `hard_below`."""
    easy_above: Annotated[float, Bound(gt=0.0, le=1.0)] = 0.9
    """Pass rate above which a prompt is easy."""
    hard_below: Decay = 0.1
    """Pass rate below which a prompt is hard."""
    decay: Decay = 0.5
    """How much of a prompt's known pass rate is kept when it is measured again. 0: the last measurement counts
    alone."""

    rest: Fraction = 0.1
    """The part of its source's prompts that is drawn before a prompt is drawn again, while others are left: without
    it the first hard prompt that is found would be repeated until there are more."""

    @model_validator(mode="after")
    def _has_pools(self) -> Curriculum:
        if not self.easy + self.useful + self.hard:
            raise ValueError("one of easy, useful and hard must be above 0")
        if self.hard_below > self.easy_above:
            raise ValueError(f"hard_below={self.hard_below} is above easy_above={self.easy_above}")
        return self


class Data(GivenColumns):
    """The prompts, and which columns hold what."""

    train: str | list[Source]
    """Rows to train on: a `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet` file, also as `.gz`; a folder of them, or
    a pattern such as `shards/*.jsonl`; a hub data set as `hf:name[:config][:split]`, or rows that the environment
    has itself as `environment:SPLIT`. Several: a list of these, or `[[data.train]]` tables."""
    evaluation: str | None = None
    """Held-out rows for evaluation, in the same formats. `output.eval_every` needs it."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of `{role, content}` messages."""
    answer_column: str | None = "answer"
    """Column with the expected answer, for reward functions. Set it to `none` if there is none."""
    chat: bool = False
    """Put text prompts through the tokenizer's chat template as a user message. Lists of messages always go
    through it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as `{ enable_thinking = false }`. A row's column of the same name
    overrides them."""
    system_prompt: str | None = None
    """A system message before every prompt that goes through the chat template."""
    on_system_prompt: Literal["refuse", "keep", "replace"] = "refuse"
    """What `data.system_prompt` does where a row begins with a system message of its own."""
    max_prompt_tokens: Tokens | None = None
    """The most tokens that a prompt may have. By default the model's context is the limit."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What happens to rows that are longer than `data.max_prompt_tokens` or the model's context: `"refuse"` ends
    the start, `"drop"` leaves them out and says how many."""
    no_answer: Literal["refuse", "drop"] = "refuse"
    """What happens to rows without an answer, or with one that a reward can never score."""
    pass_rates: str | None = None
    """A file with the pass rate of each prompt, as `shardproof data RECIPE --measure N` writes it."""
    pass_rate_between: tuple[Fraction, Fraction] | None = None
    """Train on prompts whose pass rate is in this range, such as `[0.1, 0.9]`. Needs `data.pass_rates`."""
    curriculum: Curriculum | None = None
    """Draw prompts by the pass rates that the run measures itself."""

    @model_validator(mode="before")
    @classmethod
    def _read_list(cls, data: Any) -> Any:
        """A list may hold plain strings, and a single table is a list of one."""
        train = data.get("train") if isinstance(data, dict) else None
        if not isinstance(train, list | dict):
            return data
        given = [train] if isinstance(train, dict) else train
        return {**data, "train": [{"source": each} if isinstance(each, str) else each for each in given]}

    @model_validator(mode="after")
    def _are_apart(self) -> Data:
        problem = _problem_of(self)
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def sources(self) -> list[Source]:
        """The sources of rows to train on; one without a name, if `train` is text."""
        if isinstance(self.train, str):
            return [Source(source=self.train)]
        return [
            each if each.name else each.model_copy(update={"name": _name_of(each.source)})
            for each in self.train
        ]

    @property
    def described(self) -> str:
        """The sources to train on, in words."""
        return self.train if isinstance(self.train, str) else ", ".join(each.source for each in self.train)


def _problem_of(data: Data) -> str | None:
    if not isinstance(data.train, str):
        if not data.train:
            return "train is an empty list: name at least one source"
        names = [each.name for each in data.sources]
        odd = [name for name in names if not name.isprintable()]
        if odd:
            return f"a source of train is called {odd[0]!r}, which metrics cannot show: give it a name"
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            return f"two sources of train are called {twice[0]!r}: give each a name of its own"
        if len({each.weight is None for each in data.train}) > 1:
            return "some sources of train have a weight and others have none: give all of them one, or none"
    if data.pass_rate_between is not None:
        if data.pass_rates is None:
            return (
                "pass_rate_between needs pass_rates: measure them with `shardproof data RECIPE --measure N`"
            )
        low, high = data.pass_rate_between
        if low > high:
            return f"data.pass_rate_between.1={high} is below data.pass_rate_between.0={low}"
    if data.on_system_prompt != "refuse" and data.system_prompt is None:
        return f"on_system_prompt={data.on_system_prompt!r} says what system_prompt does: set it, or remove the key"
    return None


def _name_of(source: str) -> str:
    """What a source is called that has no name: the last part of a path without its endings, or the data set."""
    if source.startswith("hf:"):
        return source.split(":")[1].rpartition("/")[2]
    last = source.rstrip("/").rpartition("/")[2]
    return last.partition(".")[0] or last
