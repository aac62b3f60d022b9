"""A batch has the tokens and log-probs of the server's raw replies, turn by turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.rl.batches import make_batch
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.rollout.vllm_client import GENERATE
from shardproof.rollout.vllm_http import AsyncClient
from tests.ranks import run_ranks
from tests.rollout.vllm.support import PROMPTS, connect, load_policy, sync

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

TURNS = 3
REPLY = (11, 12, 13)


def tap(patch: pytest.MonkeyPatch, seen: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Write down what goes over the wire: (request, reply) of each completion."""
    post = AsyncClient.post

    async def noted(self: AsyncClient, path: str, body: Any) -> Any:
        reply = await post(self, path, body)
        if path == GENERATE:
            seen.append((body, reply))
        return reply

    patch.setattr(AsyncClient, "post", noted)


def converse(folder: str, url: str) -> dict[str, Any]:
    engine = connect(load_policy(folder), url=url)
    sync(engine)
    ledger, seen = sp.TokenLedger(), list[Any]()
    said = [Trajectory.of_prompt(PROMPTS[k % 3], k, 0) for k in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        tap(patch, seen)
        for number in range(TURNS):
            requests = [Request(trajectory, 10 * number + k) for k, trajectory in enumerate(said)]
            said = generate(engine, requests, Sampling(6, temperature=0.7, stop_ids=(7, 9)), ledger)
            if number < TURNS - 1:
                said = [trajectory.extended(Segment(REPLY, "environment")) for trajectory in said]
    engine.close()
    batch = make_batch(said)
    # The conversations as the server has them: what it was sent, and what it sent back.
    by_seed = {sent["sampling_params"]["seed"]: (sent, reply["choices"][0]) for sent, reply in seen}
    wrong = []
    for k, row in enumerate(batch.sequences):
        tokens, logps = list(PROMPTS[k % 3]), [0.0] * len(PROMPTS[k % 3])
        for number in range(TURNS):
            sent, choice = by_seed[10 * number + k]
            if sent["token_ids"] != tokens:
                wrong.append(f"conversation {k}, turn {number + 1}: the server read other tokens")
            tokens += choice["token_ids"]
            logps += [entry["logprob"] for entry in choice["logprobs"]["content"]]
            if number < TURNS - 1:
                tokens, logps = [*tokens, *REPLY], [*logps, *([0.0] * len(REPLY))]
        if row != tokens:
            wrong.append(f"conversation {k}: the batch has other tokens")
        if not torch.equal(batch.columns["rollout_logps"][k], torch.tensor(logps[1:])):
            wrong.append(f"conversation {k}: the batch has other log-probs")
    return {
        "wrong": wrong,
        "replies": len(seen),
        "findings": [finding.message for finding in sp.attest_batch(batch, said, ledger)],
        "lengths": {len(turn.tokens) for trajectory in said for turn in trajectory.sampled},
    }


def test_a_batch_has_the_tokens_of_the_servers_replies(models, shared_server):
    (found,) = run_ranks(1, converse, models["tied"], shared_server.client.url)
    assert found["wrong"] == [] and found["findings"] == []
    assert found["replies"] == 4 * TURNS and len(found["lengths"]) > 1
