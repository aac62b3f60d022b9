"""Rewards that raise or return what nobody expects, and rows that no reward could ever score."""

import asyncio
import json
import math
import pickle

import numpy
import psutil
import pytest

from shardproof.config.load import from_json
from shardproof.errors import ConfigError
from shardproof.rl.checks import check_basis, model_folder, read_data
from shardproof.rl.rewards.calling import Outcome, attempt
from shardproof.rl.rewards.functions import BUILT_IN
from shardproof.rl.rewards.runner import RewardRunner, RewardSpec
from tests.rl.runs import load_rows, small_recipe, write_rows

pytestmark = pytest.mark.fault

SAMPLE = ("what is one plus two ?", "3", {"answer": "3"})


class OutOfBand(BaseException):
    """As test frameworks and cancelled tasks raise: not an Exception."""


class Wordless(Exception):
    def __str__(self):
        raise OutOfBand


def raising(error):
    def reward(prompt, completion, row):
        raise error

    return reward


@pytest.mark.parametrize(
    "error",
    [
        OutOfBand("no"),
        asyncio.CancelledError(),
        GeneratorExit(),
        Wordless(),
        BaseExceptionGroup("all", [OutOfBand()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_reward_raises_is_its_samples_failure_and_no_more(error):
    value, failure, _ = attempt(raising(error), SAMPLE)
    assert value == 0.0 and failure.startswith(type(error).__name__)


def test_an_interrupt_of_the_user_is_no_rewards_failure():
    with pytest.raises(KeyboardInterrupt):
        attempt(raising(KeyboardInterrupt()), SAMPLE)


@pytest.mark.parametrize("value", [1e308, -1e308, 1e30, 10**300])
def test_a_number_that_no_update_could_use_is_a_failure(value):
    assert attempt(lambda *sample: value, SAMPLE) == Outcome(
        0.0,
        f"returned {float(value):g}, expected a number up to 1e+12",
    )


def test_totals_of_the_largest_rewards_are_finite_and_have_finite_squares():
    largest = numpy.float32(1e12 * 1e6)
    assert attempt(lambda *sample: -1e12, SAMPLE) == Outcome(-1e12)
    assert math.isfinite(largest * largest)
    for weight in (1e7, math.nan, -math.inf):
        with pytest.raises(ConfigError, match="weight"):
            RewardRunner([RewardSpec("numeric", weight)])


def test_a_type_that_is_no_number_is_named_with_its_library():
    assert (
        attempt(lambda *sample: numpy.array([1.0]), SAMPLE)[1] == "returned numpy.ndarray, expected a number"
    )


def test_a_reward_needs_nothing_of_rows_that_it_is_not_about(tmp_path):
    own = RewardSpec("numeric", only={"kind": ("sum",)})
    assert load(tmp_path, [own], answer=None, kind="proof")
    with pytest.raises(ConfigError, match="'answer' is null"):
        load(tmp_path, [own], answer=None, kind="sum")


def test_a_reward_that_is_about_no_row_is_refused_with_what_rows_have(tmp_path):
    settings = ['reward.functions=[{name="numeric", only={prompt=["1+1", "1+2"]}}]', "data.evaluation=none"]
    recipe = from_json(small_recipe(tmp_path, *settings, "output.eval_every=0"))
    with pytest.raises(
        ConfigError, match=r"reward 'numeric': no row fits its 'only': 'prompt' holds '.*=', .*\.\.\."
    ):
        read_data(recipe, check_basis(recipe, model_folder(recipe.model.path)))


def as_for_trl(completions, solution, strict=False, *, scale, **columns):
    """A reward as TRL calls it, that needs a column."""
    return [1.0 for _ in completions]


def test_a_reward_of_trls_form_is_refused_before_the_start_if_no_row_has_a_column_that_it_needs(tmp_path):
    given = f'name="{__name__}:as_for_trl", signature="trl", options={{scale=2.0}}'
    kept, sums = f"reward.functions=[{{{given}}}]", {"prompt": "1+1=", "answer": "2", "completion": "2"}
    lacking = f"data.train={write_rows(tmp_path / 'lacking.jsonl', [sums])}"
    having = f"data.evaluation={write_rows(tmp_path / 'having.jsonl', [{**sums, 'solution': '2'}, sums])}"

    def read(*settings):
        recipe = from_json(small_recipe(tmp_path, kept, *settings))
        return read_data(recipe, check_basis(recipe, model_folder(recipe.model.path)))

    for key, settings in (
        ("train", (lacking, having)),
        ("evaluation", (having.replace("evaluation", "train"),)),
    ):
        with pytest.raises(
            ConfigError, match=rf"needs the column 'solution', and no row of data.{key} has it; .* 'answer'"
        ):
            read(*settings)
    assert read(having.replace("evaluation", "train"), having)
    assert read(
        lacking, having, "algorithm.name=sft"
    )  # whose completions are given, and only held-out ones scored


def load(folder, rewards, **cells):
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "one", "answer": "1", **cells}) + "\n")
    return load_rows(str(path), "prompt", None, rewards=rewards)


@pytest.mark.parametrize(
    ("reward", "cells", "words"),
    [
        ("numeric", {"answer": "many"}, "'many' holds no number"),
        ("numeric", {"answer": "1e999"}, "larger than any number"),
        ("numeric", {"answer": 10**400}, "larger than any number"),
        ("regex", {"pattern": "("}, "the row's 'pattern' is not a valid regular expression: missing \\)"),
        ("regex", {"pattern": "a{99999999999}"}, "the row's 'pattern' is not a valid regular expression"),
    ],
)
def test_a_row_that_a_reward_can_never_score_is_refused(tmp_path, reward, cells, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, [reward], **cells)
    assert "rows.jsonl:1" in str(caught.value)


def test_an_integer_of_any_size_is_an_answer_in_text(tmp_path):
    (row,) = load(tmp_path, ["exact_match"], answer=10**400)
    assert attempt(BUILT_IN["exact_match"], ("", str(10**400), row)) == Outcome(1.0)
    assert attempt(BUILT_IN["numeric"], ("", "7", row))[1].startswith("ValueError: the answer")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\udcff"])
def test_what_can_be_no_path_is_data_that_does_not_exist(tmp_path, name):
    with pytest.raises(ConfigError, match="C005"):
        load_rows(f"{tmp_path}/{name}.jsonl", "prompt", None)


WORKERS = '''
import os, pickle, struct, subprocess, sys, time

def babble(prompt, completion, row):
    """Writes to the connection that answers go through."""
    if completion:
        os.write(int(sys.argv[3]), struct.pack("!i", len(row["said"])) + row["said"])
    return 1.0

def hide(prompt, completion, row):
    """Starts a process in a session of its own, as sandboxes for generated code do, and hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    with open(row["path"], "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)
'''


@pytest.mark.parametrize(
    "said",
    [b"no pickle", pickle.dumps(None), pickle.dumps((0.5, None, "more")), pickle.dumps(("1", None))],
    ids=["garbage", "nothing", "too much", "text"],
)
def test_a_reward_that_talks_over_its_own_connection_costs_its_own_sample(user_module, said):
    user_module("odd_workers", WORKERS)
    samples = [("", completion, {"said": said}) for completion in ("x", "", "")]
    with RewardRunner([RewardSpec("odd_workers:babble")], num_workers=1) as runner:
        first, *others = runner.score(samples)
        assert first.errors == ("odd_workers:babble: its worker returned something that is not a reward",)
        assert [one.total for one in others] == [1.0, 1.0] and runner.score(samples[1:])[0].total == 1.0


def test_what_a_hanging_reward_hid_in_another_session_ends_with_it(user_module, tmp_path):
    user_module("odd_workers", WORKERS)
    path = tmp_path / "pid"
    with RewardRunner([RewardSpec("odd_workers:hide")], num_workers=1, timeout_s=1.0) as runner:
        runner.score([("", "", {"path": str(path)})])
    hidden = int(path.read_text())
    assert not psutil.pid_exists(hidden) or psutil.Process(hidden).status() == psutil.STATUS_ZOMBIE
