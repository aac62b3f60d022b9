"""pass@k, majority votes and intervals against what counting every draw says."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from shardproof.rl import evaluation
from shardproof.rl.conversations.measures import reward_sample
from shardproof.rl.experience_metrics import Success
from shardproof.rl.held_out_measures import Answered, _students_t, interval, measure, pass_at, reader, vote
from shardproof.rollout.trajectory import Reward, Trajectory


@pytest.mark.parametrize(
    ("num", "right", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 4), (7, 3, 5), (4, 1, 4)]
)
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_one(num, right, k):
    draws = list(itertools.combinations([1] * right + [0] * (num - right), k))
    assert pass_at(num, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased():
    # The mean over every outcome of 4 tries equals the chance that 2 tries hold a right one.
    p, num, k = 0.3, 4, 2
    expected = sum(
        math.comb(num, c) * p**c * (1 - p) ** (num - c) * pass_at(num, c, k) for c in range(num + 1)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k)


def test_more_tries_than_completions_are_refused():
    with pytest.raises(ValueError, match="pass@3 of 2"):
        pass_at(2, 1, 3)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("tries", [1, 4])
def test_intervals_hold_the_truth_about_as_often_as_they_say(p, tries):
    # Prompts differ in difficulty; the truth is the mean over all prompts that could have been drawn.
    drawn = random.Random(f"{p} {tries}")
    held = 0
    for _ in range(400):
        values = []
        for _ in range(40):
            own = min(1.0, max(0.0, drawn.choice((p - 0.05, p + 0.05))))
            values.append(statistics.fmean(drawn.random() < own for _ in range(tries)))
        low, high = interval(values, 40 * tries)
        held += low <= p <= high
    assert 0.91 <= held / 400 <= 0.995


@pytest.mark.parametrize("rows", [3, 5, 10, 40])
def test_intervals_of_a_few_rows_hold_the_truth_as_often(rows):
    """Of rows of any difficulty, with 16 completions each: a handful of shares may lie close together by chance."""
    drawn = random.Random(rows)
    held = 0
    for _ in range(600):
        own = [drawn.random() for _ in range(rows)]
        values = [sum(drawn.random() < p for _ in range(16)) / 16 for p in own]
        low, high = interval(values, 16 * rows)
        held += low <= 0.5 <= high
    assert held / 600 >= 0.93


@pytest.mark.parametrize(
    ("freedom", "expected"), [(2, 4.3027), (4, 2.7764), (9, 2.2622), (29, 2.0452), (999, 1.9623)]
)
def test_students_t_is_that_of_tables(freedom, expected):
    assert _students_t(freedom) == pytest.approx(expected, rel=0.031 if freedom < 4 else 0.003)


def test_an_interval_is_never_a_point_and_never_leaves_0_to_1():
    for values in ([0.0] * 5, [1.0] * 5, [0.5] * 5, [0.0], [1.0, 0.0]):
        low, high = interval(values, len(values))
        assert 0.0 <= low < high <= 1.0
        assert low <= statistics.fmean(values) <= high
    for num in range(1, 300):
        assert interval([0.0] * num, num)[0] == 0.0 and interval([1.0] * num, num)[1] == 1.0


@pytest.mark.parametrize(
    ("how", "first", "text", "answer"),
    [
        ("auto", "numeric", "so 3 and 1,200.0", "1200.0"),
        ("auto", "exact_match", "  yes \n", "yes"),
        ("auto", "math_verify", r"thus \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("boxed", "my:function", r"\boxed{ 1,200 }", "1200.0"),
        ("boxed", "numeric", "no box, 7", "7.0"),
        ("boxed", "numeric", r"\boxed{3", None),
        ("number", "my:function", "none here", None),
        ("boxed", "numeric", r"\boxed{1,2} and not 2", "1,2"),  # a pair is no number
        ("boxed", "numeric", r"\boxed{1,234.50}", "1234.5"),
        ("boxed", "numeric", r"7, or \boxed{ }", None),
        ("number", "numeric", "-0", "0.0"),
        ("number", "numeric", "12,345,678,901,234,567,891.0", "12345678901234567891"),  # no float's number
        ("number", "numeric", "9" * 400, "inf"),
        ("text", "numeric", "4", "4"),
        ("text", "numeric", " \n", None),
    ],
)
def test_answers_are_read_as_the_reward_or_the_recipe_says(how, first, text, answer):
    read = reader(how, first)
    assert read is not None
    assert read(text) == answer


@pytest.mark.parametrize(("how", "first"), [("auto", "my:function"), ("none", "numeric")])
def test_without_a_way_to_read_answers_there_is_no_vote(how, first):
    assert reader(how, first) is None


@pytest.mark.parametrize(
    ("answers", "scores", "won"),
    [
        (["4", "5", "5"], [1.0, 0.0, 0.0], 0.0),
        (["4", "5", "4"], [1.0, 0.0, 1.0], 1.0),
        (["5", "4"], [0.0, 1.0], 0.0),  # of those that tie, the earliest
        ([None, "4", None], [0.0, 1.0, 0.0], 1.0),  # a completion without an answer has no vote
        ([None, None], [0.0, 0.0], None),
        (["4", "5"], [None, 1.0], None),  # the winner's reward failed
        (["4", "4", "5"], [None, 1.0, 0.0], 1.0),  # of one of its completions
    ],
)
def test_the_majority_wins(answers, scores, won):
    assert vote(Answered(tuple(scores), tuple(answers))) == won


def test_measures_of_a_set():
    prompts = [
        Answered((1.0, 0.0, None, 1.0), ("a", "b", None, "a")),  # a failed reward is not right
        Answered((0.0, 0.0, 0.0, 0.4), ("c", "c", "d", "e")),
    ]
    found = measure(prompts, (1, 4), 1.0, True, 4)
    assert found["pass@1"] == pytest.approx((2 / 4 + 0) / 2)
    assert found["pass@4"] == 0.5
    assert found["avg@4"] == found["pass@1"]
    assert found["maj@4"] == 0.5
    assert 0.0 <= found["pass@1_low"] < found["pass@1"] < found["pass@1_high"] <= 1.0
    lenient = measure(prompts, (4,), 0.4, False, 4)
    assert lenient["pass@4"] == 1.0
    assert "maj@4" not in lenient
    assert "avg@1" not in measure([Answered((1.0,))], (1,), 1.0, False, 1)


def conversation(*turns, ended="environment"):
    """A conversation: what the policy said, and what an environment replied."""
    told = [{"text": said, "reply": [{"content": reply}], "reward": 0.0} for said, reply in turns]
    whole = "".join(part for turn in turns for part in turn)
    facts = {"prompt": "", "turns": told, "environment": {"error": "down"}}
    return Trajectory((), text=whole, facts=facts, ended=ended, reward=Reward(1.0, {"numeric": 1.0}))


def test_the_vote_reads_what_rewards_read():
    """Of a conversation the policy's last turn: the numbers that an environment replied are not its answers."""
    group = [
        conversation(("look up", "it is 7"), ("so 8", "")),
        conversation(("look up", "it is 7"), ("I give up", "")),
        conversation(("9", ""), ended="failed"),
        Trajectory((), text="so 8", facts={"prompt": ""}, reward=Reward(1.0, {"numeric": 1.0})),
    ]
    told = evaluation._told(group, Success(("numeric",)), reader("number", "numeric"))
    assert told["answers"] == ["8.0", None, None, "8.0"]
    read = [reward_sample(made, {})[1] for made in group]
    assert read == ["so 8", "I give up", "9", "so 8"]
