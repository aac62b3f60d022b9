"""Corrections for tokens that an engine drew: each formula against numpy in float64, alone and through whole steps."""

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.train.corrections import mismatch_kl
from shardproof.train.loss import Scored, policy_gradient
from shardproof.train.metrics import MetricSums, reduce_metrics
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.shard.test_serve import full_state

EMPTY = torch.empty(0)
CASES = {
    "tis": {"correction": "tis", "tis_cap": 1.2},
    "mis": {"correction": "mis", "mis_cap": 1.5},
    "icepop": {"correction": "icepop", "icepop_bounds": (0.8, 1.3)},
    "none": {"correction": "none"},
    "no cap": {"correction": "tis", "tis_cap": None},
    "behaviour": {"trust_region": "behaviour"},
}


# The formulas once more, in numpy: one row per sequence, whose counted tokens are given.


def expected_weights(case, gaps):
    """(weight of each token, its clipped share or masked share) of sequences with these gaps."""
    if case == "tis":
        return [np.minimum(np.exp(row), 1.2) for row in gaps], [np.exp(row) > 1.2 for row in gaps]
    if case == "icepop":
        inside = [(np.exp(row) >= 0.8) & (np.exp(row) <= 1.3) for row in gaps]
        kept = [np.exp(row) * ok for row, ok in zip(gaps, inside, strict=True)]
        return kept, [~ok for ok in inside]
    if case == "mis":
        products = [np.prod(np.exp(row)) for row in gaps]
        kept = [np.full(len(row), p if p <= 1.5 else 0.0) for p, row in zip(products, gaps, strict=True)]
        return kept, [np.full(len(row), p > 1.5) for p, row in zip(products, gaps, strict=True)]
    return [np.ones(len(row)) for row in gaps], [np.zeros(len(row), bool) for row in gaps]


def expected_metrics(case, gaps):
    weights, hit = expected_weights(case, gaps)
    flat = np.concatenate(gaps)
    found = {
        "mismatch/mean": np.abs(flat).mean(),
        "mismatch/max": np.abs(flat).max(),
        "mismatch/kl": (np.exp(flat) - flat - 1).mean(),
    }
    if case in ("tis", "mis", "icepop"):
        # One number per sequence where all of its tokens have the same weight by definition.
        each = np.concatenate([row[:1] for row in weights] if case == "mis" else weights)
        found["correction/ess"] = each.sum() ** 2 / (len(each) * (each**2).sum())
        found[f"correction/{'clipped' if case == 'tis' else 'masked'}"] = np.concatenate(hit).mean()
    if case == "behaviour":  # the ratio has the importance weight in it
        each = np.exp(flat)
        found["correction/ess"] = each.sum() ** 2 / (len(each) * (each**2).sum())
    return found


def expected_loss(logps, old, weights, advantages, low=0.2, high=0.2):
    """One value per token, of tensors whose gradient is wanted."""
    ratio = (logps - old).exp()
    return -weights * torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


# The loss alone.


