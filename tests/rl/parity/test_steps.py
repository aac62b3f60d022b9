"""Whole updates of the loop on several ranks, against TRL's loss code or the formula on a plain model in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardproof.config.algorithms import SPECS
from shardproof.rl.algorithms.presets import PolicyGradient
from shardproof.rl.algorithms.registry import ALGORITHMS
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.rl.parity.cases import algorithm_of, draw, with_failures
from tests.rl.parity.formulas import (
    expected,
    expected_advantages,
    expected_chosen,
    expected_value_loss,
    may_be_chosen,
)
from tests.rl.parity.steps import critic_step_on_rank, step_on_rank
from tests.rl.parity.trl_cases import CASES
from tests.rl.parity.trl_side import trls
from tests.train.test_corrections import plain_model

pytestmark = pytest.mark.distributed

OF_SWITCHES = [name for name, kind in ALGORITHMS.items() if kind.advantages is PolicyGradient.advantages]
# All tokens within Clip-Cov's bounds are left out, and DPPO's bounds bind.
BINDING = {
    "kl_cov": {"cov_ratio": 0.1},
    "clip_cov": {"cov_ratio": 1.0, "cov_bounds": (0.05, 0.5)},
    "dppo": {"clip_low": 0.002, "clip_high": 0.003},
}
# Held to their formulas, with rewards that failed: what TRL has not, and names without a preset.
FORMULAS = {
    **{f"{name} by itself": {"name": name} for name in OF_SWITCHES},
    **{
        f"{name} of verl": {"name": name, "preset": "verl"}
        for name in OF_SWITCHES
        if SPECS[name].verl is not None
    },
    "returns": {"name": "grpo", "baseline": "off", "gamma": 0.9},
    "DPPO by KL": {
        "name": "dppo",
        "surrogate": "dppo_kl",
        "dual_clip": 1.3,
        "clip_low": 2e-4,
        "clip_high": 3e-4,
    },
}
FORMULAS = {
    case: {**BINDING.get(given["name"], {}), **given, "failed": True} for case, given in FORMULAS.items()
}
LAYOUTS = [(2, 24, 1), (3, 10_000, 1), (2, 24, 2)]  # ranks, tokens of a micro-batch, sequence parallelism
BAR = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def completion_scores(model, drawn):
    """(log-probs, entropies) of each completion's tokens."""
    logps, entropies = [], []
    for prompt, tokens in zip(drawn.prompts, drawn.completions, strict=True):
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        every = torch.log_softmax(logits, -1)
        logps.append(every.gather(1, torch.tensor(tokens)[:, None]).squeeze(1))
        entropies.append(-(every.exp() * every).sum(-1))
    return logps, entropies


@pytest.fixture(scope="module")
def drawn(folder):
    """Completions whose log-probs lie around the model's own."""
    made = draw(
        11, longest=4
    )  # a ratio that is a product over tokens multiplies the rounding of their log-probs
    with torch.no_grad():
        logps, _ = completion_scores(plain_model(folder), made)
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
    model, found = plain_model(folder), {}
    leaves, entropies = completion_scores(model, drawn)
    for case in (*CASES, *FORMULAS):
        if case in FORMULAS:
            loss = by_formula(drawn, FORMULAS[case], leaves)
        else:
            settings, options = CASES[case]
            told = replace(drawn, entropy=entropies) if settings.get("entropy_coef") else drawn
            loss = trls(told, leaves=leaves, **options)
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        names = (name for name, _ in model.named_parameters())
        found[case] = float(loss.detach()), dict(zip(names, gradients, strict=True))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_update_is_the_same_on_any_number_of_ranks(folder, drawn, exact, layout):
    settings = {case: CASES[case][0] for case in CASES} | FORMULAS
    for found in run_ranks(layout[0], step_on_rank, folder, drawn, settings, layout):
        for case, (loss, gradients) in found.items():
            exact_loss, wanted = exact[case]
            assert loss == pytest.approx(exact_loss, abs=BAR), case
            worst = max((float((gradients[k] - wanted[k]).abs().max()) for k in gradients), default=0.0)
            assert worst < BAR, case


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("given", [{}, {"preset": "verl", "gamma": 0.9}], ids=str)
def test_a_critics_update_is_the_same_on_any_number_of_ranks(folder, drawn, given, layout):
    settings = {"name": "ppo", **given}
    (loss, before, gradients), *others = run_ranks(
        layout[0], critic_step_on_rank, folder, drawn, settings, layout
    )
    assert all(other[0] == loss for other in others)
    plain, head = plain_model(folder).model, before["score.weight"].requires_grad_()
    values = [
        (plain(torch.tensor([prompt + tokens]), use_cache=False)[0][0] @ head.T).squeeze(-1)[
            len(prompt) - 1 : -1
        ]
        for prompt, tokens in zip(drawn.prompts, drawn.completions, strict=True)
    ]
    exact = expected_value_loss(
        with_failures(drawn), algorithm_of(**settings).settings, [v.double() for v in values]
    )
    exact.backward()
    wanted = {f"model.{name}": param.grad for name, param in plain.named_parameters()} | {
        "score.weight": head.grad
    }
    assert loss == pytest.approx(float(exact.detach()), abs=BAR)
    assert gradients.keys() == wanted.keys()
    for name, mine in gradients.items():
        torch.testing.assert_close(mine, wanted[name], rtol=0, atol=BAR)
