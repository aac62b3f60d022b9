"""Exact mode in whole runs: engine and trainer give every sampled token the same log-prob, or all ranks stop."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.config.load import from_json, load_recipe
from shardproof.rl.checks import check_exact
from shardproof.rollout.local import EmbeddedEngine
from tests.models import make_checkpoint, tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import RECIPES, TINY, lines, run_recipe, small_recipe

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
REWARD = 'reward.functions=[{name="tests.rl.user_rewards:varied"}]'


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A mixture of experts with the tiny recipe's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "qwen3_moe"
    make_checkpoint(folder, "qwen3_moe", vocab_size=14, eos_token_id=1)
    for name in TOKENIZER:
        shutil.copy(RECIPES / "tiny" / "model" / name, folder)
    return folder


def recipe(folder, *overrides):
    return small_recipe(folder, "output.eval_every=0", "output.save_model=false", *overrides)


def mismatches(folder):
    found = [line["metrics"] for line in lines(folder / "metrics.jsonl")]
    return [(metrics["mismatch/max"], metrics["canary/gap"]) for metrics in found]


@pytest.mark.distributed
def test_every_log_prob_is_equal(tmp_path, experts):
    moe = (f"model.path={experts}", REWARD, "model.compute_dtype=bfloat16")
    cases = {
        "dense": (1, ["rollout.temperature=0.7"]),
        "experts": (2, [*moe, "train.micro_batch_tokens=40", "rollout.batch_size=5"]),
        "fsdp1": (2, ["model.strategy=fsdp1", *moe, "model.checkpoint_activations=true"]),
        "updates": (1, [*moe, "algorithm.updates_per_batch=2"]),
    }
    for name, (num_ranks, overrides) in cases.items():
        run_ranks(num_ranks, run_recipe, recipe(tmp_path / name, "rollout.exact=true", *overrides))
        assert mismatches(tmp_path / name) == [(0.0, 0.0)] * 2, name
    run_ranks(1, run_recipe, recipe(tmp_path / "fast", *moe))
    assert all(largest > 0.0 for largest, _ in mismatches(tmp_path / "fast"))


def run_with_a_flipped_bit(text: str) -> dict[str, float]:
    """A run in which one bit of the engine's weights on the last rank changes after the second sync."""
    from shardproof.rl.loop import train

    complete = EmbeddedEngine.complete

    def flipping(self: EmbeddedEngine, requests: Any, sampling: Any) -> Any:
        if self.version == 1 and len(requests) > 1 and dist.get_rank() == dist.get_world_size() - 1:
            weight = self.model.get_parameter("model.norm.weight").data.view(torch.int32)
            weight[3] ^= 1 << 18
        return complete(self, requests, sampling)

    EmbeddedEngine.complete = flipping  # type: ignore[method-assign]
    try:
        return train(from_json(text))
    finally:
        EmbeddedEngine.complete = complete  # type: ignore[method-assign]


@pytest.mark.distributed
@pytest.mark.fault
def test_one_wrong_bit_stops_all_ranks(tmp_path):
    outcomes = run_ranks_outcomes(2, run_with_a_flipped_bit, recipe(tmp_path / "run", "rollout.exact=true"))
    for outcome in outcomes:
        assert outcome[:2] == ("error", "RolloutFault")
        assert "R512 update: step 2: log-probs of engine and trainer differ by up to" in outcome[2]
    assert len(mismatches(tmp_path / "run")) == 1


@pytest.mark.fault
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.engine=sharded", "rollout.engine='sharded'"),
        ("rollout.top_p=0.9", "rollout.top_p=0.9"),
        ("rollout.ahead=1", "rollout.ahead=1"),
        ("rollout.fp8=weights", "rollout.fp8='weights' with rollout.exact=true"),
        ("model.sequence_parallel=2", "model.sequence_parallel=2"),
        ("model.lora={r=4}", "model.lora: the engine merges"),
        ("model.compile=true", "model.compile=true"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(override, said):
    with pytest.raises(sp.ConfigError, match="C001") as caught:
        load_recipe(TINY, ["rollout.exact=true", override])
    assert said in str(caught.value)


@pytest.mark.fault
def test_a_family_that_cannot_be_packed_is_refused():
    given = load_recipe(TINY, ["rollout.exact=true"])
    with pytest.raises(sp.ConfigError, match=r"exact=true does not work with 'phi3': its rotary embedding"):
        check_exact(given, tiny_config("phi3"))
    check_exact(given, tiny_config("qwen3"))
