"""A teacher in a real vLLM server: its log-probs of the policy's tokens are those of transformers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardproof.config.roles import Teacher
from shardproof.rl.teacher import ServedTeacher
from shardproof.rollout.vllm_server import VllmServer
from tests.ranks import run_ranks
from tests.rl.judges import plain_logprobs
from tests.rollout.vllm.conftest import tokenizer

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

SEQUENCES = [[5, 17, 64, 9, 88, 31], [3, 4], [120, 1, 1, 7, 90, 2, 45, 66, 13]]


def _scored(url: str) -> list[list[float]]:
    teacher = ServedTeacher(Teacher(url=url))
    teacher.check(tokenizer())
    mine = [] if dist.get_rank() else SEQUENCES
    return [row.tolist() for row in teacher.logprobs(mine, 1.0, 100)]


def test_a_server_scores_the_policys_tokens(shared_server: VllmServer, models: dict[str, str]) -> None:
    found, nothing = run_ranks(2, _scored, shared_server.client.url)
    assert nothing == []
    for row, expected in zip(found, plain_logprobs(models["tied"], SEQUENCES), strict=True):
        torch.testing.assert_close(torch.tensor(row), expected, rtol=0, atol=1e-3)
