"""Async and batched rewards in their own process: side by side, late, stuck, dying and lying."""

import time

import pytest

from shardproof.errors import ConfigError, RolloutFault
from shardproof.rl.rewards.runner import RewardRunner
from shardproof.rl.rewards.specs import RewardSpec, Surroundings

LONG_S = 60.0  # longer than anything here takes, unless it waits for what never comes

USERS = '''
import asyncio, os, sys, time

MET = {}

async def obey(prompt, completion, row):
    """Does what the completion says."""
    if completion.startswith("meet"):
        # Comes to an end only if so many calls run side by side.
        num = int(completion.split()[1])
        MET[num] = MET.get(num, 0) + 1
        while MET[num] < num:
            await asyncio.sleep(0.001)
        return float(num)
    if completion == "late":
        await asyncio.sleep(1000)
    if completion == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if completion == "stuck":
        time.sleep(1000)
    if completion == "die":
        os._exit(3)
    if completion == "leave":
        sys.exit(0)
    if completion == "raise":
        raise KeyError("no such thing")
    await asyncio.sleep(0)
    values = {"nan": float("nan"), "none": None, "text": "1"}
    return values[completion] if completion in values else float(completion)

async def spoil(prompt, completion, row):
    row["turns"].append(completion)
    await asyncio.sleep(0)
    return len(row["turns"])

class Judge:
    async def __call__(self, prompt, completion, row, bonus=0.0):
        return 0.5 + bonus

judge = Judge()

def plain(prompt, completion, row, scale=1.0):
    return scale * len(completion)

def forgot(prompt, completion, row):
    return obey(prompt, completion, row)

def sizes(prompts, completions, rows):
    assert len(prompts) == len(completions) == len(rows)
    if "stop" in completions:
        raise ValueError("no")
    values = {"none": None, "nan": float("nan")}
    return [values[c] if c in values else float(len(completions)) for c in completions]

async def sizes_later(prompts, completions, rows, factor=1):
    if "hang" in completions:
        time.sleep(1000)
    await asyncio.sleep(0)
    return [factor * len(completions)] * len(completions)

def short(prompts, completions, rows):
    return completions[1:]

def one_number(prompts, completions, rows):
    return 1.0

def array(prompts, completions, rows):
    class Array:
        def tolist(self):
            return [2.0] * len(completions)
    return Array()

def as_trl(completions, answer, log_metric, log_extra, trainer_state, completion_ids, prompts, level, **kwargs):
    assert trainer_state is None and set(kwargs) in ({"source"}, {"source", "question"}), kwargs
    log_metric("asked", len(prompts))
    log_metric("chat", isinstance(prompts[0], list))
    log_extra("prompt", prompts)
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert all(isinstance(p, str) == isinstance(c, str) for p, c in zip(prompts, completions))
    assert not isinstance(completions[0], list) or completions[0][0]["role"] == "assistant"
    return [None if a is None else float(t == a) + len(i) for t, a, i in zip(texts, answer, completion_ids)]

def lazily(prompts, completions, rows):
    def values():
        yield 1.0
        raise KeyError("the second")
    return values()

async def lazily_later(prompts, completions, rows):
    return lazily(prompts, completions, rows)

def unordered(prompts, completions, rows):
    return {float(c) for c in completions}

def measures(completions, log_metric, **kwargs):
    for name, value in {"nan": float("nan"), "inf": -float("inf"), "huge": 10**400, "text": "1", "good": 2}.items():
        log_metric(name, value)
    return [1.0] * len(completions)

async def measures_later(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "nan": float("nan"), "huge": 10**400, "good": 2}

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    assert data_source in ("math", ""), data_source
    if ground_truth is None:
        return None
    right = float(solution_str == ground_truth)
    return {"score": right + bonus, "acc": right, "pred": solution_str} if extra_info else right
'''

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def users(user_module):
    return user_module("async_rewards", USERS)


def spec(name, **settings):
    return RewardSpec(f"async_rewards:{name}", **settings)


def runner_of(*specs, timeout_s=LONG_S, num_workers=1, **settings):
    return RewardRunner(specs, timeout_s=timeout_s, num_workers=num_workers, **settings)


def samples_of(*completions):
    return [("a prompt", completion, {}) for completion in completions]


def test_async_functions_run_side_by_side_beside_plain_ones():
    specs = [
        spec("obey"),
        spec("plain", weight=0.5, options={"scale": 2.0}),
        spec("judge", options={"bonus": 1.0}),
    ]
    with runner_of(*specs, num_workers=2) as runner:
        scored = runner.score(samples_of(*["meet 20"] * 20, "7"))
        assert [one.parts["async_rewards:obey"] for one in scored] == [20.0] * 20 + [7.0]
        assert [one.total for one in scored] == [20.0 + 7.0 + 1.5] * 20 + [7.0 + 1.0 + 1.5]
        assert not any(one.errors for one in scored)
        # One process for all of them, and as many as the recipe says for plain functions.
        assert runner.async_pool.worker is not None and len(runner.pool.workers) == 2