def drawn_batch(seed, scale=0.15):
    """Seven sequences in one row, the third of which has no token that counts; gaps of the size of `scale`."""
    rng = np.random.default_rng(seed)
    lengths = [9, 1, 4, 13, 2, 6, 5]
    sequence = np.repeat(np.arange(7), lengths)
    counted = rng.random(len(sequence)) < 0.8
    counted[sequence == 2] = False
    logps = -rng.gamma(2.0, 1.0, len(sequence))
    old = logps + rng.normal(0, 0.2, len(sequence))
    columns = {
        "advantages": rng.normal(0, 1, len(sequence)),
        "old_logps": old,
        "rollout_logps": old - rng.normal(0.02, scale, len(sequence)),
        "mask": counted.astype(float),
        "sequence": sequence,
    }
    # What does not count may be anything.
    columns["rollout_logps"][~counted] = rng.normal(0, 3, (~counted).sum())
    return logps, {name: torch.tensor(column).float() for name, column in columns.items()}, counted


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_metrics_are_those_of_the_formulas(case, has_old):
    given, columns, counted = drawn_batch(seed=len(case))
    if not has_old:
        columns["rollout_logps"] += torch.tensor(given).float() - columns.pop("old_logps")
    logps = torch.tensor(given).float().requires_grad_()
    loss = policy_gradient(rollout_whole=True, **CASES[case])
    row, metrics = loss.function(Scored(logps, EMPTY, EMPTY), columns)
    (gradient,) = torch.autograd.grad(row[torch.tensor(counted)].sum(), logps)

    columns = {name: column.double() for name, column in columns.items()}
    sequence = columns["sequence"].numpy()
    trainers = columns.get("old_logps", logps.detach().double())
    gap = (trainers - columns["rollout_logps"]).numpy()
    gaps = [gap[(sequence == s) & counted] for s in range(7) if (counted & (sequence == s)).any()]
    weights = torch.tensor(np.concatenate(expected_weights(case, gaps)[0]))
    precise = logps.detach().double().requires_grad_()
    old = columns["rollout_logps"] if case == "behaviour" else trainers
    mine = torch.tensor(counted)
    wanted = expected_loss(precise[mine], old[mine], weights, columns["advantages"][mine])
    (exact,) = torch.autograd.grad(wanted.sum(), precise)
    torch.testing.assert_close(row[mine].double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-6)

    assert set(metrics) == set(loss.metrics)
    sums = MetricSums(loss.metrics)
    sums.add(metrics, mine)
    found = reduce_metrics([{name: part.tolist() for name, part in sums.rows().items()}], loss.metrics)
    told = {name: x for name, x in found.items() if name.startswith(("mismatch", "correction"))}
    assert told == pytest.approx(expected_metrics(case, gaps), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("surrogate", ["clipped", "sequence", "detached"])
def test_the_engines_policy_takes_the_place_of_the_old_one_in_every_surrogate(surrogate):
    given, columns, counted = drawn_batch(seed=5)
    mine = torch.tensor(counted)
    columns = {name: torch.where(mine, column, 0.0) for name, column in columns.items()} | {
        "sequence": columns["sequence"]
    }
    found = []
    for settings, old in (
        ({"trust_region": "behaviour"}, "old_logps"),
        ({"correction": "none"}, "rollout_logps"),
    ):
        logps = torch.tensor(given).float().requires_grad_()
        loss = policy_gradient(rollout_whole=True, surrogate=surrogate, **settings)
        row, _ = loss.function(Scored(logps, EMPTY, EMPTY), columns | {"old_logps": columns[old]})
        found.append((row[mine], *torch.autograd.grad(row[mine].sum(), logps)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_masked_tokens_and_sequences_have_no_gradient():
    given, columns, counted = drawn_batch(seed=3)
    mine = torch.tensor(counted)
    for case in ("mis", "icepop"):
        logps = torch.tensor(given).float().requires_grad_()
        loss = policy_gradient(rollout_whole=True, clip_low=1.0, clip_high=1e6, **CASES[case])
        row, metrics = loss.function(Scored(logps, EMPTY, EMPTY), columns)
        (gradient,) = torch.autograd.grad(row[mine].sum(), logps)
        masked = metrics["correction/masked"].bool()
        assert 0 < int(masked[mine].sum()) < int(mine.sum())
        assert not gradient[masked].any() and bool((gradient[~masked & mine] != 0).all())


def test_weights_are_at_most_their_bounds_and_the_bounds_themselves_count():
    gap = torch.log(torch.tensor([0.5, 2.0, 5.0, 0.25, 8.0], dtype=torch.float64))
    columns = {"advantages": torch.ones(5), "rollout_logps": -gap, "mask": torch.ones(5)}
    columns["sequence"] = torch.arange(5)

    def kept(**settings):
        loss = policy_gradient(rollout_whole=True, clip_low=1.0, clip_high=1e6, **settings)
        zeros = torch.zeros(5, dtype=torch.float64)
        return (-loss.function(Scored(zeros, EMPTY, EMPTY), columns)[0]).tolist()

    assert kept(tis_cap=2.0) == pytest.approx([0.5, 2.0, 2.0, 0.25, 2.0])
    assert kept(correction="mis", mis_cap=5.0 + 1e-9) == pytest.approx([0.5, 2.0, 5.0, 0.25, 0.0])
    bounds = (0.5 - 1e-9, 5.0 + 1e-9)
    assert kept(correction="icepop", icepop_bounds=bounds) == pytest.approx([0.5, 2.0, 5.0, 0.0, 0.0])
    assert kept(correction="none") == [1.0] * 5


def test_the_mismatch_kl_is_that_of_the_two_distributions_and_never_negative():
    torch.manual_seed(0)
    engine, trainer = torch.log_softmax(torch.randn(2, 50, dtype=torch.float64), -1)
    exact = (engine.exp() * (engine - trainer)).sum()
    assert float((engine.exp() * mismatch_kl(trainer - engine)).sum()) == pytest.approx(float(exact))
    gaps = torch.cat([torch.randn(4000) * 10.0**-k for k in range(9)] + [torch.tensor([300.0, -300.0])])
    assert bool((mismatch_kl(gaps) >= 0).all()) and bool(torch.isfinite(mismatch_kl(gaps).float()).all())


def test_the_effective_sample_size_is_a_share():
    def share(*rows):
        sums = [MetricSums({"w": "ess"}) for _ in rows]
        for each, (values, counted) in zip(sums, rows, strict=True):
            each.add({"w": torch.tensor(values)}, torch.tensor(counted, dtype=torch.bool))
        return reduce_metrics([{"w": each.rows()["w"].tolist()} for each in sums], {"w": "ess"})["w"]

    assert share(([0.3] * 4, [1] * 4)) == pytest.approx(1.0)
    assert share(([1.0, 0.0, 0.0, 0.0], [1] * 4)) == pytest.approx(0.25)
    assert share(([1.0, 9.0], [1, 0]), ([0.0], [1]), ([7.0], [0])) == pytest.approx(0.5)
    assert share(([0.0, 0.0], [1, 1])) == 0.0 == share(([1.0], [0])), "nothing was trained on"
    # Two sequences of three tokens and one: each of them counts once.
    assert share(([[2.0, 2.0, 2.0, 1.0], [1 / 3, 1 / 3, 1 / 3, 1.0]], [1] * 4)) == pytest.approx(9 / 10)


def test_a_nucleus_has_weights_but_no_mismatch():
    loss = policy_gradient(rollout_whole=False, correction="icepop")
    assert {"nucleus/mean", "correction/ess", "correction/masked"} <= set(loss.metrics)
    assert not any(name.startswith("mismatch") for name in loss.metrics)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"correction": "mis"}, "'mis' needs rollout log-probs"),
        ({"trust_region": "behaviour"}, "'behaviour' needs rollout log-probs"),
        ({"correction": "mis", "rollout_whole": False}, "not of a nucleus"),
        ({"trust_region": "behaviour", "rollout_whole": False}, "not of a nucleus"),
        ({"correction": "icepop", "icepop_bounds": (2.0, 0.5), "rollout_whole": True}, "below the second"),
        ({"correction": "ice", "rollout_whole": True}, "not one of tis, mis, icepop, none"),
        ({"trust_region": "behavior", "rollout_whole": True}, "Did you mean 'behaviour'?"),
        ({"tis_cap": 0.0, "rollout_whole": True}, "tis_cap"),
    ],
)
def test_corrections_that_cannot_be_meant(settings, said):
    with pytest.raises(sp.ConfigError) as caught:
        policy_gradient(**settings)
    assert said in str(caught.value)


