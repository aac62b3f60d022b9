"""The loss of reward models against TRL's RewardTrainer: values and gradients, alone and over ranks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification
from trl import RewardTrainer

import shardproof as sp
from shardproof.rl.data import Prompt
from shardproof.rl.reward_pairs import scored_pairs
from shardproof.rl.sources.given import margin_of
from shardproof.train.reward_loss import bradley_terry
from tests.ranks import run_ranks
from tests.shard.test_reward_role import PAD, make_reward_model, transformers_scores

NUM = 5


def pairs(with_margins: bool) -> list[Prompt]:
    draw = torch.Generator().manual_seed(11)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        size = int(torch.randint(low, high, (1,), generator=draw))
        return tuple(torch.randint(1, 90, (size,), generator=draw).tolist())

    rows = [{"margin": 0.3 * k - 0.4} if with_margins else {} for k in range(NUM)]
    return [Prompt(row, "", tokens(2, 9), tokens(1, 12), tokens(1, 12)) for row in rows]


def trl_loss(model: Any, prompts: list[Prompt], center: float | None) -> torch.Tensor:
    """The loss by TRL's own code, of all pairs in one padded batch."""
    texts = [(*p.tokens, *p.completion) for p in prompts] + [(*p.tokens, *p.rejected) for p in prompts]
    longest = max(map(len, texts))
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([[*text, *[PAD] * (longest - len(text))] for text in texts]),
        "attention_mask": torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts]),
    }
    if any("margin" in p.row for p in prompts):
        inputs["margin"] = torch.tensor([margin_of(p.text, p.row) for p in prompts])
    same = SimpleNamespace(gather=lambda value: value, gather_for_metrics=lambda value: value)
    trainer: Any = SimpleNamespace(
        model=model,
        args=SimpleNamespace(center_rewards_coefficient=center),
        accelerator=same,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    return RewardTrainer.compute_loss(trainer, model, inputs)


def _step(folder: str, with_margins: bool, center: float) -> tuple[float, dict[str, float], dict[str, Any]]:
    """(loss, metrics, gradients) of one update; of three ranks the last has no pairs."""
    model = sp.load(folder, role="reward", compute_dtype=torch.float32)
    rank, takers = dist.get_rank(), min(dist.get_world_size(), 2)
    every = pairs(with_margins)
    batch = scored_pairs(every[rank::takers] if rank < takers else [], PAD)
    before = _weights(model)
    optimizer = torch.optim.SGD(model.trainable_parameters(), lr=1.0)
    batch = sp.weigh(batch, "sequence_mean")
    result = sp.train_step(
        model, batch, optimizer, loss=bradley_terry(center), max_grad_norm=None, micro_batch_tokens=40
    )
    after = _weights(model)
    gradients = {name: (before[name] - after[name]).numpy() for name in before} if rank == 0 else {}
    return result.loss, dict(result.metrics), gradients


def _weights(model: sp.ShardedModel) -> dict[str, torch.Tensor]:
    with sp.WeightStream(model, dtype=torch.float32) as stream:
        return {name: tensor.double().cpu().clone() for name, tensor in stream}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "with_margins", "center"), [(2, True, 0.0), (3, False, 0.05), (3, True, 0.2)]
)
def test_loss_and_gradients_are_trls(tmp_path: Path, ranks: int, with_margins: bool, center: float) -> None:
    folder = make_reward_model(tmp_path / "model", "llama")
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = trl_loss(model, pairs(with_margins), center or None)
    expected.backward()
    loss, metrics, gradients = run_ranks(ranks, _step, str(folder), with_margins, center)[0]
    assert loss == pytest.approx(float(expected.detach()), abs=1e-6)
    for name, param in model.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(
            torch.from_numpy(gradients[name]).float(), param.grad, rtol=1e-6, atol=1e-6, msg=name
        )
    every = pairs(with_margins)
    chosen, rejected = (
        transformers_scores(folder, [[*p.tokens, *(p.completion if better else p.rejected)] for p in every])
        for better in (True, False)
    )
    assert metrics["reward/chosen"] == pytest.approx(float(chosen.mean()), abs=1e-5)
    assert metrics["reward/rejected"] == pytest.approx(float(rejected.mean()), abs=1e-5)
    assert metrics["reward/margin"] == pytest.approx(float((chosen - rejected).mean()), abs=1e-5)
    assert metrics["reward/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    scores = list(itertools.chain(chosen.tolist(), rejected.tolist()))
    assert metrics["reward/max"] == pytest.approx(max(scores), abs=1e-5)
    assert metrics["reward/min"] == pytest.approx(min(scores), abs=1e-5)


def test_margins_are_numbers_or_refused() -> None:
    with pytest.raises(sp.ConfigError, match="margin"):
        margin_of("row 1", {"margin": "much"})
    assert margin_of("row 1", {}) == 0.0 and margin_of("row 1", {"margin": 2}) == 2.0
