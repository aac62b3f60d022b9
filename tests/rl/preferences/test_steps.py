"""Steps on pairs and labels in any layout equal one step of plain transformers with TRL's own losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.config.algorithm import Algorithm as Settings
from shardproof.config.schema import Rollout
from shardproof.rl.algorithms.registry import make_algorithm
from shardproof.rl.data import Prompt, Share
from shardproof.rl.labelled import LabelledData, labelled_batch, mismatched
from shardproof.rl.pairs import PairData, pair_batch
from shardproof.rl.scorers import Scorers
from shardproof.rl.sft import completion_batch
from shardproof.train.forward import Scoring
from shardproof.train.state import training_state
from shardproof.train.trainer import Trainer
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.rl.preferences.peers import dpo_loss, kto_loss
from tests.shard.test_serve import full_state

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

BAR = 1e-6  # of numbers above 1 their share: the mixture has a loss of 4, and gradients of 1
MIXED = {"loss": ["sigmoid", "aot_unpaired", "aot", "sft"], "loss_weights": [1.0, 0.5, 0.7, 0.3], "beta": 0.5}
CASES = {
    "dpo": {"loss": ["sigmoid"], "beta": 0.5},
    "mixed": MIXED,
    "kto": {"loss": ["kto"], "beta": 0.5, "desirable_weight": 1.5},
}
LAYOUTS = [
    # ranks, tokens of a micro-batch, sequence parallelism, strategy
    (1, 4096, 1, "fsdp2"),
    (2, 24, 1, "fsdp2"),
    (3, 4096, 1, "fsdp2"),  # of two pairs: a rank has none
    (2, 24, 2, "fsdp2"),
    (2, 24, 1, "fsdp1"),
    (2, 4096, 1, "fsdp2", "one by one"),  # as models whose sequences cannot be packed
]


def prompts_of(num: int) -> list[Prompt]:
    draw = torch.Generator().manual_seed(5)

    def some(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, 90, (length,), generator=draw).tolist())

    lengths = [(3, 5, 2), (2, 1, 7), (4, 6, 6), (1, 3, 9), (5, 2, 4)][:num]
    return [Prompt({"label": n % 2 == 0}, "", *map(some, each)) for n, each in enumerate(lengths)]


def algorithm_of(name: str) -> Any:
    kind = "kto" if name == "kto" else "dpo"
    return make_algorithm(Settings(name=kind, preference=CASES[name]), Rollout())


def stepped(folders: list[str], name: str, num: int, layout: tuple) -> Any:
    """(loss, norm, metrics, gradients, what the same rows say as held-out ones before the step).

    With SGD at a rate of 1 the weights move by just the gradient.
    """
    _, tokens, sequence_parallel, strategy, *one_by_one = layout
    load = {"strategy": strategy, "compute_dtype": torch.float32, "sequence_parallel": sequence_parallel}
    policy = sp.load(folders[0], progress=False, **load)
    reference = sp.load(folders[1], role="reference", progress=False, **load)
    if one_by_one:
        training_state(policy).scoring = Scoring(None, True, "the test asks for the model's own attention")
    share = Share(dist.get_rank(), dist.get_world_size(), sequence_parallel)
    algorithm, scorers = algorithm_of(name), Scorers(policy, reference, None, 1.0, tokens)
    rows = prompts_of(num)
    data = (
        LabelledData(algorithm, scorers, share, "label", None)
        if name == "kto"
        else PairData(algorithm, scorers, share)
    )
    held_out = data.held_out(rows)
    batch = algorithm.weigh(data.take(rows).batch, float(num), sequence_parallel)
    before = full_state(policy)
    trainer = Trainer(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
    result = trainer.step(batch, loss=algorithm.loss, micro_batch_tokens=tokens, max_grad_norm=None)
    gradients = {key: before[key] - after for key, after in full_state(policy).items()}
    return result.loss, result.grad_norm, dict(result.metrics), gradients, held_out


def plain(folders: list[str], name: str, num: int) -> Any:
    """(loss, norm, metrics, gradients) of plain transformers and TRL's loss, in one process."""
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager") for folder in folders
    )

    def logps(model: Any, batch: sp.Batch) -> list[torch.Tensor]:
        rows = []
        for sequence in batch.sequences:
            scores = torch.log_softmax(model(torch.tensor([sequence]), use_cache=False).logits[0, :-1], -1)
            rows.append(scores.gather(1, torch.tensor(sequence[1:])[:, None]).squeeze(1))
        return rows

    settings, rows = CASES[name], prompts_of(num)
    if name == "kto":
        batch, other = labelled_batch(rows, "label"), completion_batch(mismatched(rows, None))
        with torch.no_grad():
            known, others = logps(reference, batch), (other, logps(policy, other), logps(reference, other))
        theirs = {key: value for key, value in settings.items() if key != "loss"}
        loss, metrics = kto_loss(batch, logps(policy, batch), known, others, **theirs)
    else:
        batch = pair_batch(rows)
        with torch.no_grad():
            known = logps(reference, batch)
        weights = settings.get("loss_weights", [1.0])
        theirs = {"loss_types": settings["loss"], "loss_weights": weights, "beta": settings["beta"]}
        loss, metrics = dpo_loss(batch, logps(policy, batch), known, **theirs)
    loss.backward()
    gradients = {key: param.grad for key, param in policy.named_parameters()}
    return loss.item(), float(get_total_norm(gradients.values())), metrics, gradients


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = [tmp_path_factory.mktemp(name) for name in ("policy", "reference")]
    return [str(make_checkpoint(folder, "qwen3", seed=seed)) for seed, folder in enumerate(made)]


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_trls_on_any_number_of_ranks_and_micro_batches(folders, name):
    expected = {num: run_ranks(1, plain, folders, name, num)[0] for num in (2, 5)}
    for layout in LAYOUTS:
        num = 2 if layout[0] == 3 else 5
        loss, norm, metrics, gradients = expected[num]
        for found in run_ranks(layout[0], stepped, folders, name, num, layout):
            assert found[0] == pytest.approx(loss, rel=BAR, abs=BAR), layout
            assert found[1] == pytest.approx(norm, rel=1e-5), layout
            for key in ("chosen", "rejected"):
                assert found[2][f"reward/{key}"] == pytest.approx(metrics[f"rewards/{key}"], abs=1e-5)
                assert found[2][f"logps/{key}"] == pytest.approx(metrics[f"logps/{key}"], abs=1e-4)
            for key, value in gradients.items():
                torch.testing.assert_close(found[3][key], value, rtol=BAR, atol=BAR)
            # What is measured without gradients before a step is what the step reports.
            assert found[4]["loss"] == pytest.approx(loss, rel=BAR, abs=BAR)
            for key in found[4].keys() - {"loss"}:
                assert found[4][key] == pytest.approx(found[2][key], abs=1e-5), key
