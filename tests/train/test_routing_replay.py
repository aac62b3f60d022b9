"""Replayed experts in training: the gradient of a plain model with forced experts, in every layout, recomputed or not."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.model.routing import Routers
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_serve import full_state

pytestmark = pytest.mark.distributed

TOLERANCE = 2e-5
SEQUENCES = [[(11 * i + 5 * j * j + 3) % 101 for j in range(n)] for i, n in enumerate((21, 9, 14, 6, 3))]
NUM_EXPERTS = {"qwen3_moe": 8, "deepseek_v3": 8, "gpt_oss": 4}


def experts_of(family):
    """Experts of every token in two layers, which are not the model's own choice; those of the last tokens are missing."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for tokens in SEQUENCES:
        scores = torch.rand(len(tokens), 2, NUM_EXPERTS[family], generator=generator)
        chosen = scores.topk(2, -1).indices.to(torch.int16)
        chosen[-1] = -1
        rows.append(chosen)
    return rows


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def folder_of(family):
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder_of


def my_batch(policy, family, replays):
    group, num_groups = (x // policy.sequence_parallel for x in (dist.get_rank(), dist.get_world_size()))
    batch = sp.Batch(SEQUENCES).with_experts(experts_of(family)) if replays else sp.Batch(SEQUENCES)
    return batch.select(range(group, len(SEQUENCES), num_groups))


def descend(folder, family, options, how, replays=True):
    """The log-probs, and a step of plain descent with rate 1: its result, and the gradient of each parameter."""
    policy = sp.load(folder, compute_dtype=torch.float32, progress=False, **options)
    batch = my_batch(policy, family, replays)
    logps = sp.logprobs(policy, batch.sequences, experts=batch.experts)
    before = full_state(policy)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    result = sp.train_step(policy, batch, optimizer, max_grad_norm=None, **how)
    after = full_state(policy)
    return [row.tolist() for row in logps], result, {name: before[name] - after[name] for name in before}


def force(model, experts):
    """Let a plain model's routers choose given experts, by wrapping each router: independent of what is tested."""
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    assert len(routers) == 2
    for at, router in enumerate(routers):
        own, recorded = router.forward, experts[:, at].long()

        def forced(hidden, *args, own=own, router=router, given=recorded, **kwargs):
            logits, scores, indices = own(hidden, *args, **kwargs)
            given = torch.where(given < 0, indices, given)
            if type(router).__name__.startswith("Qwen3"):
                probs = torch.softmax(logits.float(), -1).gather(1, given)
                return logits, (probs / probs.sum(-1, keepdim=True)).to(scores.dtype), given
            return logits, torch.softmax(logits.gather(1, given), -1), given

        router.forward = forced


def plain_step(folder, family):
    """transformers' own model, sequence by sequence, with forced experts."""
    num = sum(len(tokens) - 1 for tokens in SEQUENCES)
    total, grads, logps = 0.0, {}, []
    for tokens, experts in zip(SEQUENCES, experts_of(family), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
        force(model, experts)
        every = torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float(), -1)
        row = every.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
        loss = -row.sum() / num
        loss.backward()
        total += loss.item()
        logps.append(row.detach())
        for name, param in model.named_parameters():
            if param.grad is not None:
                grads[name] = grads.get(name, 0.0) + param.grad
    return logps, total, grads


def assert_same_gradients(found, expected):
    for name, wanted in expected.items():
        torch.testing.assert_close(
            found[name], wanted, rtol=0, atol=TOLERANCE, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradients_are_those_of_a_plain_model_with_forced_experts(checkpoints, family):
    logps, loss, expected = plain_step(checkpoints(family), family)
    ((found, result, gradients),) = run_ranks(1, descend, checkpoints(family), family, {}, {})
    for row, wanted in zip(found, logps, strict=True):
        torch.testing.assert_close(torch.tensor(row), wanted, rtol=0, atol=TOLERANCE)
    assert result.loss == pytest.approx(loss, abs=TOLERANCE)
    assert_same_gradients(gradients, expected)
    ((own, *_),) = run_ranks(1, descend, checkpoints(family), family, {}, {}, False)
    assert max(abs(a - b) for x, y in zip(own, found, strict=True) for a, b in zip(x, y, strict=True)) > 0.05


LAYOUTS = [
    (2, {}, {"micro_batch_tokens": 20}),
    (3, {}, {"micro_batch_tokens": 20}),
    (2, {"strategy": "fsdp1", "checkpoint_activations": True}, {"micro_batch_tokens": 24}),
    (1, {"checkpoint_activations": True}, {}),
    (
        1,
        {"checkpoint_activations": "auto", "experts_implementation": "batched_mm"},
        {"micro_batch_tokens": 30},
    ),
    (2, {"sequence_parallel": 2, "checkpoint_activations": True}, {}),
    (1, {"experts_implementation": "eager", "strategy": "fsdp1"}, {}),
]


@pytest.mark.parametrize(("ranks", "options", "how"), LAYOUTS, ids=str)
def test_every_layout_takes_the_same_step(checkpoints, ranks, options, how):
    folder = checkpoints("deepseek_v3")
    ((_, expected, gradients),) = run_ranks(1, descend, folder, "deepseek_v3", {}, {})
    for _, result, found in run_ranks(ranks, descend, folder, "deepseek_v3", options, how):
        assert result.loss == pytest.approx(expected.loss, abs=TOLERANCE)
        assert_same_gradients(found, gradients)


def test_the_balancing_loss_is_of_the_routers_own_choice(checkpoints):
    """It pulls the router to where it is balanced, and says nothing about what an engine chose."""
    folder = checkpoints("qwen3_moe")
    losses = {}
    for coefficient in (0.0, 0.7):
        how = {"router_coef": coefficient}
        ((_, result, _),) = run_ranks(1, descend, folder, "qwen3_moe", {}, how)
        losses[coefficient] = result.loss
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rows = []
    for tokens, experts in zip(SEQUENCES, experts_of("qwen3_moe"), strict=True):
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        force(plain, experts)
        with torch.no_grad():
            rows.append(
                plain(torch.tensor([tokens]), use_cache=False, output_router_logits=True).router_logits
            )
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    joined = tuple(torch.cat(layers) for layers in zip(*rows, strict=True))
    balance = load_balancing_loss_func(joined, model.config.num_experts, model.config.num_experts_per_tok)
    assert losses[0.7] - losses[0.0] == pytest.approx(0.7 * balance.item(), abs=TOLERANCE)


def own_choice(folder, options):
    """A step with the policy's own choice replayed, and one without replay: results and weights."""
    outcomes = []
    for replays in (False, True):
        policy = sp.load(folder, compute_dtype=torch.float32, progress=False, **options)
        plain = AutoModelForCausalLM.from_pretrained(folder)
        routers = Routers(plain)
        rows = []
        for tokens in SEQUENCES:
            ids = torch.tensor([tokens])
            with torch.no_grad(), routers.noting() as noted:
                plain(ids, use_cache=False)
            rows.append(torch.stack([experts for _, experts in noted], 1))
        batch = sp.Batch(SEQUENCES)
        batch = batch.with_experts(rows) if replays else batch
        optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
        result = sp.train_step(policy, batch, optimizer, max_grad_norm=None)
        outcomes.append((result, full_state(policy)))
    return outcomes


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp1", "checkpoint_activations": True}], ids=str)
def test_replaying_the_policys_own_choice_changes_no_bit(checkpoints, options):
    (((plain, weights), (replayed, again)),) = run_ranks(1, own_choice, checkpoints("qwen3_moe"), options)
    assert replayed == plain
    assert all(torch.equal(weights[name], again[name]) for name in weights)


# What is not right is refused on every rank.


def mixed(folder):
    policy = sp.load(folder, compute_dtype=torch.float32, progress=False)
    batch = my_batch(policy, "qwen3_moe", replays=dist.get_rank() == 0)
    sp.train_step(policy, batch, torch.optim.SGD(policy.trainable_parameters(), lr=1.0))


def refused(folder, shape):
    policy = sp.load(folder, compute_dtype=torch.float32, progress=False)
    sp.logprobs(policy, [[1, 2, 3]], experts=[torch.zeros(shape, dtype=torch.int16)])


def test_ranks_without_experts_among_ranks_with_them_are_refused(checkpoints):
    for outcome in run_ranks_outcomes(2, mixed, checkpoints("qwen3_moe")):
        assert "C004" in outcome[2] and "some ranks' batches name experts" in outcome[2]


def test_experts_that_do_not_fit_are_refused(checkpoints, tmp_path):
    ((_, _, message),) = run_ranks_outcomes(1, refused, checkpoints("qwen3_moe"), (3, 5, 2))
    assert "C004" in message and "expected [tokens, 2, 2]" in message
    ((_, _, message),) = run_ranks_outcomes(1, refused, checkpoints("qwen3_moe"), (2, 2, 2))
    assert "C004" in message and "[[2, 2, 2]]" in message
    dense = make_checkpoint(tmp_path, "llama")
    ((_, _, message),) = run_ranks_outcomes(1, refused, dense, (3, 2, 2))
    assert "C001" in message and "'llama' cannot be replayed" in message


def test_a_batch_keeps_experts_with_their_sequences():
    rows = experts_of("qwen3_moe")
    batch = sp.Batch(SEQUENCES).with_experts(rows)
    batch = batch.with_column("advantages", [torch.ones(len(s) - 1) for s in SEQUENCES])
    part = batch.in_conversations([0, 0, 1, 1, 2]).select([3, 0])
    assert [torch.equal(found, rows[at]) for found, at in zip(part.experts, (3, 0), strict=True)] == [
        True,
        True,
    ]
    assert sp.Batch(SEQUENCES).select([1]).experts is None
