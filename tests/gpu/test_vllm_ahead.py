"""Running ahead with vLLM on a CUDA device: replicas that share it, weights that change in the middle of completions."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_engine import VllmEngine
from shardproof.rollout.vllm_server import VllmSettings
from tests.gpu.servers import SMALL
from tests.models import make_checkpoint, tiny_config
from tests.ranks import run_ranks
from tests.rollout.vllm.support import PROMPTS, change, sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SHAPE: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
}
BACKEND = "cpu:gloo,cuda:nccl"
LONG = 1200  # tokens: some seconds
FACTOR = 1.3
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def gaps(policy: Any, trajectories: list[Trajectory], version: int) -> torch.Tensor:
    """Differences between the log-probs of the tokens that a version drew and the trainer's with the weights it has now."""
    found = []
    rows = sp.logprobs(policy, [list(t.tokens) for t in trajectories], 1.0)
    for trajectory, row in zip(trajectories, rows, strict=True):
        (drawn,) = trajectory.sampled
        by_version = torch.tensor(drawn.token_versions) == version
        scored = row.cpu()[-len(drawn.tokens) :]
        found.append((scored - torch.tensor(drawn.logprobs)).abs()[by_version])
    return torch.cat(found)


def interrupt(folder: str, log: str) -> dict[str, Any]:
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    policy = sp.load(folder, device="cuda", compute_dtype=torch.bfloat16)
    settings = VllmSettings(replicas=2, max_model_len=2048, log=log, **SMALL)
    engine = VllmEngine(policy, settings)
    requests = [Request(Trajectory.of_prompt(PROMPTS[k % 3]), seed=k) for k in range(16)]
    try:
        sync(engine)
        started = [engine.start(request, Sampling(LONG, temperature=1.0)) for request in requests]
        time.sleep(2.0)
        open_before = sum(not answering.future.done() for answering in started)
        change(policy, FACTOR)
        sync(engine)
        answers = [answering.future.result(300) for answering in started]
        engine.check_drawn()
        newer = gaps(policy, answers, 1)
        change(policy, 1 / FACTOR)  # back to the first weights
        older = gaps(policy, answers, 0)
        return {
            "open": open_before,
            "lengths": [answer.num_sampled for answer in answers],
            "parts": [[version for _, version in answer.sampled[0].parts] for answer in answers],
            "replicas": sorted({answer.facts["replica"] for answer in answers}),
            "older": [float(older.mean()), len(older)],
            "newer": [float(newer.mean()), len(newer)],
            "crossed": float(gaps(policy, answers, 1).mean()),  # the newer tokens under the older weights
        }
    finally:
        engine.close()


def test_completions_go_on_with_new_weights_on_two_replicas_of_one_gpu(tmp_path):
    folder = str(make_checkpoint(tmp_path / "model", "qwen3_tied", **SHAPE))
    (found,) = run_ranks(1, interrupt, folder, str(tmp_path / "log"), backend=BACKEND, timeout=600)
    print(found)
    assert found["open"] == 16 and set(found["lengths"]) == {LONG}
    assert all(parts == [0, 1] for parts in found["parts"])
    assert found["replicas"] and set(found["replicas"]) <= {"0", "1"}
    assert found["older"][1] > 100 and found["newer"][1] > 100
    # Each part was drawn with the weights that it names; the others' log-probs are far away.
    assert found["older"][0] < 0.1 and found["newer"][0] < 0.1
    assert found["crossed"] > 3 * found["newer"][0]


def run_recipe(recipe: str) -> dict[str, float]:
    from shardproof.rl.loop import train

    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return train(from_json(recipe))


# What is served, and what its recipe changes.
LOOPS: dict[str, tuple[str, list[str]]] = {
    "two replicas": ("qwen3_tied", ["rollout.vllm.replicas=2"]),
    "experts": ("qwen3_moe", ["rollout.replay_experts=true"]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_run_goes_one_step_ahead(tmp_path, name):
    family, settings = LOOPS[name]
    model = tmp_path / "model"
    shutil.copytree(RECIPES / "tiny/model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    experts = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    config = tiny_config(family, **SHAPE | {"vocab_size": 14}, **experts)
    config.eos_token_id, config.pad_token_id = 1, 0
    config.architectures = ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"]
    config.save_pretrained(model)
    settings = [
        *settings,
        f"model.path={model}",
        "model.random_init=true",
        "model.compute_dtype=bfloat16",
        "rollout.ahead=1",
        "rollout.max_new_tokens=64",
        *(f"rollout.vllm.{key}={json.dumps(value)}" for key, value in SMALL.items()),
        "rollout.vllm.max_model_len=256",
        "train.ranks=1",
        "train.steps=6",
        "train.prompts_per_step=8",
        "output.eval_every=0",
        "output.save_every=0",
        "output.save_model=false",
        f"output.folder={tmp_path / 'run'}",
    ]
    recipe = load_recipe(RECIPES / "tiny-vllm.toml", settings)
    run_ranks(1, run_recipe, to_json(recipe), backend=BACKEND, timeout=600)
    rows = [json.loads(line)["metrics"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row]
    print(json.dumps(steps[-1]))
    assert [row["lag/max"] for row in steps] == [0, 1, 1, 1, 1, 1]
    assert all(row["mismatch/mean"] < 0.3 for row in steps)
    assert steps[-1]["version"] == 6
