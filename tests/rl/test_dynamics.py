"""What happens around an algorithm's loss: several passes, dropped groups, cut completions, greedy baselines, warm-ups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardproof.config.load import from_json
from shardproof.config.schema import Algorithm as Settings
from shardproof.errors import ConfigError
from shardproof.rl.experience_metrics import Success
from shardproof.rl.updates import Schedule
from shardproof.rollout.trajectory import Reward, Trajectory
from tests.ranks import run_ranks
from tests.rl.background_runs import recipe_of, run_and_note
from tests.rl.runs import RECIPES, lines, numbers, run_recipe, small_recipe, trajectory

ONE_STEP = ("train.steps=1", "output.eval_every=0", "output.save_model=false")
PPO = ("algorithm.name=ppo", "optimizer.schedule=constant", "output.eval_every=0")


# Settings.


def test_the_old_name_of_updates_per_epoch_is_read():
    assert Settings(updates_per_batch=3).updates_per_epoch == 3
    assert Settings(updates_per_batch=3, updates_per_epoch=3, epochs_per_batch=2).updates_per_step == 6
    with pytest.raises(ValueError, match="updates_per_batch is the old name of updates_per_epoch: remove it"):
        Settings(updates_per_batch=3, updates_per_epoch=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.kl_target=0.1"], "needs the coefficient that it begins with"),
        (["algorithm.kl_horizon=7"], "algorithm.kl_horizon is for algorithm.kl_target"),
        (["algorithm.entropy_step=0.1"], "algorithm.entropy_step is for algorithm.entropy_target"),
        (["algorithm.reference_sync_every=2"], "there is no reference when algorithm.kl_coef is 0"),
        (["algorithm.reference_mix=0.5"], "algorithm.reference_mix is for algorithm.reference_sync_every"),
        (
            ["algorithm.reference_sync_every=2", "algorithm.kl_coef=0.1", "model.lora.r=4"],
            "the frozen base under the adapters",
        ),
        (
            ["algorithm.reference_sync_every=2", "algorithm.kl_coef=0.1", "reference.strategy=fsdp1"],
            "holds other parts on each rank",
        ),
        (["algorithm.dynamic_sampling_on=exact_match"], "is for algorithm.dynamic_sampling=true"),
        (
            ["algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_on=style"],
            "'style' is not one of the rewards: exact_match",
        ),
        (["algorithm.success_on=['style']"], "'style' is not one of the rewards: exact_match"),
        (["algorithm.overlong=penalty"], "set overlong_from"),
        (["algorithm.overlong=mask", "algorithm.overlong_from=2"], "overlong_from is for overlong='penalty'"),
        (["algorithm.name=sft", "algorithm.entropy_share=0.5"], "algorithm.entropy_share is not for sft"),
        (
            ["algorithm.name=sft", "algorithm.off_policy_limit=0.5"],
            "algorithm.off_policy_limit is not for sft",
        ),
        (["algorithm.critic_warmup_steps=1"], "grpo has no critic"),
        (["algorithm.gamma=0.9"], "with baseline='mean' all tokens of a completion have one return"),
        (["algorithm.name=remax", "algorithm.gae_lambda=0.5"], "algorithm.gae_lambda: remax has no critic"),
        (["algorithm.value_clip=none"], "algorithm.value_clip: grpo has no critic"),
        (["algorithm.name=ppo", "algorithm.critic_warmup_steps=2"], "leaves no step to the policy"),
        (["algorithm.name=remax", "reward.normalise=each"], "with baseline='greedy' does not"),
        (["algorithm.name=gdpo"], "set reward.normalise='each'"),
        (
            [
                "reward.normalise=each",
                "algorithm.turn_gamma=0.9",
                "environment.name=tests.rl.user_rewards:any",
            ],
            "set algorithm.turn_gamma=1.0",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError) as caught:
        small_recipe(tmp_path, *overrides)
    assert message in str(caught.value)


# Several passes over a batch.


def test_the_first_epoch_takes_the_parts_in_order_and_later_ones_in_an_order_of_their_own():
    schedule = Schedule(num_parts=6, num_epochs=3, seed=7)
    orders = {(step, epoch): schedule.order(step, epoch) for step in range(3) for epoch in range(3)}
    assert all(orders[step, 0] == list(range(6)) for step in range(3))
    later = [order for (_, epoch), order in orders.items() if epoch]
    assert all(sorted(order) == list(range(6)) for order in later)
    assert len({tuple(order) for order in later}) == len(later)
    assert orders[1, 2] == Schedule(6, 9, 7).order(1, 2) != Schedule(6, 9, 8).order(1, 2)


def updates_of(recipe: str) -> list[list[Any]]:
    """The prompts of each update of a run, over all ranks, and whether their old log-probs are those of the first."""
    from shardproof.dist.collectives import exchange
    from shardproof.train.trainer import Trainer

    seen: list[list[Any]] = []
    step = Trainer.step

    def spy(self: Any, batch: Any, **options: Any) -> Any:
        rows = exchange([list(sequence) for sequence in batch.sequences])
        seen.append([sorted(sequence for row in rows for sequence in row), "old_logps" in batch.columns])
        return step(self, batch, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", spy)
        run_recipe(recipe)
    return seen


@pytest.mark.distributed
def test_epochs_go_over_the_same_parts_on_any_number_of_ranks(tmp_path):
    settings = (
        *ONE_STEP,
        "algorithm.epochs_per_batch=3",
        "algorithm.updates_per_epoch=3",
        "algorithm.entropy_coef=0.001",  # every sequence stays in its update
    )
    found = [run_ranks(num, updates_of, small_recipe(tmp_path / str(num), *settings))[0] for num in (1, 2)]
    assert found[0] == found[1]
    parts = [update[0] for update in found[0]]
    assert len(parts) == 9 and all(has_old for _, has_old in found[0])
    order = Schedule(3, 3, from_json(small_recipe(tmp_path, *settings)).train.seed)
    assert parts[3:] == [parts[k] for epoch in (1, 2) for k in order.order(0, epoch)]
    assert lines(tmp_path / "2" / "metrics.jsonl")[-1]["metrics"]["updates"] == 9.0


# Groups that are dropped.


@pytest.mark.distributed
def test_a_step_trains_on_fewer_prompts_when_its_rounds_run_out(tmp_path):
    settings = (
        *ONE_STEP,
        "algorithm.name=dapo",
        "algorithm.dynamic_sampling_rounds=1",
        "rollout.group_size=2",
    )
    first, second = run_ranks(2, run_recipe, small_recipe(tmp_path, *settings, "train.prompts_per_step=12"))
    assert first["prompts/missing"] == second["prompts/missing"] > 0
    assert first["prompts/missing"] == pytest.approx(12 * (1 - first["prompts/kept"]))
    assert first["prompts/rounds"] == 1.0


def groups_with_signal() -> list[int]:
    from shardproof.rl.experience import _with_signal

    totals = [[0.1 + 0.2, 0.3], [0.3, 0.4], [0.5, None], [None, None]]
    made = [
        Trajectory((), group, sample, reward=Reward(total or 0.0, failed=total is None))
        for group, row in enumerate(totals)
        for sample, total in enumerate(row)
    ]
    return _with_signal(made, None)


def test_totals_that_differ_by_rounding_alone_tell_nothing_apart():
    assert run_ranks(1, groups_with_signal) == [[1]]


def test_the_named_reward_must_tell_completions_apart(tmp_path):
    """All completions have one length, so a reward on lengths never does; a weight of 0 does not matter."""
    functions = "reward.functions=[{name='exact_match'},{name='regex(.*)',weight=0.0}]"
    settings = [*ONE_STEP, "algorithm.name=dapo", functions, "algorithm.dynamic_sampling_rounds=2"]
    (found,) = run_ranks(
        1, run_recipe, small_recipe(tmp_path / "r", *settings, "algorithm.dynamic_sampling_on=regex(.*)")
    )
    assert found["prompts/missing"] == 6.0 and found["updates"] == 0.0
    (found,) = run_ranks(
        1, run_recipe, small_recipe(tmp_path / "e", *settings, "algorithm.dynamic_sampling_on=exact_match")
    )
    assert found["prompts/missing"] < 6.0 and found["updates"] == 1.0


# Completions that a limit cut off.


def run_with_experience(recipe: str) -> dict[str, Any]:
    """A run of one step, and its experience: of each conversation whether it is finished, its rewards and advantages."""
    from shardproof.rl import loop
    from shardproof.rl.experience import collect

    found: dict[str, Any] = {}

    def spy(buffer: Any, scorers: Any, algorithm: Any, *, step: int) -> Any:
        made = collect(buffer, scorers, algorithm, step=step)
        columns = made.batch.columns
        found["rows"] = [
            [
                t.group,
                t.finished,
                t.reward.trained,
                t.reward.greedy,
                float(mask.sum()),
                float(advantages.abs().max()),
                float((advantages * mask).sum() / mask.sum().clamp(min=1)),
            ]
            for t, mask, advantages in zip(
                made.trajectories, columns["mask"], columns["advantages"], strict=True
            )
        ]
        found["greedy"] = greedy_rewards(buffer, made.trajectories)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", spy)
        return found | {"metrics": run_recipe(recipe)}


def greedy_rewards(buffer: Any, trajectories: Any) -> dict[int, float]:
    """What the greedy completion of each prompt is worth, sampled once more as an evaluation does. Collective."""
    means = buffer.means
    prompts = {prompt.text: prompt for prompt in means.prompts}
    asked = {t.group: prompts[t.facts["prompt"]] for t in trajectories}
    with means.sampler.pending() as pending:
        greedy = replace(means.sampling, temperature=0.0)
        made = means.sampler.roll_out(list(asked.items()), 1, -99, greedy, pending)
        return {t.group: r.total for t, r in zip(made, pending.result(), strict=True) if not r.failed}


@pytest.mark.distributed
def test_cut_completions_count_in_no_loss_and_stay_in_the_baseline(tmp_path):
    common = (*ONE_STEP, "rollout.temperature=4.0", "rollout.max_new_tokens=3", "algorithm.scale=off")
    recipes = [
        small_recipe(tmp_path / mode, *common, f"algorithm.overlong={mode}") for mode in ("mask", "neither")
    ]
    masked, plain = (run_ranks(2, run_with_experience, recipe) for recipe in recipes)
    rows = [row for rank in masked for row in rank["rows"]]
    others = [row for rank in plain for row in rank["rows"]]
    cut = [row for row in rows if not row[1]]
    assert 0 < len(cut) < len(rows)
    assert all(row[4] == 0 and row[5] == 0 for row in cut)
    groups: dict[Any, list[float]] = {}
    for row in rows:
        groups.setdefault(row[0], []).append(row[2])
    for row, other in zip(rows, others, strict=True):
        assert row[:4] == other[:4] and other[4] > 0
        if row[1]:
            assert row[6] == other[6]
            mean = sum(groups[row[0]]) / len(groups[row[0]])  # with those that were cut
            assert row[6] == pytest.approx(row[2] - mean, abs=1e-6)
    tokens = [line for line in lines(tmp_path / "mask" / "events.jsonl") if line.get("proof") == "tokens"]
    assert tokens[0]["passed"]
    assert tokens[0]["details"]["trained"] == sum(row[4] for row in rows) < tokens[0]["details"]["tokens"]


def test_solved_counts_completions_from_the_threshold_on():
    rewards = [Reward(total, {"a": a, "b": 2.0}) for total, a in ((9.0, 0.5), (0.1, 1.0), (0.2, 1.5))]
    assert [Success(("a",)).of(reward) for reward in rewards] == [False, True, True]
    assert [Success(()).of(reward) for reward in rewards] == [True, False, False]
    assert [Success(("c",), 0.5).of(reward) for reward in rewards] == [False] * 3


# Greedy baselines.


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["embedded", "sharded"])
def test_each_completion_is_compared_with_the_greedy_one_of_its_prompt(tmp_path, engine):
    settings = [*ONE_STEP, "algorithm.name=remax", f"rollout.engine={engine}", "rollout.group_size=1"]
    settings.append("train.prompts_per_step=48")
    found = run_ranks(2, run_with_experience, small_recipe(tmp_path, *settings))
    for rank in found:
        assert len(rank["rows"]) == 24  # one of each prompt, and no greedy one
        for row in rank["rows"]:
            assert row[3] == rank["greedy"][row[0]]
    values = [value for rank in found for value in rank["greedy"].values()]
    assert 0 < sum(values) < len(values)
    metrics = found[0]["metrics"]
    assert metrics["reward/greedy"] == pytest.approx(sum(values) / len(values))
    assert metrics["reward/solved"] == metrics["reward/exact_match"]
    assert metrics["ledger/tokens"] == pytest.approx(48 * metrics["completion/length"])


@pytest.mark.distributed
def test_a_prompt_whose_greedy_completion_has_no_reward_is_left_out(tmp_path):
    """On one of the ranks that leaves nothing to train on."""
    refuses = "reward.functions=[{name='tests.rl.user_rewards:refuses_even_answers'}]"
    recipe = small_recipe(tmp_path, *ONE_STEP, "algorithm.name=remax", refuses)
    rows = [row for rank in run_ranks(2, run_with_experience, recipe) for row in rank["rows"]]
    counted = {group: [row[4] > 0 for row in rows if row[0] == group] for group in range(6)}
    assert not all(map(any, counted.values())) and any(map(any, counted.values()))
    assert sum(map(sum, counted.values())) < len(rows)


@pytest.mark.distributed
def test_greedy_completions_run_ahead_and_are_kept_in_a_checkpoint(tmp_path):
    varied = "reward.functions=[{name='tests.rl.user_rewards:varied'}]"
    common = (
        "algorithm.name=remax",
        "rollout.ahead=1",
        "optimizer.schedule=constant",
        "output.eval_every=0",
        varied,
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, run_recipe, small_recipe(whole, *common, "train.steps=3"))
    run_ranks(2, run_until, small_recipe(parts, *common, "train.steps=3", "output.save_every=1"), 2)
    run_ranks(1, run_recipe, small_recipe(parts, *common, "train.steps=3", "output.save_every=1"))
    one, other = (lines(folder / "metrics.jsonl")[-1]["metrics"] for folder in (whole, parts))
    assert 0.0 < one["reward/greedy"] == pytest.approx(other["reward/greedy"])
    assert one["loss/policy"] == pytest.approx(other["loss/policy"], abs=1e-5)


def test_greedy_completions_come_from_engines_that_answer_in_the_background(tmp_path):
    settings = ("algorithm.name=remax", "train.steps=3", "rollout.order=finished")
    (found,) = run_ranks(1, run_and_note, recipe_of(tmp_path, 1, *settings), {"every": 4, "last": 3})
    assert all(len(step) == 24 and {each[2] for each in step} == {0, 1, 2, 3} for step in found["steps"])
    assert all("reward/greedy" in metrics for metrics in found["metrics"])
    assert found["started"] == 3 * 6 * 5


# The critic alone.


@pytest.mark.distributed
def test_the_critic_learns_alone_first_and_a_run_goes_on_from_there(tmp_path):
    settings = (
        *PPO,
        "algorithm.critic_warmup_steps=2",
        "train.steps=3",
        "critic.lora={r=4}",
        "critic.lr=0.01",
    )
    run_ranks(2, run_recipe, small_recipe(tmp_path / "whole", *settings))
    first = trajectory(tmp_path / "whole")
    assert [step["updates"] for step in first] == [0.0, 0.0, 1.0]
    assert [step["version"] for step in first] == [0.0, 0.0, 1.0]
    assert all("loss/value" in step for step in first)
    assert ["loss/total" in step for step in first] == [False, False, True]
    assert first[0]["loss/value"] != first[1]["loss/value"]

    parts = tmp_path / "parts"
    shorter = [*(each for each in settings if not each.startswith("train.steps")), "output.save_every=1"]
    stop = (*shorter, "train.steps=3")
    run_ranks(2, run_until, small_recipe(parts, *stop), 1)
    run_ranks(2, run_recipe, small_recipe(parts, *stop))
    assert numbers(parts) == numbers(tmp_path / "whole")


def run_until(recipe: str, step: int) -> None:
    """A run that is stopped after a step."""
    from shardproof.rl import loop
    from shardproof.rl.stopping import Stopped

    one_step = loop.one_step

    def stopping(run: Any, number: int, folder: Any) -> Any:
        if number == step:
            raise Stopped(15, number)
        return one_step(run, number, folder)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop, "one_step", stopping)
        run_recipe(recipe)


def critic_with_adapters(folder: str, target: str) -> dict[str, Any]:
    """What a critic with adapters trains, and its values before and after it was written as one model."""
    from peft import LoraConfig

    import shardproof

    adapters = LoraConfig(r=4, target_modules="all-linear")
    critic = shardproof.load(folder, role="critic", lora=adapters, compute_dtype=torch.float32)
    before = {shard.name: shard.flat.clone() for shard in critic.local_shards()}
    sequences = [[3, 4, 5, 6], [7, 8, 9]]
    batch = shardproof.Batch(sequences, returns=[[1.0] * (len(row) - 1) for row in sequences])
    optimizer = shardproof.make_optimizer(critic, lr=0.1)
    for _ in range(2):
        assert shardproof.train_step(critic, batch, optimizer, loss="value").stepped
    changed = {shard.name for shard in critic.local_shards() if not shard.flat.equal(before[shard.name])}
    shardproof.save_pretrained(critic, target, torch.float32)
    again = shardproof.load(target, role="critic", compute_dtype=torch.float32)
    found = [[row.tolist() for row in shardproof.values(model, sequences)] for model in (critic, again)]
    return {"changed": sorted(changed), "values": found}


@pytest.mark.distributed
def test_a_critic_with_adapters_trains_them_and_its_head_and_is_written_as_one_model(tmp_path):
    found = run_ranks(2, critic_with_adapters, str(RECIPES / "tiny" / "model"), str(tmp_path))
    assert any(name.startswith("score") for rank in found for name in rank["changed"])
    for rank in found:
        assert all("lora_" in name or name.startswith("score") for name in rank["changed"])
        assert any("lora_" in name for name in rank["changed"])
        for ours, read in zip(*rank["values"], strict=True):
            assert ours == pytest.approx(read, abs=1e-5)
    assert (tmp_path / "config.json").exists()
