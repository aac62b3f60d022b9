"""Every family computes what transformers computes with the same checkpoint."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import shardproof as sp
from tests.models import EXTRA_FAMILIES, FAMILIES, make_checkpoint
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

ALL_FAMILIES = FAMILIES + EXTRA_FAMILIES
# Longer than the sliding windows of the tiny configs.
TOKENS = torch.randint(3, 101, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {family: make_checkpoint(root / family, family) for family in ALL_FAMILIES}


@pytest.fixture(scope="module")
def references(checkpoints):
    """{family: (attention, experts, logits)} of plain transformers, in float32."""
    found = {}
    for family, folder in checkpoints.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(input_ids=TOKENS).logits
        found[family] = (*implementations(model), logits)
    return found


def implementations(model):
    return model.config._attn_implementation, model.config._experts_implementation


def score_families(folders, strategy):
    """{family: (attention, experts, logits, what attest finds)}."""
    scored = {}
    for family, folder in folders.items():
        policy = sp.load(folder, strategy=strategy, device="cpu", compute_dtype=torch.float32)
        findings = [str(finding) for finding in sp.attest(policy)]
        with torch.no_grad():
            logits = policy.module(input_ids=TOKENS).logits
        scored[family] = (*implementations(policy.model), logits, findings)
    return scored


def compare(scored, references, same):
    """{family: what is wrong}."""
    wrong = {}
    for family, (attention, experts, logits) in references.items():
        found_attention, found_experts, found_logits, findings = scored[family]
        if findings:
            wrong[family] = findings
        elif (found_attention, found_experts) != (attention, experts):
            wrong[family] = f"{found_attention}, {found_experts} instead of {attention}, {experts}"
        elif not same(found_logits, logits):
            wrong[family] = f"logits differ by {(found_logits - logits).abs().max().item():.3g}"
    return wrong


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_logits_on_one_rank_are_transformers_to_the_bit(checkpoints, references, strategy):
    (scored,) = run_ranks(1, score_families, checkpoints, strategy)
    assert compare(scored, references, torch.equal) == {}


@pytest.mark.parametrize(("strategy", "num_ranks"), [("fsdp1", 3), ("fsdp2", 2)])
def test_logits_on_several_ranks_are_transformers(checkpoints, references, strategy, num_ranks):
    replies = run_ranks(num_ranks, score_families, checkpoints, strategy)
    for scored in replies:
        assert compare(scored, references, close) == {}
        same = {family: torch.equal(scored[family][2], replies[0][family][2]) for family in scored}
        assert all(same.values()), same


def close(found, expected):
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_references_tell_families_apart(references):
    """Logits that are constant or zero would compare equal whatever was loaded."""
    for family, (_, _, logits) in references.items():
        assert torch.isfinite(logits).all(), family
        assert logits.std(dim=-1).min() > 1e-2, family