def test_failures_cost_their_own_sample_only():
    wrong = {
        "raise": "KeyError: 'no such thing' (async_rewards.py:30)",
        "leave": "SystemExit: 0 (async_rewards.py:28)",
        "nan": "returned nan, expected a finite number",
        "text": "returned str, expected a number",
        "die": "its worker process died (exit code 3)",
        "late": "no answer in 1 s",
    }
    completions = [*map(str, range(5)), *wrong, "none", *map(str, range(5, 10))]
    with runner_of(spec("obey"), timeout_s=1.0) as runner:
        scored = runner.score(samples_of(*completions))
        assert [one.total for one in runner.score(samples_of("7"))] == [7.0]
    assert [one.failures.get("async_rewards:obey") for one in scored] == [wrong.get(c) for c in completions]
    assert [one.total for one in scored if one.known] == list(range(10))
    assert [one.silent for one in scored] == [c == "none" for c in completions]


@pytest.mark.parametrize("completion", ["stuck", "stubborn"])
def test_a_call_that_keeps_the_loop_or_refuses_to_end_is_killed_and_it_alone_is_to_blame(completion):
    with runner_of(spec("obey"), timeout_s=1.0) as runner:
        began = time.monotonic()
        scored = runner.score(samples_of("1", completion, "2"))
        assert time.monotonic() - began < LONG_S
        assert [one.errors for one in scored] == [(), ("async_rewards:obey: no answer in 1 s",), ()]
        assert [one.total for one in runner.score(samples_of("3"))] == [3.0]


def test_a_function_that_changes_its_row_changes_it_for_nobody_else():
    row = {"turns": []}
    with runner_of(spec("spoil")) as runner:
        assert {one.total for one in runner.score([("", str(n), row) for n in range(20)])} == {1.0}
    assert row == {"turns": []}


def test_stop_names_the_sample_and_leaves_no_stale_answer():
    with runner_of(spec("obey"), on_error="stop") as runner:
        with pytest.raises(RolloutFault, match=r"'async_rewards:obey' failed on sample 2 .*KeyError"):
            runner.score(samples_of("1", "late", "raise", "2"))
        assert [one.total for one in runner.score(samples_of("4"))] == [4.0]


def test_what_is_given_up_ends_although_it_would_go_on_and_others_are_answered():
    with runner_of(spec("obey"), spec("plain")) as runner:
        with runner.start() as kept:
            with runner.start() as dropped:
                dropped.add(samples_of("late"))
                kept.add(samples_of("5"))
            assert [one.total for one in kept.result()] == [6.0]
        future = runner.score_later(("", "6", {}), 3)
        assert future.result(LONG_S).total == 7.0
        late = runner.score_later(("", "late", {}), 4)
        assert late.cancel() or late.done()


def test_a_plain_function_that_returns_a_coroutine_is_told_what_to_do():
    with runner_of(spec("forgot")) as runner:
        (scored,) = runner.score(samples_of("1"))
    assert scored.errors == ("async_rewards:forgot: returned coroutine: declare the function with async def",)


def test_batches_hold_all_completions_or_as_many_as_the_recipe_says():
    specs = [
        spec("sizes", signature="batch"),
        spec("sizes", label="pairs", signature="batch", batch_size=2),
        spec("sizes_later", signature="batch", options={"factor": 10}),
        spec("array", signature="batch"),
        spec("plain"),
    ]
    with runner_of(*specs) as runner:
        scored = runner.score(samples_of("a", "none", "c", "nan", "e"))
        assert runner.score_later(samples_of("x")[0], 0).result(LONG_S).parts["pairs"] == 1.0
    names = ("async_rewards:sizes", "pairs", "async_rewards:sizes_later", "async_rewards:array")
    parts = [[one.parts.get(name) for name in names] for one in scored]
    # Each sample has its own outcome: a value, nothing to say, or a failure.
    assert parts == [[5, 2, 50, 2], [None, None, 50, 2], [5, 2, 50, 2], [0, 0, 50, 2], [5, 1, 50, 2]]
    assert [one.failed for one in scored] == [False, False, False, True, False]
    assert scored[1].no_signal == ("async_rewards:sizes", "pairs")


