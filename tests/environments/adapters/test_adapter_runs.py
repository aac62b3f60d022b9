"""A training step with rows, conversations and rewards of reasoning-gym; see test_page_programs.py for whole programs."""

import pytest

from tests.environments.adapters.played import ROOT
from tests.ranks import run_ranks
from tests.rl.conversations.kept import ONE_STEP
from tests.rl.runs import comparable, run_recipe, small_recipe

pytestmark = pytest.mark.distributed

SETTINGS = (
    f"model.path={ROOT / 'recipes' / 'tiny-agent' / 'model'}",
    "data.train=environment:train",
    "data.evaluation=none",
    "data.chat=true",
    "environment.name=reasoning_gym",
    'environment.options={ task = "basic_arithmetic", size = 4, attempts = 2, config = { max_terms = 2, max_digits = 1 } }',
    "environment.timeout_s=120",
    "environment.num_workers=1",
    "reward=none",
    "train.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=8",
)


@pytest.mark.invariant
def test_reasoning_gym_gives_the_same_numbers_on_one_rank_and_on_two(tmp_path):
    one, two = (
        run_ranks(ranks, run_recipe, small_recipe(tmp_path / str(ranks), *ONE_STEP, *SETTINGS))[0]
        for ranks in (1, 2)
    )
    assert one["environment/failed"] == 0.0 and one["environment/turns"] > 1.0
    named = [name for name in comparable(one) if name.startswith(("environment/", "reward/"))]
    assert {name: one[name] for name in named} == pytest.approx({name: two[name] for name in named})
