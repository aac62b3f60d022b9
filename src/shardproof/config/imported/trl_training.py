"""What TRL's configs have from transformers' `TrainingArguments`: schedule, optimizer, and what happens between updates."""

from __future__ import annotations

import math
from typing import Any

from shardproof.config.imported.draft import Draft, Foreign, Same, copy
from shardproof.config.imported.shared_settings import KEEP_ALL, evaluate_all, trackers

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_SHAPES = {"1-sqrt": "sqrt"}
_ADAMW = (
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_hf"),
    *("adamw_apex_fused", "paged_adamw_32bit", "paged_adamw"),
)
_EIGHT_BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
_DEFAULTS_OF_KWARGS = {"num_cycles": 0.5, "warmup_type": "linear"}  # those that say what happens here anyway


def schedule(draft: Draft, foreign: Foreign) -> None:
    """The learning rate over time."""
    kind, more = str(foreign.take("lr_scheduler_type", "linear")), foreign.section("lr_scheduler_kwargs")
    foreign.take("lr_scheduler_kwargs")
    if kind in _SCHEDULES:
        draft.put("optimizer.schedule", _SCHEDULES[kind], "lr_scheduler_type")
    elif kind == "cosine_with_min_lr":
        draft.put("optimizer.schedule", "cosine", "lr_scheduler_type")
        lowest = float(more.pop("min_lr", 0.0)) / draft.values["optimizer.lr"]
        draft.put("optimizer.final_ratio", float(more.pop("min_lr_rate", lowest)), "lr_scheduler_kwargs")
    elif kind == "warmup_stable_decay":
        draft.put("optimizer.schedule", "wsd", "lr_scheduler_type")
        draft.put("optimizer.decay_steps", int(more.pop("num_decay_steps", 1)), "lr_scheduler_kwargs")
        shape = str(more.pop("decay_type", "cosine"))
        draft.put("optimizer.decay_shape", _SHAPES.get(shape, shape), "lr_scheduler_kwargs")
        draft.put("optimizer.final_ratio", float(more.pop("min_lr_ratio", 0.0)), "lr_scheduler_kwargs")
    else:
        draft.gaps[f"lr_scheduler_type={kind!r}"] = "the learning rate stays constant"
    for key, value in more.items():
        if value != _DEFAULTS_OF_KWARGS.get(key):
            draft.gaps[f"lr_scheduler_kwargs.{key}={value!r}"] = "the schedule has no such setting"
    _warmup(draft, foreign, kind)


def _warmup(draft: Draft, foreign: Foreign, kind: str) -> None:
    ratio, number = foreign.take("warmup_ratio", 0), foreign.take("warmup_steps", 0)
    if kind == "constant":  # which has none in transformers, whatever else is said
        return
    if 0 < number < 1:
        ratio, number = number, 0
    if number:
        draft.put("optimizer.warmup_steps", int(number), "warmup_steps")
    elif ratio:
        draft.put("optimizer.warmup_ratio", float(ratio), "warmup_ratio")
    if number or ratio:
        draft.put("optimizer.warmup_from_zero", True, "transformers' warm-up")


def optimizer(draft: Draft, foreign: Foreign) -> None:
    """The optimizer by name."""
    name = str(foreign.take("optim", "adamw_torch"))
    if name in _EIGHT_BIT:
        draft.put("optimizer.name", "adamw_8bit", "optim")
    elif name == "muon":
        draft.put("optimizer.name", "muon", "optim")
    elif name not in _ADAMW:
        draft.gaps[f"optim={name!r}"] = "AdamW is used; name a class of yours in optimizer.name"


def output(draft: Draft, foreign: Foreign, updates: int, samples: int) -> None:
    """Checkpoints, evaluations, trackers and the hub; TRL evaluates with as many `samples` as it trains with."""
    saves = foreign.take("save_strategy", "steps")
    if saves == "best":
        draft.gaps["save_strategy='best'"] = "set evaluation.best, which keeps that model beside checkpoints"
    else:
        _every(draft, "output.save_every", saves, foreign.take("save_steps", 500), updates, "save")
    copy(draft, foreign, [Same("save_total_limit", "output.keep", KEEP_ALL)])
    evaluates = foreign.take("eval_strategy", "no")
    if evaluates != "no" and "data.evaluation" in draft.values:
        every = foreign.take("eval_steps", 0) or foreign.take(
            "logging_steps", 10
        )  # as transformers fills it in
        _every(draft, "output.eval_every", evaluates, every, updates, "eval")
        evaluate_all(draft, "TRL")
    foreign.take("eval_steps")  # which is not read where nothing is evaluated
    number = int(foreign.take("num_generations_eval", samples))
    if "output.eval_every" in draft.values and number:
        draft.put("output.eval_samples", number, "num_generations_eval, num_generations")
        if number == 1 and samples:  # which recipes take greedily
            draft.put("evaluation.temperature", draft.values["rollout.temperature"], "temperature")
    trackers(draft, foreign.take("report_to", "none"), "report_to")
    copy(draft, foreign, [Same("project", "output.project", None, str)])
    _hub(draft, foreign)
    foreign.take("eval_on_start")  # an evaluation before the first step is always made
    metric = foreign.take("metric_for_best_model")
    foreign.take("greater_is_better")
    if foreign.take("load_best_model_at_end", False) and "output.eval_every" in draft.values:
        what = f"load_best_model_at_end with metric_for_best_model={metric!r}"
        draft.ask("evaluation.best", "eval/reward" if samples else "eval/loss", what)


def _every(draft: Draft, key: str, strategy: Any, every: Any, updates: int, what: str) -> None:
    """Steps between two of something that TRL counts in updates, in shares of the run, or in epochs."""
    limit = draft.values["train.steps"]
    if strategy == "no":
        draft.put(key, 0, f"{what}_strategy")
    elif strategy == "epoch":
        draft.ask(key, 100, f"{what}_strategy='epoch': the steps of a pass over the data")
    elif every >= 1:
        draft.put(key, max(1, round(every / updates)), f"{what}_strategy, {what}_steps")
    elif "train.steps" in draft.to_fill:
        draft.ask(key, max(1, math.ceil(limit * every)), f"{what}_steps={every:g}, a share of train.steps")
    else:
        draft.put(
            key, max(1, math.ceil(limit * every)), f"{what}_strategy, {what}_steps as a share of the run"
        )


def _hub(draft: Draft, foreign: Foreign) -> None:
    name, private = foreign.take("hub_model_id"), foreign.take("hub_private_repo")
    if not foreign.take("push_to_hub", False):
        return
    if name is not None and "/" in name:
        draft.put("output.push_to_hub", name, "hub_model_id")
    else:
        draft.ask("output.push_to_hub", f"user/{name or 'model'}", "the repository, with its owner")
    if private is not None:
        draft.put("output.hub_private", bool(private), "hub_private_repo")