def test_what_a_batch_cannot_say_of_each_is_a_failure_of_all():
    said = {
        "short": "returned 2 rewards for 3 completions",
        "one_number": "returned float, expected a list of 3 numbers",
    }
    with runner_of(*[spec(name, label=name, signature="batch") for name in (*said, "sizes")]) as runner:
        scored = runner.score(samples_of("a", "b", "stop"))
    assert all(said.items() <= one.failures.items() for one in scored)
    assert {one.failures["sizes"] for one in scored} == {"ValueError: no (async_rewards.py:55)"}
    with runner_of(spec("sizes_later", signature="batch", batch_size=2), timeout_s=1.0) as runner:
        scored = runner.score(samples_of("a", "b", "hang", "c", "d"))
    assert [one.failed for one in scored] == [False, False, True, True, False]


def test_what_a_batch_returns_is_read_as_carefully_as_it_is_called():
    with runner_of(
        *[spec(name, label=name, signature="batch") for name in ("lazily", "lazily_later")]
    ) as runner:
        scored = runner.score(samples_of("a", "b"))
    (line,) = [n for n, text in enumerate(USERS.split("\n"), 1) if "the second" in text]
    said = f"KeyError: 'the second' (async_rewards.py:{line})"
    assert [one.failures for one in scored] == [{"lazily": said, "lazily_later": said}] * 2
    # A set has forgotten which value is whose.
    with runner_of(spec("unordered", label="set", signature="batch")) as runner:
        scored = runner.score(samples_of("3", "1", "2"))
    assert [one.failures for one in scored] == [{"set": "returned set, expected a list of 3 numbers"}] * 3


def test_a_metric_that_is_no_finite_number_is_not_shown():
    with runner_of(
        spec("measures", label="trl", signature="trl"), spec("measures_later", label="verl", signature="verl")
    ) as runner:
        (scored,) = runner.score(samples_of("a"))
    assert not scored.errors and scored.facts == {"trl/good": 2.0, "verl/good": 2.0}


@pytest.mark.parametrize("column", ["prompt", "question"])
@pytest.mark.parametrize("form", ["messages", "text", "chat"])
def test_a_reward_function_of_trl_is_used_unchanged(column, form):
    prompt = [{"role": "user", "content": "1+1="}] if form == "messages" else "1+1="
    rows = [{"answer": "2", "source": "a"}, {"answer": "2"}, {"answer": None}]
    common = {column: prompt, "level": 1, "completion_ids": [1, 2]}
    samples = [("<u>1+1=", said, common | row) for said, row in zip("233", rows, strict=True)]
    around = Surroundings(prompt_column=column, chat=form == "chat")
    with runner_of(spec("as_trl", label="trl", signature="trl"), around=around) as runner:
        scored = runner.score(samples)
    assert not any(one.errors for one in scored), scored[0].errors
    assert [one.parts.get("trl") for one in scored] == [3.0, 2.0, None]
    assert scored[0].facts == {"trl/asked": 3.0, "trl/chat": float(form != "text")}


def test_a_compute_score_of_verl_is_used_unchanged():
    verl = {
        "data_source": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 1},
    }
    rows = [verl, verl | {"answer": "5"}, {"answer": "4"}, {"answer": None}]
    with runner_of(spec("compute_score", label="math", signature="verl", options={"bonus": 2})) as runner:
        scored = runner.score([("2+2=", said, row) for said, row in zip("4544", rows, strict=True)])
    assert [one.parts.get("math") for one in scored] == [3.0, 2.0, 1.0, None]
    assert [one.facts for one in scored] == [{"math/acc": 1.0}, {"math/acc": 0.0}, {}, {}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (spec("plain", options={"size": 1}), "cannot be called as (prompt, completion, row, size)"),
        (spec("two", signature="batch"), "has no 'two'"),
        (
            spec("plain", signature="verl"),
            "cannot be called as (data_source, solution_str, ground_truth, extra_info)",
        ),
        (
            spec("sizes", signature="trl"),
            "cannot be called as (prompts, completions, completion_ids, trainer_state, log_extra, log_metric): "
            "got an unexpected keyword argument 'completion_ids'",
        ),
        (RewardSpec("numeric", signature="batch"), "signature='batch' is for your own functions"),
        (RewardSpec("numeric", batch_size=2), "batch_size is for your own functions"),
        (RewardSpec("numeric", concurrency=2), "concurrency is for async functions"),
        (spec("plain", concurrency=2), "concurrency is for async functions"),
    ],
)
def test_what_cannot_be_called_that_way_is_refused_at_the_start(given, said):
    with pytest.raises(ConfigError) as caught:
        runner_of(given)
    assert said in str(caught.value)


def test_a_module_that_dies_when_it_is_imported_stops_the_start(users):
    (users / "deadly_async.py").write_text("import os\nos._exit(7)")
    with pytest.raises(RolloutFault, match=r"did not start: its worker process died \(exit code 7\)"):
        runner_of(RewardSpec("deadly_async:f", signature="batch"))
