"""vLLM's prefix cache: it is used between the turns of conversations, and empty after every weight update."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.rollout.vllm_client import Deadline
from tests.ranks import run_ranks
from tests.rollout.vllm.support import change, connect, failure, load_policy, sync

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

# Blocks of the server have 32 tokens, and only whole ones are cached.
PROMPT = Trajectory.of_prompt(tuple((5 * at * at + 3) % 128 for at in range(70)))
SAMPLING = Sampling(6, temperature=0.7)


def gap(engine: Any) -> float:
    """How far the engine's log-probs, asked twice, are from the trainer's: the second time the prompt is cached."""
    gaps = []
    for seed in (1, 2):
        (said,) = generate(engine, [Request(PROMPT, seed)], SAMPLING)
        (row,) = sp.logprobs(engine.policy, [list(said.tokens)], SAMPLING.temperature)
        gaps.append((row[len(PROMPT.tokens) - 1 :] - torch.tensor(said.sampled[-1].logprobs)).abs().max())
    return float(max(gaps))


def hits(engine: Any) -> float:
    """Tokens that the server took from its cache so far."""
    said = engine.server.client.get("/metrics", Deadline(30.0))
    return sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", said, re.MULTILINE)))


def turns_and_updates(folder: str, url: str) -> dict[str, Any]:
    policy = load_policy(folder)
    engine = connect(policy, url=url)
    sync(engine)
    before = hits(engine)
    (first,) = generate(engine, [Request(PROMPT, 3, continues=True)], SAMPLING)
    second = first.extended(Segment(tuple(range(20)), "environment"))
    generate(engine, [Request(second, 4)], SAMPLING)
    found: dict[str, Any] = {"hits": hits(engine) - before, "gaps": [gap(engine)]}
    for _ in range(2):
        change(policy)
        sync(engine)
        found["gaps"].append(gap(engine))
    engine.close()
    return found


def test_cached_prompts_are_read_once_and_never_with_keys_of_older_weights(models, shared_server):
    (found,) = run_ranks(1, turns_and_updates, models["tied"], shared_server.client.url)
    assert found["hits"] >= 64
    assert max(found["gaps"]) < 1e-4


def not_emptied(folder: str, url: str) -> dict[str, Any]:
    """What the emptying prevents, and a server that says that it could not."""
    policy = load_policy(folder)
    engine = connect(policy, url=url)
    sync(engine)
    found: dict[str, Any] = {"before": gap(engine)}
    client, post = engine.server.client, engine.server.client.post

    def forgetful(path: str, body: Any, deadline: Deadline) -> Any:
        if path.startswith("/reset_prefix_cache"):
            return {"success": True}
        return post(path.replace("/pause?mode=abort", "/pause?mode=abort&clear_cache=false"), body, deadline)

    client.post = forgetful
    change(policy)
    sync(engine)
    found |= {"stale": gap(engine), "canary": engine.canary_gap}
    client.post = lambda path, *given: {"success": False} if "reset_prefix" in path else post(path, *given)
    change(policy)
    found["refused"] = failure(sync, engine)
    client.post = post
    sync(engine)
    found["after"] = gap(engine)
    engine.close()
    return found


def test_a_cache_that_is_not_emptied_would_matter_and_is_named(models, shared_server):
    (found,) = run_ranks(1, not_emptied, models["tied"], shared_server.client.url)
    assert found["before"] < 1e-4 and found["after"] < 1e-4
    # The canary alone does not see it: its log-probs are computed without the cache.
    assert found["stale"] > 0.01 and found["canary"] < 1e-4
    assert "R503 sync: the server at" in found["refused"]
    assert (
        "did not empty its prefix cache" in found["refused"]
        and "--no-enable-prefix-caching" in found["refused"]
    )
