"""Whole updates of the loop on several ranks, against TRL's loss code or the formula on a plain model in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.rl.parity.cases import algorithm_of, draw, with_failures
from tests.rl.parity.formulas import expected, expected_advantages, expected_chosen, may_be_chosen
from tests.rl.parity.steps import step_on_rank
from tests.rl.parity.trl_cases import CASES
from tests.rl.parity.trl_side import trls
from tests.train.test_corrections import plain_logps, plain_model

pytestmark = pytest.mark.distributed

# The log-probs of a case with an entropy bonus would need the model's own entropy.
NAMES = [name for name, (given, _) in CASES.items() if "entropy_coef" not in given]
VERL = ("grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "ppo", "gspo")
# Held to their formulas: what TRL has not, with rewards that failed. All tokens within Clip-Cov's bounds are left out.
FORMULAS = {f"{name} of verl": {"name": name, "preset": "verl", "failed": True} for name in VERL} | {
    "gdpo": {"name": "gdpo", "failed": True},
    "returns": {"name": "grpo", "baseline": "off", "gamma": 0.9, "failed": True},
    "kl_cov": {"name": "kl_cov", "cov_ratio": 0.1, "failed": True},
    "clip_cov": {"name": "clip_cov", "cov_ratio": 1.0, "cov_bounds": (0.05, 0.5), "failed": True},
}
LAYOUTS = [(2, 24, 1), (3, 10_000, 1), (2, 24, 2)]  # ranks, tokens of a micro-batch, sequence parallelism
BAR = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def completion_logps(model, drawn):
    return [
        plain_logps(model, prompt + tokens)[len(prompt) - 1 :]
        for prompt, tokens in zip(drawn.prompts, drawn.completions, strict=True)
    ]


@pytest.fixture(scope="module")
def drawn(folder):
    """Completions whose log-probs lie around the model's own."""
    made = draw(
        11, longest=4
    )  # a ratio that is a product over tokens multiplies the rounding of their log-probs
    with torch.no_grad():
        logps = completion_logps(plain_model(folder), made)
    moved = {
        name: [new + row - old for new, row, old in zip(logps, getattr(made, name), made.logps, strict=True)]
        for name in ("old", "ref", "rollout")
    }
    return replace(made, logps=logps, **moved)


def by_formula(drawn, given, leaves):
    """The loss of a case in float64."""
    settings = {key: value for key, value in given.items() if key != "failed"}
    s, drawn = algorithm_of(**settings).settings, with_failures(drawn)
    advantages, chosen = expected_advantages(drawn, s), [0.0] * len(leaves)
    find = {"kl_cov": expected_chosen, "clip_cov": may_be_chosen}.get(s.surrogate)
    if find is not None:
        chosen = find(drawn, s, advantages, [row.numpy() for row in drawn.old])
        assert sum(row.sum() for row in chosen) > 1
    return expected(drawn, s, chosen, [row.double() for row in leaves])


@pytest.fixture(scope="module")
def exact(folder, drawn):
    """{case: (loss, gradients)} by TRL, or by the formula."""
    found = {}
    for case in (*NAMES, *FORMULAS):
        model = plain_model(folder)
        leaves = completion_logps(model, drawn)
        if case in FORMULAS:
            loss = by_formula(drawn, FORMULAS[case], leaves)
        else:
            loss = trls(drawn, leaves=leaves, **CASES[case][1])
        loss.backward()
        found[case] = (
            float(loss.detach()),
            {name: param.grad.clone() for name, param in model.named_parameters()},
        )
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_update_is_the_same_on_any_number_of_ranks(folder, drawn, exact, layout):
    settings = {case: CASES[case][0] for case in NAMES} | FORMULAS
    for found in run_ranks(layout[0], step_on_rank, folder, drawn, settings, layout):
        for case, (loss, gradients) in found.items():
            exact_loss, wanted = exact[case]
            assert loss == pytest.approx(exact_loss, abs=BAR), case
            worst = max((float((gradients[k] - wanted[k]).abs().max()) for k in gradients), default=0.0)
            assert worst < BAR, case
