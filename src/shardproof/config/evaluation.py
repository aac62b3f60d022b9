"""The section about evaluation: on which held-out rows, how often, how completions are sampled and what is measured."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from shardproof.config.numbers import Bound, Count, Fraction, Part, Steps, Tokens
from shardproof.config.section import Section

Temperature = Annotated[float, Bound(ge=0.0, le=100.0)]  # 0: the most likely token
TopK = Annotated[int, Bound(ge=0, le=2**30)]  # 0: all tokens
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_TAKEN = ("reward", "logps")  # as in eval/reward/accuracy and eval/logps/chosen, of preferences
_BEST = re.compile(r"eval/\S+")


class EvaluationSet(Section):
    """Held-out rows with a name of their own. Keys that you leave out take the value of the whole evaluation."""

    name: str
    """Name of the set in metrics: `eval/NAME/reward` and so on."""
    source: str
    """The rows, in the formats of `data.evaluation`."""
    prompt_column: str | None = None
    """Column with the prompt. By default `data.prompt_column`."""
    answer_column: str | None = None
    """Column with the expected answer. By default `data.answer_column`."""
    every: Steps | None = None
    """Steps between evaluations on this set, with one before the first step. By default `output.eval_every`."""
    prompts: Count | None = None
    """How many of the rows to evaluate on, the first ones. By default `output.eval_prompts`."""
    samples: Count | None = None
    """Completions per row. By default `output.eval_samples`."""
    temperature: Temperature | None = None
    """Sampling temperature; 0 takes the most likely token. By default `evaluation.temperature`."""
    top_p: Part | None = None
    """Nucleus. By default `evaluation.top_p`."""
    top_k: TopK | None = None
    """Draw only from this many of the most likely tokens; 0 from all. By default `evaluation.top_k`."""
    min_p: Fraction | None = None
    """Draw only tokens that are at least this share as likely as the most likely one; 0 all. By default
    `evaluation.min_p`."""
    max_new_tokens: Tokens | None = None
    """Longest completion. By default `evaluation.max_new_tokens`."""
    pass_at: list[Count] | None = None
    """The numbers k of pass@k. By default `evaluation.pass_at`."""

    @field_validator("name")
    @classmethod
    def _can_be_a_metric(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of letters, digits, '.', '_' and '-'")
        if name in _TAKEN:
            raise ValueError(f"metrics of data.evaluation begin with eval/{name}/; choose another name")
        return name


class Evaluation(Section):
    """How the policy is evaluated on held-out rows. `output.eval_every` says how often."""

    sets: list[EvaluationSet] = Field(default_factory=list)
    """Further held-out sets beside `data.evaluation`, such as
    `[{ name = "aime", source = "aime.jsonl", samples = 16, every = 50 }]`."""
    temperature: Temperature | None = None
    """Sampling temperature of evaluations; 0 takes the most likely token. By default 0 with one completion per
    row, else `rollout.temperature`."""
    max_new_tokens: Tokens | None = None
    """Longest completion in evaluations. By default `rollout.max_new_tokens`."""
    top_p: Part | None = None
    """Nucleus of evaluations. By default `rollout.top_p`."""
    top_k: TopK | None = None
    """Draw only from this many of the most likely tokens in evaluations; 0 from all. By default
    `rollout.top_k`."""
    min_p: Fraction | None = None
    """Draw only tokens that are at least this share as likely as the most likely one in evaluations; 0 all. By
    default `rollout.min_p`."""
    pass_at: list[Count] = Field(default_factory=list)
    """The numbers k of pass@k, such as `[1, 8, 32]`, none above the completions per row. By default that number."""
    majority: Literal["auto", "number", "boxed", "text", "none"] = "auto"
    """How the answer of a completion is read for the majority vote: its last `"number"`, its last `"boxed"`
    expression, its whole `"text"`, or no vote. `"auto"`: as the function that decides pass@k reads it, `numeric`,
    `math_verify` or `exact_match`; no vote for others."""
    best: str | None = None
    """Keep the model of the best evaluation in `best/`: the metric that decides, such as `"eval/pass@1"` or
    `"eval/aime/reward"`. Higher is better; for `eval/loss` lower. By default none is kept."""

    @field_validator("best")
    @classmethod
    def _is_a_metric(cls, best: str | None) -> str | None:
        if best is not None and not _BEST.fullmatch(best):
            raise ValueError(f"{best!r} is not the name of an evaluation's metric, such as 'eval/reward'")
        return best

    @model_validator(mode="after")
    def _has_names_once(self) -> Evaluation:
        names = [each.name for each in self.sets]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"sets: two have the name {twice!r}")
        return self
