"""Environments: every turn is appended as tokens, and only the policy's own tokens are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import comparable, run_recipe, small_recipe, trajectory

pytestmark = pytest.mark.distributed

HERE = "tests.rl.test_environment"
ONE_STEP = ("train.steps=1", "output.eval_every=0", "output.save_model=false")


class AsksAgain:
    """Says "+1=" until the policy has had two turns, or three where the row's answer is odd."""

    def reply(self, row: Mapping[str, Any], turns: Sequence[str]) -> str | None:
        return "+1=" if len(turns) < 2 + int(row["answer"]) % 2 else None


class Breaks:
    def reply(self, row: Mapping[str, Any], turns: Sequence[str]) -> str | None:
        raise LookupError("no such page")


class AnswersInParts:
    def reply(self, row: Mapping[str, Any], turns: Sequence[str]) -> Any:
        return ["1", "+"]


class SaysNothing:
    def reply(self, row: Mapping[str, Any], turns: Sequence[str]) -> str | None:
        assert not turns[-1].endswith("</s>")
        return ""


class Scribbles:
    """Writes into the row that it is given, and ends the conversation."""

    def reply(self, row: Any, turns: Sequence[str]) -> str | None:
        row["answer"] = "nothing that the policy says"
        return None


class Mute:
    """No environment."""


def run_and_keep(recipe: str) -> tuple[dict[str, float], list[dict[str, Any]], list[list[float]]]:
    """(metrics, trajectories, masks) of a run of one step."""
    from shardproof.rl import loop

    kept: list[Any] = []
    collect = loop.collect

    def keep(*given: Any, **settings: Any) -> Any:
        kept.append(collect(*given, **settings))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", keep)
        metrics = run_recipe(recipe)
    (experience,) = kept
    masks = [mask.tolist() for mask in experience.batch.columns["mask"]]
    return metrics, [t.to_json() for t in experience.trajectories], masks


def test_turns_are_appended_and_only_the_policys_are_trained_on(tmp_path):
    settings = [*ONE_STEP, f"environment.name={HERE}:AsksAgain", "rollout.max_new_tokens=8"]
    ((metrics, trajectories, masks),) = run_ranks(1, run_and_keep, small_recipe(tmp_path, *settings))
    authors = {tuple(s["author"] for s in t["segments"]) for t in trajectories}
    assert ("prompt", "policy", "environment", "policy") in {key[:4] for key in authors}
    assert len(authors) > 1, "conversations end at different turns"
    for t, mask in zip(trajectories, masks, strict=True):
        trained = [float(s["author"] == "policy") for s in t["segments"] for _ in s["tokens"]]
        assert mask == trained[1:]
        assert t["segments"][-1]["author"] == "policy"
    assert metrics["updates"] == 1.0 and metrics["canary/gap"] < 1e-3
    # Every token's log-prob is the trainer's own, although earlier turns were read again as a prompt.
    assert metrics["mismatch/max"] < 1e-3


def test_a_conversation_has_at_most_max_turns(tmp_path):
    settings = [*ONE_STEP, f"environment.name={HERE}:AsksAgain", "environment.max_turns=1"]
    ((_, trajectories, _),) = run_ranks(1, run_and_keep, small_recipe(tmp_path, *settings))
    assert {len(t["segments"]) for t in trajectories} == {2}


def test_conversations_are_the_same_at_any_number_of_ranks(tmp_path):
    for num_ranks in (1, 2):
        settings = [f"environment.name={HERE}:AsksAgain", "output.save_model=false", "output.eval_every=0"]
        run_ranks(num_ranks, run_recipe, small_recipe(tmp_path / str(num_ranks), *settings))
    for one, two in zip(*(trajectory(tmp_path / str(n)) for n in (1, 2)), strict=True):
        assert comparable(two) == pytest.approx(comparable(one), rel=1e-3, abs=1e-5)


@pytest.mark.fault
def test_an_environment_that_raises_ends_the_run_on_every_rank(tmp_path):
    recipe = small_recipe(tmp_path, *ONE_STEP, f"environment.name={HERE}:Breaks")
    outcomes = run_ranks_outcomes(2, run_recipe, recipe)
    assert outcomes[0] == outcomes[1] and outcomes[0][1] == "RolloutFault"
    assert "the environment failed: LookupError: no such page (test_environment.py:" in outcomes[0][2]


@pytest.mark.fault
def test_a_reply_that_is_no_text_is_refused_and_rows_stay_as_they_were(tmp_path):
    recipe = small_recipe(tmp_path, *ONE_STEP, f"environment.name={HERE}:AnswersInParts")
    (outcome,) = run_ranks_outcomes(1, run_recipe, recipe)
    assert "the environment failed: TypeError: the reply is list, expected str or None" in outcome[2]
    means = []
    for number, name in enumerate(("SaysNothing", "Scribbles")):
        settings = [*ONE_STEP, "train.prompts_per_step=24", f"environment.name={HERE}:{name}"]
        ((metrics, _, _),) = run_ranks(1, run_and_keep, small_recipe(tmp_path / str(number), *settings))
        means.append(metrics["reward/mean"])
    assert means[0] == means[1] > 0, "rewards read the row as it was"


@pytest.mark.fault
@pytest.mark.parametrize(("name", "said"), [("Mute", "which has no reply"), ("Absent", "has no 'Absent'")])
def test_what_is_no_environment_is_refused_by_name(tmp_path, name, said):
    (outcome,) = run_ranks_outcomes(1, run_recipe, small_recipe(tmp_path, f"environment.name={HERE}:{name}"))
    assert outcome[1] == "ConfigError" and said in outcome[2]
