"""Mixtures of experts train: the balancing loss is really added, and recomputed blocks change nothing."""

import sys

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import shardproof as sp
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_serve import full_state

pytestmark = pytest.mark.distributed

TOLERANCE = 2e-5
ROUTER_COEF = 0.7
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
WITH_ROUTER_LOGITS = ("qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "olmoe", "granitemoe")
# An odd number of tokens per rank, so that no split is even.
SEQUENCES = [[(11 * i + 5 * j * j + 3) % 101 for j in range(n)] for i, n in enumerate((21, 9, 14, 6, 3))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function from a family to the folder of its checkpoint; each is made once."""
    made = {}

    def folder_of(family):
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder_of


def my_sequences(policy):
    group, num_groups = (x // policy.sequence_parallel for x in (dist.get_rank(), dist.get_world_size()))
    return SEQUENCES[group::num_groups]


def descend(folder, options, **how):
    """A step of plain descent with rate 1: its result, and the gradient of each parameter."""
    policy = sp.load(folder, compute_dtype=torch.float32, progress=False, **options)
    before = full_state(policy)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    result = sp.train_step(policy, sp.Batch(my_sequences(policy)), optimizer, max_grad_norm=None, **how)
    after = full_state(policy)
    return result, {name: before[name] - after[name] for name in before}


def descend_with_router(folder, options, router_coef):
    return descend(folder, options, router_coef=router_coef)


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    worst = max(expected, key=lambda name: float((found[name] - expected[name]).abs().max()))
    torch.testing.assert_close(found[worst], expected[worst], rtol=0, atol=TOLERANCE)


# The balancing loss.


def plain_step(folder, router_coef):
    """transformers' own loss and balancing loss over all sequences as one batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    total, num_predictions, logits = 0.0, sum(len(tokens) - 1 for tokens in SEQUENCES), []
    for tokens in SEQUENCES:
        output = model(torch.tensor([tokens]), use_cache=False, output_router_logits=True)
        every = torch.log_softmax(output.logits[0, :-1].float(), -1)
        total = total - every.gather(1, torch.tensor(tokens[1:])[:, None]).sum() / num_predictions
        logits.append(output.router_logits)
    # One micro-batch holds all tokens, so the statistics are of all of them.
    rows = tuple(
        torch.cat([layer.reshape(-1, layer.shape[-1]) for layer in layers])
        for layers in zip(*logits, strict=True)
    )
    balance = plain_balancing_loss(model, rows)
    (total + router_coef * balance).backward()
    return total.item(), balance.item(), {name: param.grad for name, param in model.named_parameters()}


def plain_balancing_loss(model, rows):
    """The function of the family's own module."""
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    experts = getattr(model, "num_experts", None) or model.config.num_local_experts
    return function(rows, experts, model.config.num_experts_per_tok)


@pytest.mark.parametrize("family", WITH_ROUTER_LOGITS)
def test_balancing_loss_is_added_as_transformers_adds_it(checkpoints, family):
    folder = checkpoints(family)
    loss, balance, expected = plain_step(folder, ROUTER_COEF)
    ((result, gradients),) = run_ranks(1, descend_with_router, folder, {}, ROUTER_COEF)
    assert result.loss == pytest.approx(loss + ROUTER_COEF * balance, abs=TOLERANCE)
    assert_same_gradients(gradients, expected)
    ((plain, without),) = run_ranks(1, descend_with_router, folder, {}, 0.0)
    assert plain.loss == pytest.approx(loss, abs=TOLERANCE)
    routers = [
        name for name in gradients if name.endswith((".gate.weight", "router.weight", "router.layer.weight"))
    ]
    assert len(routers) == 2
    for name in routers:
        assert (gradients[name] - without[name]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_activations": True},
        {"strategy": "fsdp1", "checkpoint_activations": True},
        {"strategy": "fsdp1"},
    ],
    ids=str,
)
def test_balancing_loss_with_recomputed_blocks(checkpoints, options):
    folder = checkpoints("qwen3_moe")
    loss, balance, expected = plain_step(folder, ROUTER_COEF)
    ((result, gradients),) = run_ranks(1, descend_with_router, folder, options, ROUTER_COEF)
    assert result.loss == pytest.approx(loss + ROUTER_COEF * balance, abs=TOLERANCE)
    assert_same_gradients(gradients, expected)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_balancing_loss_of_a_sequence_parallel_group_is_that_of_its_whole_batch(checkpoints, strategy):
    folder = checkpoints("qwen3_moe")
    # The tokens that make the row divisible by the group are no part of the batch.
    assert sum(map(len, SEQUENCES)) % 2
    loss, balance, expected = plain_step(folder, ROUTER_COEF)
    options = {"strategy": strategy, "sequence_parallel": 2}
    for result, gradients in run_ranks(2, descend_with_router, folder, options, ROUTER_COEF):
        assert result.loss == pytest.approx(loss + ROUTER_COEF * balance, abs=TOLERANCE)
        assert_same_gradients(gradients, expected)


def test_balancing_loss_of_several_ranks_weighs_each_by_its_tokens(checkpoints):
    """Defined per micro-batch: each rank's own balance, in proportion to its share of the global batch."""
    folder = checkpoints("qwen3_moe")
    ranks = run_ranks(2, descend_with_router, folder, {}, ROUTER_COEF)
    without = run_ranks(2, descend_with_router, folder, {}, 0.0)
    assert ranks[0][0] == ranks[1][0]
    # Perfect balance costs the number of experts a token uses, here 2; nothing costs less.
    assert ranks[0][0].loss - without[0][0].loss > 2 * ROUTER_COEF * 0.99


# Recomputed blocks.


def train(folder, options, role, how):
    """Two steps; their results and the weights after them."""
    policy = sp.load(folder, role=role, compute_dtype=torch.float32, progress=False, **options)
    optimizer = sp.make_optimizer(policy, lr=1e-2, weight_decay=0.1, eps=1e-3)
    mine = my_sequences(policy)
    columns = {"returns": [0.1 * len(tokens) for tokens in mine]} if role == "critic" else {}
    batch = sp.Batch(mine, **columns)
    results = [sp.train_step(policy, batch, optimizer, micro_batch_tokens=20, **how) for _ in range(2)]
    return results, full_state(policy)


def assert_same_run(found, expected):
    for (results, state), (expected_results, expected_state) in zip(found, expected, strict=True):
        for result, wanted in zip(results, expected_results, strict=True):
            assert result.stepped
            assert result.loss == pytest.approx(wanted.loss, abs=TOLERANCE)
            assert result.grad_norm == pytest.approx(wanted.grad_norm, abs=TOLERANCE)
        assert_same_gradients(state, expected_state)
        assert results[1].loss < results[0].loss


@pytest.mark.parametrize(
    ("family", "strategy"), [*((family, "fsdp1") for family in FAMILIES), ("qwen3_moe", "fsdp2")]
)
def test_recomputed_blocks_train_alike(checkpoints, family, strategy):
    folder = checkpoints(family)
    plain = run_ranks(2, train, folder, {"strategy": strategy}, "policy", {})
    recomputed = run_ranks(
        2, train, folder, {"strategy": strategy, "checkpoint_activations": True}, "policy", {}
    )
    assert_same_run(recomputed, plain)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_of_experts_trains(checkpoints, experts):
    """With eager experts the graph depends on the routing; ranks whose experts idle take part all the same."""
    folder = checkpoints("qwen3_moe")
    plain = run_ranks(2, train, folder, {}, "policy", {})
    options = {"experts_implementation": experts, "checkpoint_activations": True}
    assert_same_run(run_ranks(2, train, folder, options, "policy", {}), plain)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_critic_of_experts_trains(checkpoints, strategy):
    folder = checkpoints("qwen3_moe")
    how = {"loss": "value"}
    alone = run_ranks(1, train, folder, {}, "critic", how)
    options = {"strategy": strategy, "checkpoint_activations": True}
    assert_same_run(run_ranks(2, train, folder, options, "critic", how), alone * 2)


def critic_with_router(folder):
    critic = sp.load(folder, role="critic", compute_dtype=torch.float32)
    batch = sp.Batch(SEQUENCES, returns=[1.0] * len(SEQUENCES))
    results = []
    for coefficient in (0.0, ROUTER_COEF):
        optimizer = torch.optim.SGD(critic.trainable_parameters(), lr=0.0)
        results.append(sp.train_step(critic, batch, optimizer, loss="value", router_coef=coefficient).loss)
    return results


def test_balancing_loss_of_a_critic_is_added_or_refused(checkpoints):
    ((kind, *outcome),) = run_ranks_outcomes(1, critic_with_router, checkpoints("qwen3_moe"))
    if kind == "ok":
        ((without, with_it),) = outcome
        assert with_it > without + ROUTER_COEF
    else:
        assert outcome[0] == "ConfigError"
        assert "router_coef" in outcome[1]
