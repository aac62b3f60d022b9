"""One trajectory for every layout: two steps anywhere equal two steps of plain transformers in a single process.

The layouts are a pairwise sample of their product: every pair of settings that can stand together does so in some case.
"""

import functools
from itertools import combinations, product

import peft
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.train.forward import Scoring
from shardproof.train.loss import policy_gradient
from shardproof.train.state import training_state
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise
from tests.shard.test_serve import full_state

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

# Largest absolute difference of a loss, norm, log-prob, gradient or weight, all of them float32 numbers of order 1.
TOLERANCE = 2e-5

LEARNING_RATE, WEIGHT_DECAY = 1e-2, 0.1
# Adam divides a gradient by its own size: with a tiny eps, rounding of a gradient near zero becomes a whole step.
OPTIMIZER = {"betas": (0.9, 0.95), "eps": 1e-3}
FAMILIES = {
    # (tied, experts): family and config fields
    (False, False): ("qwen3", {}),
    (True, False): ("qwen3_tied", {}),
    (False, True): ("qwen3_moe", {}),
    (True, True): ("qwen3_moe", {"tie_word_embeddings": True}),
}
AXES = {
    "sharding": ("fsdp2", "fsdp1", "hsdp_fsdp2", "hsdp_fsdp1"),
    "world": (1, 2, 3, 4),
    "tied": (False, True),
    "experts": (False, True),
    "sequence_parallel": (1, 2, 4),
    "batches": ("packed", "packed_small", "one_sequence", "own_attention"),
    "checkpoint": (False, True, 2, "auto"),
    "lora": (False, True),
}
MICRO_BATCH_TOKENS = {"packed": 10_000, "packed_small": 24, "one_sequence": 1, "own_attention": 10_000}


def shard_size(case):
    return case["world"] // 2 if case["sharding"].startswith("hsdp") else case["world"]


def is_valid(case):
    """Whether the settings can stand together at all."""
    if case["sharding"].startswith("hsdp") and case["world"] % 2:
        return False
    if shard_size(case) % case["sequence_parallel"]:
        return False
    if case["batches"] == "own_attention" and case["sequence_parallel"] > 1:
        return False
    return not is_refused(case)


def is_refused(case):
    """Whether torch's FSDP1 would compute something else, so that the load refuses it by name."""
    unsharded_fsdp1 = case["sharding"].endswith("fsdp1") and shard_size(case) == 1
    return unsharded_fsdp1 and case["tied"] and case["lora"]


def pairwise(axes, is_valid):
    """Combinations in which every pair of values that any valid combination has appears; greedy, deterministic."""
    cases = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    cases = [case for case in cases if is_valid(case)]
    bits: dict[tuple, int] = {}
    masks = []
    for case in cases:
        pairs = combinations(case.items(), 2)
        masks.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs))
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: (masks[index] & missing).bit_count())
        chosen.append(cases[best])
        missing &= ~masks[best]
    return chosen


def name_of(case):
    marks = [name for name in ("tied", "experts", "lora") if case[name]]
    recompute = {False: [], True: ["recompute"], 2: ["recompute_half"], "auto": ["recompute_auto"]}[
        case["checkpoint"]
    ]
    return "-".join(
        [case["sharding"], f"{case['world']}ranks", f"sp{case['sequence_parallel']}", case["batches"]]
        + marks
        + recompute
    )


LAYOUTS = pairwise(AXES, is_valid)


def test_the_sample_holds_every_pair_of_settings():
    valid = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    wanted = {pair for case in valid if is_valid(case) for pair in combinations(case.items(), 2)}
    found = {pair for case in LAYOUTS for pair in combinations(case.items(), 2)}
    assert found == wanted
    assert all(is_valid(case) for case in LAYOUTS)
    assert len(LAYOUTS) < 40


# What is trained on.