# Whole steps, on several ranks.


LENGTHS = (5, 12, 2, 9, 17, 3, 8)
CONVERSATIONS = (0, 1, 1, 3, 4, 5, 5)  # two of them have two sequences
TOKENS = [[(13 * i + 7 * j * j + 3) % 101 for j in range(n)] for i, n in enumerate(LENGTHS)]
# Turns of the policy and of others alternate; of the sixth sequence no token counts.
MASKS = [[float(j >= n // 3 and j % 4 != 3 and i != 5) for j in range(n - 1)] for i, n in enumerate(LENGTHS)]
ADVANTAGES = [1.0, -0.5, 0.7, -1.2, 0.4, 2.0, -0.8]
LAYOUTS = [(1, 1, 10_000), (2, 1, 24), (3, 1, 10_000), (2, 2, 24)]  # ranks, sequence-parallel ranks, tokens


def noise(seed, scale):
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.normal(0.01, scale, n - 1)).float() for n in LENGTHS]


GAPS, MOVES = noise(1, 0.2), noise(2, 0.25)  # trainer less engine; policy less old policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def plain_logps(model, tokens):
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()


def plain_columns(folder):
    """(old log-probs, rollout log-probs) of each sequence, around the model's own."""
    with torch.no_grad():
        logps = [plain_logps(plain_model(folder), tokens) for tokens in TOKENS]
    old = [row - move for row, move in zip(logps, MOVES, strict=True)]
    return old, [row - gap for row, gap in zip(old, GAPS, strict=True)]


@functools.cache
def plain_step(folder, case):
    """(loss, metrics, gradients) of a plain model on the whole batch, weights and losses in float64."""
    model = plain_model(folder)
    old, drawn = plain_columns(folder)
    masks = [torch.tensor(mask).bool() for mask in MASKS]
    pairs = zip(old, drawn, masks, strict=True)
    gaps = [(a.double() - b.double())[mask].numpy() for a, b, mask in pairs]
    weights, _ = expected_weights(case, gaps)
    num_conversations = len({c for c, mask in zip(CONVERSATIONS, masks, strict=True) if mask.any()})
    total = 0.0
    for i, mask in enumerate(masks):
        anchor = drawn[i] if case == "behaviour" else old[i]
        logps = plain_logps(model, TOKENS[i]).double()[mask]
        row = expected_loss(logps, anchor.double()[mask], torch.tensor(weights[i]), ADVANTAGES[i])
        # The mean of each conversation over the tokens of all its sequences.
        same = [int(masks[j].sum()) for j, c in enumerate(CONVERSATIONS) if c == CONVERSATIONS[i]]
        total = total + row.sum() / max(sum(same), 1) / num_conversations
    total.backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
    return float(total.detach()), expected_metrics(case, [row for row in gaps if len(row)]), gradients


def step_on_rank(folder, columns, sequence_parallel, micro_batch_tokens):
    """{case: (loss, metrics, gradients)}: with SGD at a rate of 1 the weights move by just the gradient."""
    num_groups = dist.get_world_size() // sequence_parallel
    busy = max(1, num_groups - 1) if num_groups > 2 else num_groups  # of three groups, the last has nothing
    group = dist.get_rank() // sequence_parallel
    # The sequences of a conversation are on one rank.
    mine = [i for i in range(len(TOKENS)) if CONVERSATIONS[i] % busy == group]
    old, drawn = columns
    batch = sp.Batch(
        [TOKENS[i] for i in mine],
        mask=[MASKS[i] for i in mine],
        advantages=[ADVANTAGES[i] for i in mine],
        old_logps=[old[i] for i in mine],
        rollout_logps=[drawn[i] for i in mine],
    ).in_conversations([CONVERSATIONS[i] for i in mine])
    batch = sp.weigh(batch, "sequence_mean", share=sequence_parallel)
    found = {}
    for case, settings in CASES.items():
        policy = sp.load(
            folder, compute_dtype=torch.float32, sequence_parallel=sequence_parallel, progress=False
        )
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        before = full_state(policy)
        loss = policy_gradient(rollout_whole=True, **settings)
        options = {"micro_batch_tokens": micro_batch_tokens, "max_grad_norm": None}
        result = sp.train_step(policy, batch, optimizer, loss=loss, **options)
        gradients = {name: before[name] - after for name, after in full_state(policy).items()}
        found[case] = result.loss, dict(result.metrics), gradients
    return found


@pytest.mark.distributed
@pytest.mark.invariant
@pytest.mark.parametrize(("world", "sequence_parallel", "tokens"), LAYOUTS)
def test_a_step_corrects_alike_in_every_layout(folder, world, sequence_parallel, tokens):
    columns = plain_columns(folder)
    for found in run_ranks(world, step_on_rank, folder, columns, sequence_parallel, tokens):
        for case, (loss, metrics, gradients) in found.items():
            exact_loss, exact_metrics, exact = plain_step(folder, case)
            assert loss == pytest.approx(exact_loss, abs=1e-6), case
            told = {name: x for name, x in metrics.items() if name.startswith(("mismatch", "correction"))}
            assert told == pytest.approx(exact_metrics, rel=1e-5, abs=1e-6), case
            worst = max(float((gradients[name] - exact[name]).abs().max()) for name in exact)
            assert worst < 1e-6, case
            assert all(0 < x < 1 for name, x in told.items() if name.startswith("correction")), case
