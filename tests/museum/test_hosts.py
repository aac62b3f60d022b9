"""Hosts: ranks that are taken for neighbours."""

import pytest
import torch

import shardproof as sp
from shardproof.rollout.vllm_engine import VllmEngine
from shardproof.rollout.vllm_server import VllmSettings
from tests.models import make_checkpoint
from tests.museum.pieces import piece
from tests.ranks import run_ranks_outcomes
from tests.several_hosts import pretend_hosts

pytestmark = [pytest.mark.distributed, pytest.mark.fault]


def share_memory(folder):
    with pretend_hosts("ab", same_name=True):
        sp.SharedWeights(sp.load(folder, compute_dtype=torch.float32)).write()


def serve_by_shared_memory(folder):
    """Nobody listens at the url: only what comes before it is tried."""
    settings = VllmSettings(mode="server", url="http://127.0.0.1:9", start_timeout_s=1.0)
    with pretend_hosts("ab", same_name=True):
        VllmEngine(sp.load(folder, compute_dtype=torch.float32), settings)


@piece("nccl-187")
@pytest.mark.parametrize(
    "use, refusal",
    [
        (share_memory, "C002 export: rank 1: it cannot share memory with rank 0"),
        (serve_by_shared_memory, "rank 1 on host node (number 1) shares no memory with rank 0"),
    ],
)
def test_nccl_187_hosts_of_one_name_are_two_hosts(tmp_path, use, refusal):
    folder = str(make_checkpoint(tmp_path / "llama", "llama"))
    for kind, error, message in run_ranks_outcomes(2, use, folder):
        assert (kind, error) == ("error", "ConfigError") and refusal in message, message