LENGTHS = ((5, 12, 2, 9, 17, 3, 8), (11, 4, 21, 6, 2))  # of each step's sequences
TOKENS = [
    [[(13 * i + 7 * j * j + 5 * s + 3) % 101 for j in range(n)] for i, n in enumerate(LENGTHS[s])]
    for s in (0, 1)
]
# A third of each sequence is a prompt, which does not count.
MASKS = [[[float(j >= (n - 1) // 3) for j in range(n - 1)] for n in lengths] for lengths in LENGTHS]


def dealt(count, num_groups):
    """{group: its sequences}; of three groups and more, the last has none."""
    busy = max(1, num_groups - 1) if num_groups > 2 else num_groups
    return {group: [i for i in range(count) if i % busy == group] for group in range(num_groups)}


def my_indices(step, sequence_parallel):
    num_groups = dist.get_world_size() // sequence_parallel
    return dealt(len(TOKENS[step]), num_groups)[dist.get_rank() // sequence_parallel]


def lora_config():
    # With init_lora_weights=False both adapter matrices are random, so both have gradients from the first step on.
    return peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=3, lora_alpha=5, init_lora_weights=False)


def load_case(folder, case):
    replicate = 2 if case["sharding"].startswith("hsdp") else 1
    policy = sp.load(
        folder,
        strategy=case["sharding"].removeprefix("hsdp_"),
        mesh=sp.make_mesh(replicate=replicate),
        compute_dtype=torch.float32,
        sequence_parallel=case["sequence_parallel"],
        checkpoint_activations=case["checkpoint"],
        lora=lora_config() if case["lora"] else None,
        progress=False,
    )
    if case["batches"] == "own_attention":
        training_state(policy).scoring = Scoring(None, True, "the test asks for the model's own attention")
    return policy


# The reference: a plain model in one process, one sequence at a time, and no line of this project.


@functools.cache
def reference(folder, lora, train):
    """What `train` gives for a plain model; LoRA starts from adapter values that are drawn on one rank."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    if lora:
        peft.inject_adapter_in_model(lora_config(), model)
        adapters = run_ranks(1, initial_adapters, folder)[0]
        assert not model.load_state_dict(adapters, strict=False).unexpected_keys
    return train(model)


def initial_adapters(folder):
    policy = sp.load(folder, lora=lora_config(), compute_dtype=torch.float32)
    return {name: value for name, value in full_state(policy).items() if "lora_" in name}


def plain_logprobs(model, tokens):
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


def plain_loss(model, step):
    masks = [torch.tensor(mask) for mask in MASKS[step]]
    total = sum(
        (mask * -plain_logprobs(model, tokens)).sum()
        for tokens, mask in zip(TOKENS[step], masks, strict=True)
    )
    return total / sum(mask.sum() for mask in masks)


def state_of(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_plain(model):
    trainable = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], **OPTIMIZER)
    losses, norms = [], []
    for step, rate in enumerate((LEARNING_RATE / 2, LEARNING_RATE)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = plain_loss(model, step)
        loss.backward()
        norms.append(float(clip_grad_norm_(trainable, 1.0)))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logps = [[plain_logprobs(model.eval(), tokens) for tokens in sequences] for sequences in TOKENS]
    return losses, norms, state_of(model), logps


def train_on_rank(folder, case):
    """Two steps on this rank; (results, all weights, {(step, index): log-probs after training})."""
    policy = load_case(folder, case)
    optimizer = sp.make_optimizer(policy, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **OPTIMIZER)
    schedule = sp.make_schedule(optimizer, warmup_steps=1)
    results, tokens = [], MICRO_BATCH_TOKENS[case["batches"]]
    for step in (0, 1):
        mine = my_indices(step, case["sequence_parallel"])
        batch = sp.Batch([TOKENS[step][i] for i in mine], mask=[MASKS[step][i] for i in mine])
        results.append(sp.train_step(policy, batch, optimizer, schedule, micro_batch_tokens=tokens))
    logps = {}
    for step in (0, 1):
        mine = my_indices(step, case["sequence_parallel"])
        found = sp.logprobs(policy, [TOKENS[step][i] for i in mine], micro_batch_tokens=tokens)
        logps.update({(step, i): row for i, row in zip(mine, found, strict=True)})
    return results, full_state(policy), logps


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{(tied, experts): folder}, each made once."""
    return {
        key: make_checkpoint(tmp_path_factory.mktemp(family), family, **fields)
        for key, (family, fields) in FAMILIES.items()
    }


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    worst = max(expected, key=lambda name: float((found[name] - expected[name]).abs().max()))
    assert_same(found[worst], expected[worst])


@pytest.mark.parametrize("case", LAYOUTS, ids=name_of)
def test_two_steps(checkpoints, case):
    folder = checkpoints[case["tied"], case["experts"]]
    losses, norms, weights, logps = reference(folder, case["lora"], train_plain)
    ranks = run_ranks(case["world"], train_on_rank, folder, case)
    for results, state, rank_logps in ranks:
        assert results == ranks[0][0]
        assert [result.stepped for result in results] == [True, True]
        assert [result.version for result in results] == [1, 2]
        assert [result.lr for result in results] == [LEARNING_RATE / 2, LEARNING_RATE]
        assert [result.num_tokens for result in results] == [int(sum(map(sum, masks))) for masks in MASKS]
        assert_same(torch.tensor([result.loss for result in results]), torch.tensor(losses))
        assert_same(torch.tensor([result.grad_norm for result in results]), torch.tensor(norms))
        assert_same_state(state, weights)
        for (step, index), row in rank_logps.items():
            assert_same(row, logps[step][index])
    scored = {key for *_, rank_logps in ranks for key in rank_logps}
    assert len(scored) == sum(map(len, LENGTHS))


def test_the_reference_clips_and_moves(checkpoints):
    """The comparison above means something: gradients are clipped, and the weights go further than the tolerance."""
    folder = checkpoints[False, False]
    losses, norms, weights, _ = reference(folder, False, train_plain)
    before = state_of(AutoModelForCausalLM.from_pretrained(folder))
    assert min(norms) > 1.0
    assert losses[1] != losses[0]
    assert all(float((weights[name] - before[name]).abs().max()) > 100 * TOLERANCE for name in before)


# Scoring, which leaves the root gathered, at any point of the run.


def train_and_score_on_rank(folder, case, score_before_optimizer):
    policy = load_case(folder, case)

    def score():
        sp.logprobs(policy, [TOKENS[0][i] for i in my_indices(0, case["sequence_parallel"])])

    if score_before_optimizer:
        score()
    optimizer = sp.make_optimizer(policy, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **OPTIMIZER)
    schedule = sp.make_schedule(optimizer, warmup_steps=1)
    for step in (0, 1):
        score()
        mine = my_indices(step, case["sequence_parallel"])
        batch = sp.Batch([TOKENS[step][i] for i in mine], mask=[MASKS[step][i] for i in mine])
        sp.train_step(policy, batch, optimizer, schedule)
        score()
    return full_state(policy), sp.attest(policy, optimizer)


@pytest.mark.parametrize(
    ("sharding", "world", "score_before_optimizer"),
    [("fsdp1", 1, False), ("fsdp1", 2, True), ("fsdp2", 1, True), ("fsdp2", 2, False)],
)
def test_scoring_does_not_change_the_run(checkpoints, sharding, world, score_before_optimizer):
    case = dict.fromkeys(AXES, False) | {"sharding": sharding, "world": world}
    case |= {"sequence_parallel": 1, "batches": "packed", "tied": True}
    folder = checkpoints[True, False]
    _, _, weights, _ = reference(folder, False, train_plain)
    for state, findings in run_ranks(world, train_and_score_on_rank, folder, case, score_before_optimizer):
        assert_same_state(state, weights)
        assert findings == []


# Gradients, parameter by parameter.


GRADIENT_LAYOUTS = [
    ("fsdp2", 3, 1, "packed_small", False, True),
    ("fsdp1", 2, 2, "packed", True, False),
    ("fsdp1", 4, 4, "packed_small", False, False),
    ("hsdp_fsdp2", 4, 2, "packed_small", True, True),
    ("hsdp_fsdp1", 4, 1, "one_sequence", False, True),
    ("fsdp2", 4, 4, "one_sequence", True, True),
    ("hsdp_fsdp1", 2, 1, "packed_small", False, False),  # replicas without shards
    ("hsdp_fsdp2", 2, 1, "packed_small", True, False),
]


def gradients_plain(model):
    plain_loss(model, 0).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def gradients_on_rank(folder, case):
    """A step of plain descent with rate 1 moves each weight by its gradient."""
    policy = load_case(folder, case)
    before = full_state(policy)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    mine = my_indices(0, case["sequence_parallel"])
    batch = sp.Batch([TOKENS[0][i] for i in mine], mask=[MASKS[0][i] for i in mine])
    tokens = MICRO_BATCH_TOKENS[case["batches"]]
    result = sp.train_step(policy, batch, optimizer, micro_batch_tokens=tokens, max_grad_norm=None)
    after = full_state(policy)
    trainable = {name for name, param in policy.named_parameters() if param.requires_grad}
    return {name: before[name] - after[name] for name in trainable}, result.grad_norm


@pytest.mark.parametrize(
    ("layout", "lora"),
    [(layout, False) for layout in GRADIENT_LAYOUTS] + [(layout, True) for layout in GRADIENT_LAYOUTS[2:4]],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "lora" * value,
)
def test_gradients_of_each_parameter(checkpoints, layout, lora):
    keys = ("sharding", "world", "sequence_parallel", "batches", "tied", "experts")
    case = {**dict(zip(keys, layout, strict=True)), "checkpoint": False, "lora": lora}
    folder = checkpoints[case["tied"], case["experts"]]
    expected = reference(folder, lora, gradients_plain)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for gradients, grad_norm in run_ranks(case["world"], gradients_on_rank, folder, case):
        assert_same_state(gradients, expected)
        assert_same(torch.tensor(grad_norm), norm)


# Another loss: everything of a policy-gradient step at once.


POLICY_LOSS = {"clip_low": 0.1, "clip_high": 0.2, "kl_coef": 0.3, "entropy_coef": 0.05}
ADVANTAGES = [1.0, -0.5, 2.0, 0.25, -1.5, 0.75, -1.0]
TEMPERATURE = 0.7


def old_logps(index, offset):
    """Log-probs that another policy might have given, near enough for some ratios to be inside the clip range."""
    n = LENGTHS[0][index] - 1
    return (-4.0 + offset + 0.3 * torch.sin(torch.arange(n) * 1.7 + index)).tolist()


def policy_loss_plain(model):
    """Sequence-mean policy gradient, its terms spelled out."""
    total = torch.zeros(())
    for index, tokens in enumerate(TOKENS[0]):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float() / TEMPERATURE
        every = torch.log_softmax(logits, -1)
        logp = every.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
        entropy = -(every.exp() * every).sum(-1)
        ratio = torch.exp(logp - torch.tensor(old_logps(index, 0.0)))
        gain = torch.minimum(ratio * ADVANTAGES[index], ratio.clamp(0.9, 1.2) * ADVANTAGES[index])
        difference = torch.tensor(old_logps(index, 0.5)) - logp
        row = -gain + 0.3 * (torch.exp(difference) - difference - 1) - 0.05 * entropy
        mask = torch.tensor(MASKS[0][index])
        total = total + (row * mask).sum() / mask.sum() / len(TOKENS[0])
    total.backward()
    return total.item(), {name: param.grad for name, param in model.named_parameters()}


def policy_loss_on_rank(folder, case):
    policy = load_case(folder, case)
    before = full_state(policy)
    mine = my_indices(0, case["sequence_parallel"])
    batch = sp.Batch(
        [TOKENS[0][i] for i in mine],
        mask=[MASKS[0][i] for i in mine],
        advantages=[ADVANTAGES[i] for i in mine],
        old_logps=[old_logps(i, 0.0) for i in mine],
        ref_logps=[old_logps(i, 0.5) for i in mine],
    )
    batch = sp.weigh(batch, "sequence_mean", share=case["sequence_parallel"])
    result = sp.train_step(
        policy,
        batch,
        torch.optim.SGD(policy.trainable_parameters(), lr=1.0),
        loss=policy_gradient(**POLICY_LOSS),
        micro_batch_tokens=MICRO_BATCH_TOKENS[case["batches"]],
        max_grad_norm=None,
        temperature=TEMPERATURE,
    )
    after = full_state(policy)
    return result, {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS[:4], ids=lambda layout: "-".join(map(str, layout)))
def test_policy_gradient_step(checkpoints, layout):
    keys = ("sharding", "world", "sequence_parallel", "batches", "tied", "experts")
    case = {**dict(zip(keys, layout, strict=True)), "checkpoint": True, "lora": False}
    folder = checkpoints[case["tied"], case["experts"]]
    loss, gradients = reference(folder, False, policy_loss_plain)
    single = {**case, "sharding": "fsdp2", "world": 1, "sequence_parallel": 1, "batches": "packed"}
    (expected, _) = run_ranks(1, policy_loss_on_rank, folder, single)[0]
    for result, found in run_ranks(case["world"], policy_loss_on_rank, folder, case):
        assert result.loss == pytest.approx(loss, abs=TOLERANCE)
        assert_same_state(found, gradients)
        assert result.metrics == pytest.approx(expected.metrics, abs=TOLERANCE)
        assert 0 < result.metrics["clip_fraction"] < 1


# What cannot be.


@pytest.mark.parametrize(("sharding", "world"), [("fsdp1", 1), ("hsdp_fsdp1", 2)])
def test_fsdp1_without_shards_refuses_adapters_on_ties(checkpoints, sharding, world):
    case = dict.fromkeys(AXES, False) | {
        "sequence_parallel": 1,
        "batches": "packed",
        "tied": True,
        "lora": True,
    }
    case |= {"sharding": sharding, "world": world}
    assert is_refused(case)
    outcomes = run_ranks_outcomes(world, train_on_rank, checkpoints[True, False], case)
    assert_all_raise(outcomes, "S214", "strategy='fsdp1'", "lm_head.weight", kind="ShardFault")
