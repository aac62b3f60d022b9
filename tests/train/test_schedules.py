"""Schedules give the rates of transformers' schedulers, point by point, and refuse settings that cannot be."""

import pytest
import torch
from transformers import get_scheduler

import shardproof as sp
from shardproof.config.load import load_recipe
from shardproof.config.optimizer import Optimizer
from tests.rl.runs import TINY

TOTAL = 23
# (transformers' name, its settings), (our kind, our settings)
PAIRS = {
    "constant": (("constant_with_warmup", {}), ("constant", {})),
    "linear": (("linear", {}), ("linear", {})),
    "cosine": (("cosine", {}), ("cosine", {})),
    "cosine to a tenth": (("cosine_with_min_lr", {"min_lr_rate": 0.1}), ("cosine", {"final_ratio": 0.1})),
} | {
    f"wsd {theirs} to {lowest}": (
        ("warmup_stable_decay", {"num_decay_steps": 7, "decay_type": theirs, "min_lr_ratio": lowest}),
        ("wsd", {"decay_steps": 7, "decay_shape": ours, "final_ratio": lowest}),
    )
    for theirs, ours in (("linear", "linear"), ("cosine", "cosine"), ("1-sqrt", "sqrt"))
    for lowest in (0.0, 0.2)
}


def rates(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule, found = make(optimizer), []
    for _ in range(TOTAL + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def ours(kind, total_steps=TOTAL, **options):
    return rates(lambda optimizer: sp.make_schedule(optimizer, kind, total_steps=total_steps, **options))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_rates_are_those_of_transformers(name, warmup):
    (theirs, settings), (kind, options) = PAIRS[name]

    def make(optimizer):
        return get_scheduler(theirs, optimizer, warmup, TOTAL, scheduler_specific_kwargs=settings)

    expected = rates(make)
    assert ours(kind, warmup_steps=warmup, warmup_from_zero=True, **options) == pytest.approx(
        expected, abs=1e-12
    )
    own = ours(kind, warmup_steps=warmup, **options)
    assert own[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)
    assert own[:warmup] == pytest.approx([2.0 * (step + 1) / (warmup + 1) for step in range(warmup)])


def test_a_ratio_is_that_many_steps_rounded_up():
    assert ours("linear", warmup_ratio=0.2) == ours("linear", warmup_steps=5)
    assert ours("wsd", decay_ratio=0.2, warmup_ratio=0.1) == ours("wsd", decay_steps=5, warmup_steps=3)
    assert ours("wsd", decay_ratio=1.0, decay_shape="linear") == ours("linear")
    assert ours("wsd", decay_ratio=0.0)[:-1] == [2.0] * TOTAL


def test_ratios_that_make_a_whole_fit_whatever_their_number_of_updates():
    for total in range(1, 40):
        for rise in (0.1, 0.25, 0.5, 0.7):
            schedule = {"warmup_ratio": rise, "decay_ratio": 1.0 - rise, "total_steps": total}
            found = ours("wsd", decay_shape="linear", **schedule)
            assert found[: total + 1] == ours("linear", warmup_ratio=rise, total_steps=total)[: total + 1]


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("linear", {"decay_steps": 3}, "decay_steps=3 is only for kind='wsd'"),
        ("wsd", {}, "one of decay_steps and decay_ratio"),
        ("wsd", {"decay_steps": 3, "decay_ratio": 0.1}, "one of decay_steps and decay_ratio"),
        ("wsd", {"decay_steps": 20, "warmup_steps": 4}, "do not fit into 23"),
        ("wsd", {"decay_steps": 3, "decay_shape": "square"}, "'sqrt'"),
        ("constant", {"warmup_steps": 3, "warmup_ratio": 0.1}, "exclude each other"),
    ],
)
def test_schedules_that_cannot_be(kind, options, word):
    with pytest.raises(sp.ConfigError, match="C001") as caught:
        ours(kind, **options)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "exclude each other"),
        ({"schedule": "wsd"}, "needs one of decay_steps and decay_ratio"),
        ({"decay_ratio": 0.1}, "only for schedule='wsd'"),
        ({"schedule": "cosine", "decay_shape": "sqrt"}, "only for schedule='wsd'"),
        ({"name": "torch.optim:SGD", "eps": 1e-6}, "set it in options"),
        ({"eps": -1e-9}, "eps"),
        ({"final_ratio": 0.1, "warmup_steps": 3}, "final_ratio is for a schedule that falls: set schedule"),
        ({"warmup_from_zero": True}, "warmup_from_zero is for a warm-up: set warmup_steps or warmup_ratio"),
    ],
)
def test_sections_that_cannot_be(keys, word):
    with pytest.raises(ValueError, match=word):
        Optimizer(**keys)


def test_a_warm_up_that_is_switched_off_may_keep_where_it_began():
    settings = Optimizer(warmup_steps=0, warmup_from_zero=True)
    assert Optimizer(**settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["optimizer.decay_steps=5"],
            "a warm-up of 0 and a decay of 5 updates do not fit into 4, of train.steps=4",
        ),
        (
            ["optimizer.decay_ratio=0.6", "optimizer.warmup_ratio=0.6"],
            "a warm-up of 3 and a decay of 3 updates",
        ),
        (["optimizer.decay_steps=4", "algorithm.epochs_per_batch=2", "optimizer.warmup_steps=4"], None),
        (
            ["optimizer.decay_steps=4", "algorithm.name=ppo", "algorithm.critic_warmup_steps=1"],
            "do not fit into 3",
        ),
    ],
)
def test_a_recipe_whose_rates_have_no_room_to_fall_is_refused_before_anything_is_loaded(overrides, words):
    def read():
        return load_recipe(TINY, ["train.steps=4", "optimizer.schedule=wsd", *overrides])

    if words is None:
        assert read().policy_updates == 8
        return
    with pytest.raises(sp.ConfigError, match="C001") as caught:
        read()
    assert words in str(caught.value)


def test_a_schedule_may_be_made_constant_from_outside():
    """As `optimizer.schedule=constant` on the command line does with a recipe whose schedule falls."""
    assert Optimizer(schedule="constant", final_ratio=0.1).schedule == "constant"


def test_a_section_says_what_the_schedule_and_the_optimizer_are_given():
    section = Optimizer(schedule="wsd", decay_ratio=0.2, warmup_ratio=0.1, decay_shape="sqrt", eps=1e-6)
    assert ours(section.schedule_arguments.pop("kind"), **_without_kind(section)) == ours(
        "wsd", decay_ratio=0.2, warmup_ratio=0.1, decay_shape="sqrt"
    )
    assert section.arguments["eps"] == 1e-6
    assert "eps" not in Optimizer(name="torch.optim:SGD").arguments


def _without_kind(section):
    return {key: value for key, value in section.schedule_arguments.items() if key != "kind"}
