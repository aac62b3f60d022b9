"""Built-in rewards for the form of a completion, at their borders and beside TRL's."""

import pytest
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

from shardproof.errors import ConfigError
from shardproof.rl.conversations.measures import reward_sample
from shardproof.rl.rewards.functions import CANNOT_HANG, cannot_hang, find_reward, row_problem
from shardproof.rl.rewards.runner import RewardRunner
from shardproof.rl.rewards.specs import RewardSpec
from shardproof.rollout.trajectory import Segment, Trajectory

THOUGHT = "<think>a</think><answer>4</answer>"


def value(name, completion, row=None, **options):
    (found,) = find_reward(RewardSpec(name, options=options)).now([("", completion, row or {})])
    assert found.error is None, found.error
    return found.value


def tokens(num):
    return {"completion_ids": list(range(num))}


@pytest.mark.parametrize(
    ("completion", "strict", "soft", "count"),
    [
        (THOUGHT, 1.0, 1.0, 1.0),
        (f"\n{THOUGHT}\n", 1.0, 1.0, 1.0),
        ("<think>\n\n</think>\n<answer></answer>", 1.0, 1.0, 1.0),
        (f"well: {THOUGHT}", 0.0, 1.0, 1.0),
        ("<think>a</think> so <answer>4</answer>", 0.0, 1.0, 1.0),
        (f"{THOUGHT} and more", 0.0, 1.0, 1.0),
        ("<answer>4</answer><think>a</think>", 0.0, 0.0, 1.0),
        ("<think>a<think>b</think></think><answer>4</answer>", 0.0, 1.0, 0.5),
        ("<think>a</think><answer>4", 0.0, 0.0, 0.75),
        ("<think><answer>4</answer></think>", 0.0, 0.0, 1.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_format(completion, strict, soft, count):
    assert [value("format", completion, mode=mode) for mode in ("strict", "soft", "count")] == [
        strict,
        soft,
        count,
    ]


def test_format_with_a_tag_that_the_prompt_has_opened_and_with_other_tags():
    assert value("format", "a</think><answer>4</answer>", opened=True) == 1.0
    assert value("format", THOUGHT, opened=True) == 0.0
    assert value("format", "<plan>x</plan>", tags=["plan"]) == 1.0


def test_format_by_a_pattern_looks_at_the_whole_completion():
    pattern = r"Answer: \d+"
    assert [
        value("format", text, pattern=pattern) for text in ("Answer: 4", "Answer: 4.", "\nAnswer: 4")
    ] == [
        1.0,
        0.0,
        0.0,
    ]
    assert value("format", "a\nb", pattern="a.b") == 1.0
    # A user's pattern can take exponential time; tags cannot.
    assert not cannot_hang(RewardSpec("format", options={"pattern": pattern}))
    assert cannot_hang(RewardSpec("format")) and "format" not in CANNOT_HANG


@pytest.mark.parametrize("num", [0, 79, 80, 81, 90, 99, 100, 101, 500])
def test_length_with_a_limit_is_trls_soft_overlong_punishment(num):
    (theirs,) = get_soft_overlong_punishment(100, 20)([list(range(num))])
    assert value("length", "", tokens(num), limit=100, start=80) == pytest.approx(theirs, abs=1e-12)


def test_length_with_a_target():
    assert [value("length", "", tokens(n), target=10) for n in (0, 5, 10, 15, 20, 40)] == [
        0.0,
        0.5,
        1.0,
        0.5,
        0.0,
        0.0,
    ]
    assert [value("length", "", tokens(n), target=10, width=2) for n in (8, 9, 10, 11, 12)] == [
        0.0,
        0.5,
        1.0,
        0.5,
        0.0,
    ]
    assert value("length", "two words", target=2, unit="words") == 1.0
    assert value("length", "four", target=4, unit="characters") == 1.0


@pytest.mark.parametrize("num", [0, 1, 25, 50, 99, 100, 101, 200])
@pytest.mark.parametrize("said", ["4", "5"])
def test_cosine_is_trls(num, said):
    bounds = {
        "min_value_wrong": -2.0,
        "max_value_wrong": -0.25,
        "min_value_correct": 0.125,
        "max_value_correct": 2.0,
    }
    theirs = get_cosine_scaled_reward(max_len=100, **bounds)
    (expected,) = theirs([[{"content": f"\\boxed{{{said}}}"}]], ["$4$"], [list(range(num))])
    row = {"answer": "4", **tokens(num)}
    found = value("cosine", f"\\boxed{{{said}}}", row, max_length=100, correct="numeric", **bounds)
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("ids", [[], [1, 2], [1, 2, 3], [5] * 9, [1, 2, 1, 2, 1], [1, 2, 3, 4, 1, 2, 3]])
def test_repetition_is_trls(size, ids):
    (theirs,) = get_repetition_penalty_reward(size, -0.5)([ids])
    found = value("repetition", "", {"completion_ids": ids}, ngram_size=size, max_penalty=-0.5)
    assert found == pytest.approx(theirs, abs=1e-12)


def test_repetition_of_words():
    assert value("repetition", "The cat the cat", ngram_size=2, unit="words") == pytest.approx(-1 / 3)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("exact_match", {"strict": True}, "has no options"),
        ("format", {"tag": ["a"]}, "Did you mean 'tags'?"),
        ("format", {"mode": "hard"}, "mode='hard' is not one of strict, soft, count"),
        ("format", {"tags": "think"}, "is not a list of names"),
        ("format", {"tags": ["a", "a"]}, "names a tag twice"),
        ("format", {"pattern": "a["}, "unterminated character set"),
        ("format", {"pattern": "a", "mode": "soft"}, "mode='soft' is for tags"),
        ("format", {"pattern": "a", "tags": ["b"]}, "the pattern alone would be read"),
        ("length", {}, "give either limit, with start, or target"),
        ("length", {"limit": 5, "start": 6}, "start=6 is not a whole number from 0 to 5"),
        ("length", {"limit": 5}, "limit and start belong together"),
        ("length", {"target": True}, "target=True is not a whole number"),
        ("length", {"target": 5, "unit": "token"}, "Did you mean 'tokens'?"),
        ("cosine", {}, "max_length is missing"),
        ("cosine", {"max_length": 10, "correct": "numerical"}, "Did you mean 'numeric'?"),
        ("repetition", {"max_penalty": 1.0}, "max_penalty=1.0 is not a number from -1e+06 to 0"),
        ("repetition", {"ngram_size": 0}, "ngram_size=0"),
        ("code", {"score": "most"}, "score='most' is not one of share, all"),
        ("code", {"prelude": "import"}, "prelude is not Python"),
        ("code", {"prelude": 1}, "prelude=1 is not text"),
        ("judge", {"model": "m"}, "is not the address of a server"),
        ("judge", {"url": "http://localhost/v1"}, "model is missing"),
        ("judge", {"url": "http://localhost/v1", "model": "m", "prompt": "?"}, "prompt has no {completion}"),
        (
            "judge",
            {"url": "http://localhost/v1", "model": "m", "json_key": "score", "pattern": "([0-9])"},
            "json_key and pattern: give one of them",
        ),
        (
            "judge",
            {"url": "http://localhost/v1", "model": "m", "scale": [1, 1]},
            "is not the lowest and the highest",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(name, options, said):
    with pytest.raises(ConfigError) as caught:
        find_reward(RewardSpec(name, options=options))
    assert caught.value.code == "C001" and said in str(caught.value)


def test_a_row_that_a_reward_could_never_score_is_known_before_the_run():
    cosine = RewardSpec("cosine", options={"max_length": 10, "correct": "numeric"}, label="short")
    assert row_problem(cosine, {"answer": "none"}) == "reward 'short': the answer 'none' holds no number"
    assert row_problem(cosine, {"answer": "4"}) is None
    assert row_problem(RewardSpec("length", options={"target": 5}), {}) is None


def test_a_function_is_used_twice_under_two_labels():
    specs = [
        RewardSpec("length", 0.5, "short", {"limit": 4, "start": 2}),
        RewardSpec("length", 2.0, "near", {"target": 4}, clip=(0.0, 0.5)),
        RewardSpec("format", 1.0, options={"tags": ["a"]}),
    ]
    with RewardRunner(specs) as runner:
        assert not runner.pool.workers and runner.lanes == []
        (found,) = runner.score([("", "<a></a>", tokens(3))])
    # A value that is clipped in the total is shown as it is.
    assert found.parts == {"short": -0.5, "near": 0.75, "format": 1.0}
    assert found.total == 0.5 * -0.5 + 2.0 * 0.5 + 1.0


def test_lengths_are_the_policys_own_where_rows_have_columns_of_such_names():
    said = Segment((7, 8, 9), "policy")
    row = {"completion_ids": [1] * 8, "turns": ["asked"], "level": 2}
    one = Trajectory((Segment((1,), "prompt"), said), facts={"prompt": ""})
    several = Trajectory((said,), facts={"prompt": "", "turns": [{"text": "so 4"}]}, ended="done")
    for made, turns in ((one, ["asked"]), (several, [{"text": "so 4"}])):
        read = reward_sample(made, row)[2]
        assert read == {"completion_ids": [7, 8, 9], "turns": turns, "level": 2}
        assert value("length", "", read, target=4) == 0.75
