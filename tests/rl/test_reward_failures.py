"""Rewards that fail: what the terminal shows, and when a run ends, the same on every rank."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace

import pytest
import torch.distributed as dist

from shardproof.config.load import from_json
from shardproof.errors import ConfigError
from shardproof.rl.checks import check_inputs
from shardproof.rl.rewards.failures import result_together
from shardproof.rl.rewards.functions import BUILT_IN
from shardproof.rl.rewards.runner import RewardRunner, RewardSpec
from shardproof.rollout.trajectory import Trajectory
from shardproof.terminal import attached
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import small_recipe, write_rows

pytestmark = [pytest.mark.distributed, pytest.mark.fault]


def obey(prompt, completion, row):
    """Does what the completion says."""
    if completion == "missing":
        return row["answer"]
    if completion == "hostile":
        raise ValueError("\x1b]0;title\x07\nsecond line \u202e")
    return float(completion)


def score(*batches):
    """What the ranks make of batches of completions, each a list per rank: who failed, and what each terminal shows."""
    found, terminal = [], io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(terminal), attached():
        patch.setitem(BUILT_IN, "numeric", obey)  # in place of one that needs no worker processes
        runner = RewardRunner([RewardSpec("numeric")])
        for per_rank in batches:
            with runner.start() as pending:
                mine = per_rank[dist.get_rank()]
                pending.add([("", completion, {}) for completion in mine])
                made = [Trajectory.of_prompt((1,)) for _ in mine]
                found.append([one.failed for one in result_together(pending, made)])
    return found, terminal.getvalue()


def test_the_first_failure_of_a_kind_is_shown_at_once_by_rank_0():
    batch = [["1"], ["x", "1", "y"]]
    (first, shown), (second, nothing) = run_ranks(2, score, batch, batch)
    assert (first, second) == ([[False]] * 2, [[True, False, True]] * 2)
    assert "warning: rank 1: reward 'numeric' failed: ValueError: could not convert" in shown
    assert shown.count("\n") == 1 and "'x'" in shown and nothing == ""


def test_what_fails_in_another_way_is_shown_as_well():
    (_, shown), _ = run_ranks(2, score, [["1", "x"], ["1", "nan"]], [["missing", "inf"], ["1"]])
    lines = shown.splitlines()
    assert len(lines) == 4
    assert "ValueError" in lines[0] and "rank 1" in lines[1] and "returned nan" in lines[1]
    assert "KeyError" in lines[2] and "returned inf" in lines[3]


def converse(*batches):
    """What the terminal shows of conversations whose environment failed with these errors; one more did not fail."""
    terminal = io.StringIO()
    with contextlib.redirect_stderr(terminal), attached():
        runner = RewardRunner([])
        for errors in batches:
            made = [Trajectory.of_prompt((1,))]
            for error in errors:
                facts = {"environment": {"error": error}}
                made.append(replace(Trajectory.of_prompt((1,)), ended="failed", facts=facts))
            with runner.start() as pending:
                pending.add([("", "", {})])
                result_together(pending, made)
    return terminal.getvalue()


def test_environments_that_fail_in_different_ways_in_any_turn_are_told_apart():
    first = [
        "turn 2: ValueError: no (env.py:3)",
        "turn 3: ValueError: no (env.py:3)",
        "turn 2: no answer in 2 s",
    ]
    (shown,) = run_ranks(1, converse, first, ["turn 2: its worker process died (signal 9)", first[1]])
    lines = shown.splitlines()
    assert len(lines) == 3
    assert "turn 2: ValueError" in lines[0] and "no answer in 2 s" in lines[1] and "died" in lines[2]


def test_a_whole_batch_that_failed_ends_the_run_on_every_rank():
    for batch in ([["x"], ["x", "nan"]], [[], ["x"]]):
        first, second = run_ranks_outcomes(2, score, batch)
        assert first == second and first[:2] == ("error", "RolloutFault")
        assert (
            "R504 reward: the whole batch failed" in first[2]
            and "could not convert string to float: 'x'" in first[2]
        )


def test_batches_without_failures_or_samples_are_silent():
    found = run_ranks(2, score, [[], []], [["1"], []], [["1"], ["2", "3"]])
    assert [shown for _, shown in found] == ["", ""]


def test_the_terminal_is_shown_text_and_no_commands():
    ((_, shown),) = run_ranks(1, score, [["hostile", "1"]])
    assert shown.count("\n") == 1 and shown.isascii() and shown.strip().isprintable()
    assert r"\x1b]0;title\x07 second line \u202e" in shown


def test_rows_that_a_reward_can_never_score_are_refused_before_the_start(tmp_path):
    rows = [
        {"prompt": "1+1=", "answer": "2", "completion": "2"},
        {"prompt": "1+2=", "answer": None, "completion": "3"},
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    sources = [f"data.train={data}", f"data.evaluation={data}"]
    for override in sources:
        with pytest.raises(ConfigError, match=r"C005 data: .*rows.jsonl:2: reward 'exact_match': .*is null"):
            check_inputs(from_json(small_recipe(tmp_path / "run", override)))
    # Completions that are imitated are not scored.
    held_out = f"data.evaluation={write_rows(tmp_path / 'good.jsonl', rows[:1])}"
    check_inputs(from_json(small_recipe(tmp_path / "run", "algorithm.name=sft", sources[0], held_out)))
