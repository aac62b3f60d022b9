"""FP8 rollouts: what is rounded and by how much, and that the engine samples from exactly that."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import shardproof as sp
from shardproof.rollout.decode import last_logits
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.fp8 import Float8, block_weights, round_states, round_weight, rounding_cache
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.trajectory import Trajectory
from tests.models import FAMILIES, make_checkpoint, tiny_config
from tests.ranks import run_ranks
from tests.rl.runs import lines, run_recipe, small_recipe, trajectory


def uneven(dtype: torch.dtype) -> torch.Tensor:
    """A weight whose sizes are no multiples of a block, with columns of very different sizes and some zeros."""
    torch.manual_seed(3)
    weight = torch.randn(300, 200) * torch.logspace(-6, 1, 200)
    weight[:, 150:] = 0.0
    return weight.to(dtype)


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of each element, in float64."""
    rows = scales.double().repeat_interleave(128, -2)[..., : shape[-2], :]
    return rows.repeat_interleave(128, -1)[..., : shape[-1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_weights_are_exact_in_the_models_dtype_and_within_half_a_unit(dtype):
    weight = uneven(dtype)
    before, copy = weight.clone(), Float8.like(weight)
    round_weight(weight, copy)
    scales = spread(copy.scales, weight.shape)
    assert torch.equal(weight.double(), copy.values.double() * scales)
    assert torch.equal(torch.frexp(copy.scales).mantissa, torch.full_like(copy.scales, 0.5))  # powers of two
    # Half a unit of four significant bits, or of the smallest number, 2 ** -9.
    bound = torch.maximum(before.double().abs() * 2.0**-4, scales * 2.0**-10)
    assert ((weight.double() - before.double()).abs() <= bound).all()
    again, copy_again = weight.clone(), Float8.like(weight)
    round_weight(again, copy_again)
    assert torch.equal(again, weight)


def test_experts_are_rounded_one_by_one():
    torch.manual_seed(4)
    experts = torch.randn(3, 130, 256)
    experts[1] *= 1000.0
    alone = experts.clone()
    copy = Float8.like(experts)
    round_weight(experts, copy)
    for expert in alone:
        round_weight(expert)
    assert torch.equal(experts, alone)
    assert copy.scales.shape == (3, 2, 2)
    assert torch.equal(experts.double(), copy.values.double() * spread(copy.scales, experts.shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_matmuls_of_blocks_are_rounded_and_nothing_else(family):
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    chosen = {id(weight) for weight in block_weights(model)}
    for name, param in model.named_parameters():
        kept = ("embed", "lm_head", "norm", "router.", "bias", "sinks", "mlp.gate.", "e_score")
        assert (id(param) in chosen) != any(part in name for part in kept), name


def test_the_cache_holds_float8_numbers_after_each_forward():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=model.config)
    forward = partial(rounding_cache, partial(last_logits, model))
    ids = torch.arange(10).view(2, 5) + 7
    with torch.no_grad():
        forward(ids, torch.ones(2, 5, dtype=torch.int64), torch.arange(5).expand(2, 5), cache)
        forward(ids[:, :1], torch.ones(2, 6, dtype=torch.int64), torch.full((2, 1), 5), cache)
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            values, scale = round_states(states)
            assert states.shape[2] == 6 and scale.shape == (*states.shape[:3], 1)
            assert torch.equal(values.double() * scale, states.double())


def shards(policy: Any) -> list[torch.Tensor]:
    """Copies of what this rank holds of the policy."""
    return [each.to_local().clone() for each in policy.module.parameters()]


def synced(folder: str, fp8: str) -> dict[str, Any]:
    """What an engine holds after two syncs, with a step of training in between, and after it slept."""
    policy = sp.load(folder)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    plain, engine = EmbeddedEngine(policy), EmbeddedEngine(policy, fp8=fp8)
    same, untouched, said = [], [], []
    for step in range(3):
        if step == 1:
            sp.train_step(policy, sp.Batch([[3, 4, 5, 6]]), optimizer, micro_batch_tokens=64)
        if step == 2:
            engine.sleep()
            engine.wake()
        before = shards(policy)
        for each in (plain, engine):
            receipt = each.load_weights(sp.WeightStream(policy, policy.settings.compute_dtype))
        untouched.append(all(map(torch.equal, shards(policy), before)))
        for weight in block_weights(plain.model):
            round_weight(weight)
        same.append(all(map(torch.equal, plain.model.parameters(), engine.model.parameters())))
        said.append(engine.float8.said)
    requests = [Request(Trajectory.of_prompt((3 + row, 4, 5)), row) for row in range(3)]
    made = [generate(each, requests, Sampling(6)) for each in (plain, engine)]
    return {
        "same": same,
        "untouched": untouched,
        "said": said,
        "receipt": receipt.version == policy.version and not receipt.findings,
        "as plain": made[0] == made[1],
    }


@pytest.mark.distributed
@pytest.mark.parametrize("fp8", ["weights", "weights_and_cache"])
def test_after_every_sync_the_engine_holds_the_rounded_weights_and_the_policy_its_own(tmp_path, fp8):
    folder = make_checkpoint(tmp_path / "model", "qwen3_tied")
    for found in run_ranks(2, synced, str(folder), fp8):
        assert found["same"] == [True] * 3 and found["untouched"] == [True] * 3 and found["receipt"], found
        first, second, third = found["said"]  # before rounding
        assert len(first) == 16 and second != first and third == second, found
        assert found["as plain"] == (fp8 == "weights"), found  # a rounded cache moves log-probs


@pytest.mark.distributed
def test_a_run_logs_the_mismatch_and_corrects_it(tmp_path):
    runs = {}
    for fp8 in ("off", "weights", "weights_and_cache"):
        folder = tmp_path / fp8
        run_ranks(1, run_recipe, small_recipe(folder, f"rollout.fp8={fp8}", "output.eval_every=0"))
        runs[fp8] = trajectory(folder)
        syncs = [event for event in lines(folder / "events.jsonl") if event.get("proof") == "sync"]
        for sync in syncs:
            assert sync["passed"] and sync["details"]["gap"] <= sync["details"]["tolerance"], sync
            assert ("rounding" in sync["details"]) == (fp8 != "off"), sync
    for step in range(2):
        off, weights, cache = (runs[fp8][step] for fp8 in ("off", "weights", "weights_and_cache"))
        assert off["mismatch/kl"] < 1e-6 < weights["mismatch/kl"], (off, weights)
        assert cache["mismatch/kl"] > 1e-6 and "canary/rounding" not in off
        assert "correction/clipped" in weights and weights["correction/ess"] < 1.0
        # The weights are proved as strictly as without rounding, and what rounding does is told.
        assert max(off["canary/gap"], weights["canary/gap"]) < 1e-4 < weights["canary/rounding"]
