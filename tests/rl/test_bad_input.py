"""Bad input, each with a message that names it and the exit code of `shardproof train`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from shardproof.cli import app
from shardproof.config.load import from_json, load_recipe
from shardproof.errors import ConfigError
from shardproof.rl.checks import check_inputs
from shardproof.rl.models import check_vocabularies
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import RECIPES, TINY, lines, run_recipe, small_recipe, write_rows
from tests.shard.test_bad_checkpoints import edit_config

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

REWARDS = "tests.rl.user_rewards"
AGENT = RECIPES / "tiny-agent" / "model"  # whose tokenizer is another than that of the demo


def dry_run(*overrides: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", str(TINY), "output.eval_every=0", *overrides, "--dry-run"])
    return result.exit_code, result.output


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_resolves(recipe):
    assert load_recipe(recipe).train.steps > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stps=3", "unknown key 'train.stps', did you mean 'train.steps'"),
        ("trainn.steps=3", "unknown key 'trainn', did you mean 'train'"),
        ("train.steps=many", "train.steps: Input should be a valid integer"),
        ("train.steps=0", "train.steps: Input should be greater than 0"),
        ("algorithm.name=grpoo", "Did you mean 'grpo'?"),
        ("algorithm.options.scale=2", "options are only for your own algorithm"),
        ("rollout.engine=embeddedd", "Did you mean 'embedded'?"),
        (
            "environment.name=second_try",
            "'second_try' is not one of tools, reasoning_gym, verifiers, openenv, or module:name",
        ),
        ("rollout.group_size=1", "needs at least 2"),
        ("critic.lr=0.1", "grpo has no critic"),
        ("reference.cpu_offload=true", "no KL is computed when algorithm.kl_coef is 0"),
        ("algorithm.updates_per_batch=5", "not divisible"),
        ("algorithm.overlong_from=4", "must be below rollout.max_new_tokens"),
        ("reward=none", "reward is missing: grpo learns from rewards"),
        ("reward.functions=[]", "reward: functions is empty: name a reward function"),
        (
            "reward.functions=['numeric']",
            "reward.functions.0: expected a table, such as { key = value }",
        ),
        ("rollout.stop=</answer>", "rollout.stop: expected a list, such as [1, 2] or ['a', 'b']"),
        ("no_equals_sign", "key=value"),
        ("train.steps.more=1", "'steps' is a value, not a section"),
    ],
)
def test_a_setting_that_cannot_be_is_named(override, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe(TINY, [override])
    assert caught.value.code == "C001" and message in str(caught.value)


def test_an_optimizers_options_do_not_hide_keys_of_the_section():
    with pytest.raises(ConfigError, match=r"options\.lr: set optimizer\.lr instead"):
        load_recipe(TINY, ["optimizer.name=torch.optim:SGD", "optimizer.options={lr=0.5}"])


def test_none_switches_off_what_may_be_off():
    recipe = load_recipe(
        TINY, ["data.answer_column=none", "algorithm.tis_cap=none", "data.prompt_column=none"]
    )
    assert recipe.data.answer_column is None and recipe.algorithm.tis_cap is None
    assert recipe.data.prompt_column == "none", "a column may be called so where there must be one"


def test_a_clean_recipe_passes_and_is_printed():
    code, output = dry_run()
    assert code == 0, output
    assert "algorithm.name" not in output and "  train.ranks = 2\n" in output, (
        "only what is not at its default"
    )
    assert output.endswith("2 ranks; nothing is wrong\n"), "the verdict comes last"
    code, output = dry_run("--show-recipe", "--quiet")
    printed, _, verdict = output.rpartition("}\n")
    assert json.loads(printed + "}")["algorithm"]["name"] == "grpo"
    assert verdict.endswith("nothing is wrong\n")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stps=3"], "did you mean 'train.steps'"),
        (
            ["data.prompt_column=prompts"],
            "has no column 'prompts' (data.prompt_column); it has 'prompt', 'answer'",
        ),
        (["data.answer_column=solution"], "has no column 'solution' (data.answer_column)"),
        (["data.train={empty}"], "empty.jsonl holds no rows"),
        (["data.train={long}"], "does not fit the model's 64 positions"),
        (["data.max_prompt_tokens=3"], "more than data.max_prompt_tokens=3"),
        (["data.chat=true"], "the tokenizer has none"),
        (["reward.functions=[{name='exact_mach'}]"], "Did you mean 'exact_match'?"),
        (["reward.functions=[{name='no_such_module:f'}]"], "No module named 'no_such_module'"),
        (["model.sequence_parallel=3", "train.ranks=3"], "does not divide the 2 attention heads"),
        (["model.replicate=3"], "replicate=3 does not divide the 2 ranks"),
        (["algorithm.router_coef=0.01"], "router_coef=0.01: 'llama' has no router"),
        (
            ["algorithm.kl_coef=0.1", f"reference.path={AGENT}"],
            "R513 reference: 12 tokens have other numbers",
        ),
        (["algorithm.name=ppo", f"critic.path={AGENT}"], "R513 critic: 12 tokens have other numbers"),
        (["algorithm.kl_coef=0.1", "reference.path={bare}"], "bare holds no safetensors file"),
        (["algorithm.name=ppo", "critic.path={bare}"], "bare holds no safetensors file"),
        (["output.folder={other}"], "was started with other settings: "),
    ],
)
def test_a_dry_run_finds_it_and_exits_with_2(tmp_path, overrides, message):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(small_recipe(other, "optimizer.lr=0.5"))
    write_rows(other / "metrics.jsonl", [{"step": 1, "time": 1.0, "metrics": {}}])
    places = {
        "empty": write_rows(tmp_path / "empty.jsonl", []),
        "long": write_rows(tmp_path / "long.jsonl", [{"prompt": "1" * 80, "answer": "1"}]),
        "other": other,
        "bare": tmp_path / "bare",
    }
    (tmp_path / "bare").mkdir()
    shutil.copy(AGENT / "config.json", tmp_path / "bare")
    code, output = dry_run(*(o.format(**places) if "{name" not in o else o for o in overrides))
    assert code == 2, output
    assert message in output


def test_a_checkpoint_without_a_tensor_is_found_by_a_dry_run(tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(RECIPES / "tiny" / "model", model)
    state = load_file(model / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, model / "model.safetensors")
    code, output = dry_run(f"model.path={model}")
    assert code == 2 and "L104" in output and "model.norm.weight" in output
    code, output = dry_run(f"model.path={tmp_path / 'nowhere'}")
    assert code == 2 and "L101" in output


def test_a_reference_that_reads_other_tokens_is_refused_on_every_rank(tmp_path):
    settings = ["algorithm.kl_coef=0.1", f"reference.path={AGENT}"]
    outcomes = run_ranks_outcomes(2, run_recipe, small_recipe(tmp_path, *settings))
    assert [outcome[:2] for outcome in outcomes] == [("error", "RolloutFault")] * 2
    assert all(
        "R513 reference" in outcome[2] and "'+' is 12 for the policy" in outcome[2] for outcome in outcomes
    )


def test_a_reference_may_know_more_tokens_or_have_no_tokenizer(tmp_path):
    shutil.copytree(TINY.parent / "tiny" / "teacher", tmp_path / "model")
    recipe = from_json(
        small_recipe(tmp_path, "algorithm.kl_coef=0.1", f"reference.path={tmp_path / 'model'}")
    )
    ours = AutoTokenizer.from_pretrained(TINY.parent / "tiny" / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs.add_tokens(["<new>"])
    theirs.save_pretrained(tmp_path / "model")
    check_vocabularies(recipe, ours)
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    check_vocabularies(recipe, ours)


def test_a_run_folder_of_another_recipe_is_refused(tmp_path):
    run_ranks(1, run_recipe, small_recipe(tmp_path, "train.steps=1", "output.eval_every=0"))
    again = small_recipe(tmp_path, "train.steps=1", "output.eval_every=0", "optimizer.lr=0.5")
    outcomes = run_ranks_outcomes(2, run_recipe, again)
    assert [outcome[:2] for outcome in outcomes] == [("error", "ConfigError")] * 2
    assert "C006" in outcomes[0][2] and "optimizer.lr" in outcomes[0][2]


@pytest.mark.parametrize("on_error", ["stop", "zero"])
def test_a_reward_that_always_fails_stops_the_run_on_every_rank(tmp_path, on_error):
    named = f"reward.functions=[{{name='{REWARDS}:nan'}}]"
    outcomes = run_ranks_outcomes(2, run_recipe, small_recipe(tmp_path, named, f"reward.on_error={on_error}"))
    assert outcomes[0] == outcomes[1] and outcomes[0][:2] == ("error", "RolloutFault")
    assert "R504" in outcomes[0][2] and "returned nan" in outcomes[0][2]


def test_the_loss_of_a_reward_worker_costs_its_sample_and_no_more(tmp_path):
    named = f"reward.functions=[{{name='{REWARDS}:dies_on_even_answers'}}]"
    settings = ["train.steps=1", "train.prompts_per_step=4", "output.eval_every=0", "reward.num_workers=1"]
    (found,) = run_ranks(1, run_recipe, small_recipe(tmp_path, named, *settings))
    assert found["reward/errors"] > 0.0 and found["updates"] == 1.0
    events = [line["text"] for line in lines(tmp_path / "events.jsonl") if line["kind"] == "reward"]
    assert "its worker process died (exit code 9)" in events[0]


def corrupt_the_engine(recipe: str) -> None:
    """A sync after which the engine does not hold what the trainer sent."""
    import torch

    from shardproof.rollout.local import EmbeddedEngine

    arrived = EmbeddedEngine.load_weights

    def load_weights(self, stream):
        receipt = arrived(self, stream)
        with torch.no_grad():
            self.model.model.norm.weight.mul_(1.5)
        return receipt

    EmbeddedEngine.load_weights = load_weights
    try:
        run_recipe(recipe)
    finally:
        EmbeddedEngine.load_weights = arrived


def test_a_canary_that_disagrees_stops_the_run(tmp_path):
    outcomes = run_ranks_outcomes(2, corrupt_the_engine, small_recipe(tmp_path))
    assert [outcome[:2] for outcome in outcomes] == [("error", "RolloutFault")] * 2
    assert "R503" in outcomes[0][2] and "the tolerance is 0.001" in outcomes[0][2]


def test_tokenizer_with_ids_that_the_model_does_not_have(tmp_path):
    model = Path(shutil.copytree(RECIPES / "tiny" / "model", tmp_path / "model"))
    edit_config(model, vocab_size=5)
    recipe = load_recipe(TINY, [f"model.path={model}", f"output.folder={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match="vocabulary has 5") as caught:
        check_inputs(recipe)
    assert caught.value.code == "C005"
