"""Sampling that runs ahead of training: which prompts a step trains on, how old their tokens are, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from shardproof.rl.versions import Versions, lag_of
from shardproof.rollout.trajectory import Segment
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import lines, run_recipe, small_recipe, trajectory, with_last

pytestmark = pytest.mark.distributed

SHORT = ("output.eval_every=0", "output.save_model=false")


def test_the_lag_of_a_token_is_counted_in_hand_overs_that_changed_the_weights():
    versions = Versions()
    for version in (0, 3, 3, 6):
        versions.hand_over(version)
    assert [versions.lag(version) for version in (6, 3, 0, 1, None)] == [0, 1, 2, None, None]
    resumed = Versions()
    resumed.restore(versions.to_json())
    resumed.hand_over(6)
    assert resumed.lag(0) == 2
    several = Segment((1, 2, 3), "policy", (0.0,) * 3, 3, trained=True, parts=((1, 3), (2, 6)))
    assert lag_of([several], versions) == 1
    assert lag_of([], versions) == 0
    assert lag_of([Segment((1,), "policy", (0.0,), 5)], versions) is None


def run_and_note(recipe: str) -> tuple[list[Any], list[dict[str, float]]]:
    """(each step's prompts on this rank with the versions of their tokens, each step's metrics)."""
    from shardproof.rl import loop

    collect, steps, found = loop.collect, [], []

    def note(*given: Any, **settings: Any) -> Any:
        experience = collect(*given, **settings)
        made = experience.trajectories
        steps.append([(t.facts["prompt"], t.group, t.sample, t.version, t.tokens) for t in made])
        found.append(experience.metrics)
        return experience

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", note)
        run_recipe(recipe)
    return steps, found


def prompts_of(ranks: list[Any]) -> list[list[str]]:
    """The prompts of each step in the order in which they were drawn, from what the ranks noted."""
    steps = []
    for parts in zip(*(steps for steps, _ in ranks), strict=True):
        by_group = {group: prompt for part in parts for prompt, group, *_ in part}
        steps.append([by_group[group] for group in sorted(by_group)])
    return steps


@pytest.mark.parametrize("ahead", [1, 3])
def test_every_drawn_prompt_is_trained_on_once_in_drawn_order_with_a_lag_of_exactly_ahead(tmp_path, ahead):
    settings = [*SHORT, "train.steps=5"]
    (plain,) = run_ranks(1, run_and_note, small_recipe(tmp_path / "0", *settings))
    ranks = run_ranks(
        2, run_and_note, small_recipe(tmp_path / "k", *settings, f"rollout.ahead={ahead}", "train.ranks=2")
    )
    assert prompts_of(ranks) == prompts_of([plain])
    for steps, metrics in ranks:
        for step, made in enumerate(steps):
            lag = min(step, ahead)
            assert {version for *_, version, _ in made} == {step - lag}
            assert metrics[step]["lag/mean"] == metrics[step]["lag/max"] == lag
    assert not any(name.startswith(("lag/", "ahead/")) for name in plain[1][0])
    # What was drawn before the first update is drawn from the same weights with the same seeds.
    together = sorted(made for steps, _ in ranks for made in steps[0])
    assert together == sorted(plain[0][0])
    buffered = [metrics["ahead/buffered"] for metrics in ranks[0][1]]
    assert buffered == [6 * 4 * min(ahead, 4 - step) for step in range(5)]


def test_dynamic_sampling_draws_more_prompts_for_the_step_that_needs_them(tmp_path):
    settings = [*SHORT, "train.steps=3", "rollout.ahead=1", "algorithm.name=dapo"]
    (noted,) = run_ranks(1, run_and_note, small_recipe(tmp_path, *settings))
    kept = [metrics["prompts/kept"] for metrics in noted[1]]
    assert min(kept) < 1.0, "some step had to draw more"
    assert all(metrics["lag/max"] <= 1 for metrics in noted[1])
    assert len({(step, *place[1:3]) for step, made in enumerate(noted[0]) for place in made}) == 3 * 6 * 4


def run_with_versions(recipe: str, rank: int, older: int) -> dict[str, float]:
    """A run in which, from the second step on, one rank's engine says that weights of `older` versions ago drew a token."""
    from shardproof.rollout.local import EmbeddedEngine

    complete = EmbeddedEngine.complete

    def mislabel(self: Any, requests: Any, sampling: Any) -> Any:
        made = complete(self, requests, sampling)
        if dist.get_rank() == rank and len(requests) > 1 and self.version >= 2:
            parts = ((1, self.version - older), (len(made[3].segments[-1].tokens) - 1, self.version))
            made[3] = with_last(made[3], parts=parts, version=self.version - older)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedEngine, "complete", mislabel)
        return run_recipe(recipe)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("ahead", "older", "message"),
    [
        (
            0,
            1,
            "has tokens from weights of version 1, 1 hand-overs before the policy's version 2; rollout.ahead",
        ),
        (
            1,
            1,
            "has tokens from weights of version 1, 2 hand-overs before the policy's version 3; rollout.ahead",
        ),
        (
            1,
            5,
            "has tokens from weights of version -3, which the engine was not given; the policy is at version",
        ),
    ],
)
def test_a_token_of_a_version_that_is_too_old_stops_every_rank_before_it_is_trained_on(
    tmp_path, ahead, older, message
):
    recipe = small_recipe(tmp_path, *SHORT, "train.steps=6", f"rollout.ahead={ahead}")
    outcomes = run_ranks_outcomes(2, run_with_versions, recipe, 1, older)
    assert outcomes[0] == outcomes[1] and outcomes[0][1] == "RolloutFault"
    assert f"R501 rollout: rank 1: trajectory 3 of prompt 1 {message}" in outcomes[0][2]
    assert len(lines(tmp_path / "metrics.jsonl")) == 2 + ahead, "the steps before it"
    assert trajectory(tmp_path)[-1]["version"] == 2 + ahead
