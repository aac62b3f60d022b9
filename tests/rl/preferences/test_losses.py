"""Losses of preference data against TRL's own code, and against the formulas written once more."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardproof.config.algorithm import Algorithm as Settings
from shardproof.config.schema import Rollout
from shardproof.rl.algorithms.dpo import DPO
from shardproof.rl.algorithms.kto import KTO
from shardproof.rl.data import Prompt
from shardproof.rl.labelled import labelled_batch, mismatched
from shardproof.rl.pairs import pair_batch
from shardproof.rl.sft import completion_batch
from shardproof.train.batching import Batch
from shardproof.train.loss import Scored
from shardproof.train.metrics import MetricSums, reduce_metrics
from shardproof.train.passes import columns_of
from tests.ranks import run_ranks
from tests.rl.preferences.peers import dpo_loss, kto_loss

CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid_norm": {"beta": 2.0},
    "hinge": {},
    "ipo": {"beta": 0.3},
    "robust": {"label_smoothing": 0.1},
    "exo_pair": {"label_smoothing": 1e-3},
    "nca_pair": {},
    "bco_pair": {},
    "sppo_hard": {"beta": 0.5},
    "aot": {"label_smoothing": 0.1},
    "aot_unpaired": {"label_smoothing": 0.2},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {"discopop_tau": 0.1},
    "sft": {},
}
DIVERGENCES = {"forward_kl": "forward_kl", "js": "js_divergence", "alpha": "alpha_divergence"}


def make_prompts(seed: int, num: int = 5) -> list[Prompt]:
    draw = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (), generator=draw))
        return tuple(torch.randint(1, 14, (length,), generator=draw).tolist())

    rows = [{"label": bool(n % 3)} for n in range(num)]
    return [Prompt(row, "", some(1, 6), some(1, 9), some(1, 9)) for row in rows]


def rows_like(batch: Batch, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [-2.0 * torch.rand(length - 1, generator=draw) for length in batch.lengths]


def ours(algorithm: Any, batch: Batch, policy: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    batch = algorithm.weigh(batch.with_column("old_logps", [row.detach() for row in policy]), 0.0, 1)
    columns, counted = columns_of(batch, torch.device("cpu"))
    empty = torch.empty(0)
    token_loss, metrics = algorithm.loss.function(Scored(torch.cat(policy), empty, empty), columns)
    sums = MetricSums(algorithm.loss.metrics)
    sums.add(metrics, counted)
    found = reduce_metrics(
        [{name: row.tolist() for name, row in sums.rows().items()}], algorithm.loss.metrics
    )
    return torch.where(counted, columns["weights"] * token_loss, 0.0).sum(), found


def with_gradient(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [row.clone().requires_grad_() for row in rows]


def assert_equal(loss: torch.Tensor, rows: list, expected: torch.Tensor, others: list) -> None:
    assert float(loss) == pytest.approx(float(expected), rel=1e-6, abs=1e-6)
    loss.backward()
    expected.backward()
    for row, other in zip(rows, others, strict=True):
        torch.testing.assert_close(row.grad, other.grad, rtol=1e-6, atol=1e-6)


def compare_dpo(preference: dict[str, Any], theirs: dict[str, Any], ld_alpha: float | None = None) -> None:
    algorithm = DPO(Settings(name="dpo", preference=preference), Rollout())
    for seed in range(3):
        batch = pair_batch(make_prompts(seed), ld_alpha)
        reference = rows_like(batch, 100 + seed)
        mine, other = (with_gradient(rows_like(batch, 200 + seed)) for _ in range(2))
        loss, metrics = ours(algorithm, batch.with_column("ref_logps", reference), mine)
        expected, told = dpo_loss(batch, other, reference, **theirs)
        assert_equal(loss, mine, expected, other)
        names = {
            "reward/chosen": "rewards/chosen",
            "reward/rejected": "rewards/rejected",
            "reward/margin": "rewards/margins",
            "reward/accuracy": "rewards/accuracies",
            "logps/chosen": "logps/chosen",
            "logps/rejected": "logps/rejected",
        }
        for name, peer in names.items():
            assert metrics[name] == pytest.approx(told[peer], rel=1e-5, abs=1e-5), name
        assert metrics["loss/policy"] == pytest.approx(float(expected), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_every_loss_of_pairs_and_its_gradient_are_trls(name):
    settings = CASES[name]
    theirs = {"loss_types": [name], "loss_weights": [1.0], **settings}
    run_ranks(1, compare_dpo, {"loss": name, **settings}, theirs)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_so_are_f_divergences_and_mixtures(divergence):
    theirs = {"loss_types": ["sigmoid", "ipo", "sft"], "loss_weights": [0.7, 0.2, 1.5]}
    theirs |= {"f_divergence_type": DIVERGENCES[divergence], "f_alpha_divergence_coef": 0.7}
    losses = {"loss": theirs["loss_types"], "loss_weights": theirs["loss_weights"]}
    alpha = {"divergence_alpha": 0.7} if divergence == "alpha" else {}
    run_ranks(1, compare_dpo, {**losses, "divergence": divergence, **alpha}, theirs)


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "aot", "aot_unpaired"])
def test_tokens_beyond_the_shorter_completion_may_count_less(name):
    theirs = {"loss_types": [name], "loss_weights": [1.0], "ld_alpha": 0.3}
    run_ranks(1, compare_dpo, {"loss": name, "ld_alpha": 0.3}, theirs, 0.3)


def compare_smoothed() -> None:
    prompts = make_prompts(7)
    batch = pair_batch(prompts)
    rows = rows_like(batch, 8)
    preference = {"label_smoothing": 0.2, "reference_free": True, "beta": 0.3}
    algorithm = DPO(Settings(name="dpo", preference=preference), Rollout())
    assert algorithm.columns == frozenset()
    loss, _ = ours(algorithm, batch, rows)
    totals = [float((row * mask).sum()) for row, mask in zip(rows, batch.columns["mask"], strict=True)]
    each = []
    for better, worse in zip(totals[::2], totals[1::2], strict=True):
        win = 1 / (1 + math.exp(-0.3 * (better - worse)))
        each.append(-0.8 * math.log(win) - 0.2 * math.log(1 - win))
    assert float(loss) == pytest.approx(sum(each) / len(each), abs=1e-6)


def test_smoothed_labels_and_no_reference_are_the_formulas():
    """TRL 1.16 has neither: cDPO mixes both labels, and without a reference log-probs are the log-ratios."""
    run_ranks(1, compare_smoothed)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7},
        {"loss": "apo_zero_unpaired", "beta": 0.3},
    ],
)
def test_kto_and_its_gradient_are_trls(settings):
    run_ranks(1, compare_kto, settings)


def compare_kto(settings: dict[str, Any]) -> None:
    algorithm = KTO(Settings(name="kto", preference=settings), Rollout())
    theirs = {("loss_type" if key == "loss" else key): value for key, value in settings.items()}
    for seed, only in ((0, None), (1, None), (2, None), (3, True), (4, False)):
        prompts = make_prompts(seed)
        if only is not None:
            prompts = [replace(prompt, row={"label": only}) for prompt in prompts]
        batch, other = labelled_batch(prompts, "label"), completion_batch(mismatched(prompts, None))
        assert other.sequences[0] == [*prompts[0].tokens, *prompts[-1].completion]
        kl_rows = [rows_like(other, 300 + seed), rows_like(other, 400 + seed)]
        gaps = [
            float(((a - b) * mask).sum()) for a, b, mask in zip(*kl_rows, other.columns["mask"], strict=True)
        ]
        kl = max(sum(gaps) / len(gaps), 0.0)
        reference = rows_like(batch, 100 + seed)
        mine, peers = (with_gradient(rows_like(batch, 200 + seed)) for _ in range(2))
        full = batch.with_column("ref_logps", reference)
        full = full.with_column("kl", [torch.full((n - 1,), kl) for n in batch.lengths])
        loss, metrics = ours(algorithm, full, mine)
        expected, told = kto_loss(batch, peers, reference, (other, *kl_rows), **theirs)
        assert_equal(loss, mine, expected, peers)
        for name in ("chosen", "rejected"):
            for key, peer in ((f"reward/{name}", f"rewards/{name}"), (f"logps/{name}", f"logps/{name}")):
                # Where a batch has completions of one label, TRL says nothing of the other.
                known = told.get(peer, math.nan)
                assert metrics[key] == pytest.approx(known, abs=1e-5, nan_ok=True), key
        if "loss" not in settings:
            assert metrics["kl/mean"] == pytest.approx(told["kl"], abs=1e-6)
