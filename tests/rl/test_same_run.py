"""Which settings may change between the parts of a run, and how a change is said."""

import json

import pytest

from shardproof.config.load import all_keys, load_recipe, to_json
from shardproof.config.schema import Recipe
from shardproof.errors import ConfigError
from shardproof.rl.same_run import (
    CONTENT,
    FIXED,
    FREE,
    Resume,
    changed_content,
    changed_settings,
    check_resume,
    kind_of,
    refuse_changes,
)
from tests.rl.runs import TINY

KEYS = list(all_keys(Recipe))
LEAVES = [key for key in KEYS if not any(other.startswith(f"{key}.") for other in KEYS)]


def changes(before: list[str], now: list[str], with_sources: bool = False) -> list[str]:
    old = json.loads(to_json(load_recipe(TINY, before)))
    return [str(each) for each in changed_settings(old, load_recipe(TINY, now), with_sources=with_sources)]


@pytest.mark.parametrize("key", LEAVES)
def test_every_setting_has_a_place(key):
    """A new key must be put into FREE, FIXED or CONTENT: can it change what a run comes to?"""
    assert kind_of(key) in ("free", "fixed", "content")


def test_the_table_names_no_key_that_does_not_exist():
    assert sorted((FREE | FIXED | CONTENT) - set(KEYS)) == []
    assert not FREE & FIXED and not FIXED & CONTENT and not FREE & CONTENT


@pytest.mark.parametrize(
    "override",
    [
        "train.micro_batch_tokens=64",
        "rollout.batch_size=3",
        "model.checkpoint_activations=true",
        "model.reshard_after_forward=true",
        "model.strategy=fsdp1",
        "model.replicate=2",
        "model.cpu_offload=true",
        "train.ranks=7",
        "output.save_every=1",
        "output.folder=elsewhere",
        "rollout.vllm.sync_timeout_s=5.0",
        "reward.num_workers=5",
    ],
)
def test_what_cannot_change_results_may_change(override):
    assert changes([], [override]) == []


def test_what_can_change_results_is_said_with_old_and_new_values():
    found = changes(["optimizer.lr=0.5"], ["optimizer.lr=0.25", "algorithm.name=rloo", "model.lora.r=4"])
    assert "optimizer.lr=0.5 (now 0.25)" in found
    assert "algorithm.name=grpo (now rloo)" in found
    assert "model.lora.r=null (now 4)" in found


def test_another_spelling_of_a_path_is_a_change_only_where_nothing_else_is_known():
    moved = ["data.train=elsewhere.jsonl"]
    assert changes([], moved) == []
    assert len(changes([], moved, with_sources=True)) == 1


def test_settings_of_an_older_version_are_read_with_todays_defaults():
    old = json.loads(to_json(load_recipe(TINY, [])))
    del old["rollout"]["top_p"], old["algorithm"]["gamma"], old["critic"]
    assert changed_settings(old, load_recipe(TINY, []), with_sources=True) == []


def test_an_allowed_key_allows_what_is_below_it_and_no_more(tmp_path):
    resume = Resume(allow=("optimizer", "data.train"))
    assert resume.allows("optimizer.lr") and resume.allows("data.train")
    assert (
        not resume.allows("optimizers") and not resume.allows("data.training") and not resume.allows("data")
    )
    now = load_recipe(TINY, ["optimizer.lr=0.25", "train.seed=5"])
    old = json.loads(to_json(load_recipe(TINY, [])))
    with pytest.raises(ConfigError) as caught:
        refuse_changes(tmp_path, changed_settings(old, now, with_sources=False), resume)
    text = str(caught.value)
    assert "C006" in text and "train.seed=" in text and "--allow train.seed" in text
    assert "optimizer.lr" not in text


def test_a_key_that_does_not_exist_cannot_be_allowed():
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        check_resume(Resume(allow=("optimiser.lr",)))
    with pytest.raises(ConfigError, match="--from -1"):
        check_resume(Resume(from_step=-1))


def test_content_is_compared_part_by_part():
    old = {"model.path": {"config.json": "a", "weights": "b"}, "data.train": {"rows": "3", "sha256": "c"}}
    same = {"model.path": {"config.json": "a"}, "data.train": {"rows": "3", "sha256": "c"}}
    assert changed_content(old, same) == [], "this host cannot read the weights"
    other = {"model.path": {"config.json": "a", "weights": "x"}, "data.evaluation": {"rows": "1"}}
    assert [str(change) for change in changed_content(old, other)] == [
        "model.path[weights]=b (now x)",
        "data.train=given (now nothing)",
        "data.evaluation=nothing (now given)",
    ]
