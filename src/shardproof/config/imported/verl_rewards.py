"""What verl's configs say about rewards: functions, models, and what reward managers do with long completions."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

from shardproof.config.imported.draft import Draft, Foreign, nested

_PLAIN = ("naive", "dapo", "batch", "prime")
_MANAGERS = ("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")


def rewards(draft: Draft, foreign: Foreign) -> None:
    """The reward functions and models."""
    if foreign.take(foreign.either("reward.reward_model.enable", "reward_model.enable"), False):
        where = foreign.either("reward.reward_model.model_path", "reward_model.model.path")
        model: dict[str, Any] = {"path": foreign.take(where, "path/to/reward-model")}
        draft.put("reward.models", [model], where)
    function = foreign.either("reward.custom_reward_function.path", "custom_reward_function.path")
    if foreign.has(function):
        path = Path(foreign.take(function))
        of_it = function.removesuffix("path")
        name = f"{path.stem}:{foreign.take(f'{of_it}name', 'compute_score')}"
        where = f"custom_reward_function; put {path.name} beside the recipe"
        options = nested(foreign.section(f"{of_it}reward_kwargs"))
        written = {"name": name, "signature": "verl", **({"options": options} if options else {})}
        draft.put("reward.functions", [written], where)
        draft.put("data.answer_column", None, "compute_score reads verl's own columns")
    else:
        what = "verl has the answer in reward_model.ground_truth: copy it into a column"
        draft.ask("data.answer_column", "answer", what)
    by_each = draft.values["algorithm.name"] == "gdpo"
    if by_each:
        keys = foreign.take("algorithm.gdpo_reward_keys", [])
        weights = foreign.take("algorithm.gdpo_reward_weights")
        what = f"a function of its own for each of gdpo_reward_keys={keys!r}"
        what += "" if weights is None else f", with the weights {weights!r}"
        draft.ask("reward.functions", draft.values.get("reward.functions", [{"name": "exact_match"}]), what)
    manager = foreign.either(*_MANAGERS)
    draft.lack(foreign, "reward_manager.source", "write it as a reward function", unless=("register",))
    draft.lack(
        foreign, manager, "write it as a reward function", unless=(*_PLAIN, *(("gdpo",) if by_each else ()))
    )
    for key in [key for key in foreign.left if fnmatch.fnmatch(key, "reward*.reward_kwargs.*")]:
        if not key.endswith((".max_resp_len", ".log")):
            draft.lack(foreign, key, "the reward manager's own: write it as an option of a reward function")


def overlong(draft: Draft, foreign: Foreign) -> None:
    """The length penalty, which of verl's reward managers 'dapo' has; it counts from the longest completion."""
    manager = foreign.take(foreign.either(*_MANAGERS), "dapo")  # as the config of its recipe says
    for root in ("reward_model", "reward_model.reward_kwargs", "reward.reward_kwargs"):
        buffer = f"{root}.overlong_buffer" if root == "reward_model" else f"{root}.overlong_buffer_cfg"
        longest = draft.values["rollout.max_new_tokens"]
        if not foreign.take(f"{buffer}.enable", False):
            pass
        elif manager == "naive":
            draft.skip(foreign, f"{buffer}.*", "verl's reward manager 'naive' does not read it")
        else:
            end = int(foreign.take(f"{root}.max_resp_len", longest))
            draft.put("algorithm.overlong_from", end - int(foreign.take(f"{buffer}.len", 0)), f"{buffer}.len")
            draft.lack(foreign, f"{buffer}.penalty_factor", "the penalty grows to 1", unless=(1, 1.0))
            if end != longest:
                draft.gaps[f"{root}.max_resp_len={end}"] = (
                    f"the penalty is 1 at {longest}, the longest completion"
                )
        for key in (f"{buffer}.len", f"{buffer}.penalty_factor", f"{root}.max_resp_len"):
            foreign.take(key)
