"""reasoning-gym's tasks as an environment: the real package."""

import json
import sys

import pytest

from shardproof.environments.from_reasoning_gym import ReasoningGym
from shardproof.environments.protocol import Turn
from shardproof.errors import ConfigError

LEGS = {"task": "leg_counting", "size": 12, "evaluation_size": 5}


def turn(text, **how):
    return Turn(text=text, content=text, **how)


def begun(row, **options):
    environment = ReasoningGym(**options)
    assert environment.start(json.loads(json.dumps(row)), seed=0) is None
    return environment


def test_rows_are_questions_and_the_same_for_the_same_seed():
    rows = ReasoningGym.rows("train", **LEGS)
    assert len(rows) == 12
    assert rows == ReasoningGym.rows("train", **LEGS)
    assert rows != ReasoningGym.rows("train", **LEGS, seed=1000)
    assert "legs" in rows[0]["prompt"] and rows[0]["task"] == "leg_counting"
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.invariant
def test_held_out_questions_are_different_and_none_is_trained_on():
    # A task of few questions, so that the two splits would share some.
    options = {"task": "basic_arithmetic", "config": {"max_terms": 2, "max_digits": 1}, "size": 60}
    trained = [row["prompt"] for row in ReasoningGym.rows("train", **options)]
    held_out = [row["prompt"] for row in ReasoningGym.rows("evaluation", **options, evaluation_size=30)]
    assert len(set(trained)) < len(trained) and len(set(held_out)) == 30
    assert not set(trained) & set(held_out)


@pytest.mark.parametrize(
    "task", ["leg_counting", "countdown", "arc_agi", "list_functions", "acre", "knight_swap"]
)
def test_the_tasks_own_score_decides(task):
    # Among them tasks that cannot score what came back from JSON, and such that make a question only once.
    options = {"task": task, "size": 10}
    for row in ReasoningGym.rows("train", **options)[:3]:
        reply = begun(row, **options).step(turn(f"I think <answer>{row['answer']}</answer>"))
        assert (reply.done, reply.reward, reply.facts) == (True, 1.0, {"solved": 1.0})
        assert begun(row, **options).step(turn("<answer>no idea</answer>")).reward < 0.5


@pytest.mark.parametrize(
    ("how", "text", "reward"),
    [
        ("either", "<answer>5</answer> no, <answer> {} </answer>", 1.0),
        ("either", " {}\n", 1.0),
        ("tag", "{}", 0.0),
        ("tag", "<answer>{}</answer>", 1.0),
        ("text", "{}", 1.0),
    ],
)
def test_how_the_answer_is_read(how, text, reward):
    row = ReasoningGym.rows("train", **LEGS)[0]
    reply = begun(row, **LEGS, answer=how).step(turn(text.format(row["answer"])))
    assert reply.reward == reward


def test_several_tasks_are_mixed_by_weight():
    tasks = [{"name": "leg_counting", "weight": 3.0}, "basic_arithmetic"]
    rows = ReasoningGym.rows("train", tasks=tasks, size=200)
    named = [row["task"] for row in rows]
    assert 120 <= named.count("leg_counting") <= 180
    row = rows[named.index("basic_arithmetic")]
    reply = begun(row, tasks=tasks, size=200).step(turn(row["answer"]))
    assert reply.reward == 1.0 and reply.facts["solved/basic_arithmetic"] == 1.0


def test_a_wrong_answer_may_be_followed_by_another_attempt():
    row = ReasoningGym.rows("train", **LEGS)[0]
    environment = begun(row, **LEGS, attempts=3)
    again = environment.step(turn("-1", number=1))
    assert not again.done and again.reward is None
    assert again.messages == [{"role": "user", "content": "That is not correct. Try again."}]
    assert environment.step(turn(row["answer"], number=2)).reward == 1.0
    assert begun(row, **LEGS, attempts=3).step(turn("-1", number=3)).done
    assert begun(row, **LEGS, attempts=3).step(turn("-1", number=1, last=True)).done


def test_a_system_prompt_by_name_and_as_text():
    [first, *_] = ReasoningGym.rows("train", **LEGS, system_prompt="simple")
    assert first["prompt"][0]["role"] == "system" and "<answer>" in first["prompt"][0]["content"]
    [first, *_] = ReasoningGym.rows("train", **LEGS, system_prompt="Be brief.")
    assert first["prompt"][0]["content"] == "Be brief."


@pytest.mark.fault
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name one task as options.task"),
        (
            {"task": "leg_countin"},
            "'leg_countin' is not one of reasoning-gym's .* Did you mean 'leg_counting'",
        ),
        ({"task": "leg_counting", "config": {"legs": 3}}, "leg_counting cannot be made: .*legs"),
        ({"task": "leg_counting", "config": {"min_animals": -1}}, "min_animals must be positive"),
        ({"tasks": [{"name": "leg_counting", "share": 2}]}, "'share' is not one of name, weight, config"),
        ({"task": "leg_counting", "size": 0}, "size=0 is not a number above 0"),
        ({"task": "leg_counting", "answer": "tags"}, "Did you mean 'tag'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGym(**options)


@pytest.mark.fault
def test_a_task_with_too_few_questions_and_an_unknown_split_are_named():
    few = {"task": "basic_arithmetic", "config": {"max_terms": 2, "max_digits": 1, "operators": ["+"]}}
    with pytest.raises(ConfigError, match=r"only \d+ questions .*\n.*set options.evaluation_size=\d+"):
        ReasoningGym.rows("evaluation", **few, size=50, evaluation_size=3000)
    with pytest.raises(ConfigError, match="no split 'test': the splits are train and evaluation"):
        ReasoningGym.rows("test", **LEGS)
    with pytest.raises(ValueError, match="environment:train"):
        ReasoningGym(**LEGS).start({"prompt": "2+2"}, seed=0)


@pytest.mark.fault
def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardproof\[reasoning-gym\]'"):
        ReasoningGym(task="leg_counting", size=7)
