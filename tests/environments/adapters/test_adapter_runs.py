"""One training step through each adapter: rows from the environment, conversations, rewards, an update."""

import pytest

from shardproof.user_code import find_modules_in
from tests.environments.adapters.played import PACKAGES, PYTHON, ROOT, game_server
from tests.ranks import run_ranks
from tests.rl.conversations.kept import ONE_STEP
from tests.rl.runs import comparable, run_recipe, small_recipe

pytestmark = pytest.mark.distributed

MODEL = ROOT / "recipes" / "tiny-agent" / "model"


def adapted(folder, name, options, *settings):
    """A recipe of one step with an environment of others."""
    given = [f"model.path={MODEL}", "data.train=environment:train", "data.evaluation=none", "data.chat=true"]
    environment = [f"environment.name={name}", f"environment.options={options}", "environment.timeout_s=120"]
    if name in PYTHON:
        environment.append(f"environment.python={PYTHON[name]}")
    small = ["reward=none", "train.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=8"]
    return small_recipe(
        folder, *ONE_STEP, *given, *environment, "environment.num_workers=1", *small, *settings
    )


@pytest.mark.invariant
def test_reasoning_gym_trains_and_gives_the_same_numbers_on_one_rank_and_on_two(tmp_path):
    options = (
        '{ task = "basic_arithmetic", size = 4, attempts = 2, config = { max_terms = 2, max_digits = 1 } }'
    )
    one, two = (
        run_ranks(ranks, run_recipe, adapted(tmp_path / str(ranks), "reasoning_gym", options))[0]
        for ranks in (1, 2)
    )
    assert one["environment/failed"] == 0.0 and one["environment/turns"] > 1.0
    named = [name for name in comparable(one) if name.startswith(("environment/", "reward/"))]
    assert {name: one[name] for name in named} == pytest.approx({name: two[name] for name in named})


def run_beside_packages(recipe):
    """A run whose recipe lies beside the environments; module-level, for `run_ranks`."""
    find_modules_in(PACKAGES)
    return run_recipe(recipe)


def test_a_taskset_of_verifiers_trains(tmp_path):
    options = '{ id = "guess-taskset", size = 4 }'
    (found,) = run_ranks(
        1, run_beside_packages, adapted(tmp_path, "verifiers", options, "environment.max_turns=2")
    )
    assert found["environment/failed"] == 0.0 and found["environment/guesses"] == found["environment/turns"]


def test_an_environment_of_openenv_trains(tmp_path):
    with game_server(tmp_path) as url:
        options = f'{{ url = "{url}", observation_key = "text", size = 4 }}'
        (found,) = run_ranks(1, run_recipe, adapted(tmp_path / "run", "openenv", options))
    assert found["environment/failed"] == 0.0 and found["environment/reward"] < 1.0
