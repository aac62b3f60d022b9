"""Faults of a step: a value that is not finite anywhere, and requests that cannot be. All ranks decide alike."""

import contextlib
import copy
import itertools
import math

import peft
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardproof as sp
from shardproof.digest import digest
from shardproof.train import optim
from shardproof.train.loss import policy_gradient
from shardproof.train.state import training_state
from tests.models import tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

# Rank r of n starts with the r-th of them and takes each n-th.
SEQUENCES = [
    [(11 * i + 5 * j * j + 3) % 101 for j in range(n)] for i, n in enumerate((9, 6, 12, 7, 5, 8, 11, 4))
]


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def local_parameter(policy, name):
    """This rank's memory of a parameter."""
    return local(dict(policy.named_parameters())[name])


def load(family="llama", replicate=1, **options):
    config = options.pop("config", None) or tiny_config(family)
    mesh = sp.make_mesh(replicate=replicate)
    return sp.load(sp.RandomInit(config), mesh=mesh, compute_dtype=torch.float32, **options)


def my_batch(**columns):
    mine = range(dist.get_rank(), len(SEQUENCES), dist.get_world_size())
    return sp.Batch(
        [SEQUENCES[i] for i in mine], **{name: [column[i] for i in mine] for name, column in columns.items()}
    )


def everything(policy, optimizer, schedule):
    """All that a step may change, as values that compare bit by bit."""
    names = {param: name for name, param in policy.named_parameters()}
    weights = {name: digest(local(param)) for param, name in names.items()}
    moments = {
        (names[param], key): digest(local(value)) if isinstance(value, torch.Tensor) else value
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule_state = copy.deepcopy(schedule.state_dict()) if schedule is not None else None
    gradients = [name for param, name in names.items() if param.grad is not None]
    return weights, moments, rates, schedule_state, policy.version, gradients


# A gradient, a loss, a micro-batch or an expert that is not finite.


def spoil_gradient(policy, ranks, module, value, calls=None):
    """Multiply the gradient of a module's output by `value` on `ranks`, in all calls or the given ones."""
    count = [0]

    def hook(_, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            if calls is None or count[0] in calls:
                first.register_hook(lambda grad: grad * value)
            count[0] += 1

    if dist.get_rank() in ranks:
        return policy.model.get_submodule(module).register_forward_hook(hook)
    return None


def module_named(policy, name):
    """`name` as this strategy spells it."""
    names = {n.replace("_fsdp_wrapped_module.", ""): n for n, _ in policy.model.named_modules()}
    return names[name]


OPTIONS = {
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp2": {"strategy": "fsdp2"},
    "hsdp_fsdp2": {"replicate": 2},
    "hsdp_fsdp1": {"replicate": 2, "strategy": "fsdp1"},
    "offload": {"cpu_offload": True},
    "sequence_parallel": {"sequence_parallel": 2},
    "checkpointed": {"checkpoint_activations": True, "strategy": "fsdp1"},
}


def step_with_bad_gradient(options, bad_rank, value, max_grad_norm):
    """A clean step, a spoiled one, a clean one; what the spoiled one changed, and the results."""
    policy = load(**options)
    optimizer = sp.make_optimizer(policy, lr=1e-2, weight_decay=0.1)
    schedule = sp.make_schedule(optimizer, "cosine", warmup_steps=2, total_steps=10)
    batch = my_batch() if policy.sequence_parallel == 1 else sp.Batch(SEQUENCES)
    how = {"micro_batch_tokens": 20, "max_grad_norm": max_grad_norm}
    results = [sp.train_step(policy, batch, optimizer, schedule, **how)]
    before = everything(policy, optimizer, schedule)
    handle = spoil_gradient(policy, [bad_rank], module_named(policy, "model.layers.1.mlp"), value)
    results.append(sp.train_step(policy, batch, optimizer, schedule, **how))
    after = everything(policy, optimizer, schedule)
    if handle is not None:
        handle.remove()
    results.append(sp.train_step(policy, batch, optimizer, schedule, **how))
    assert before[1] and before[-1] == []
    return before == after, results, training_state(policy).num_skipped


@pytest.mark.parametrize(
    ("layout", "value", "max_grad_norm"),
    [*((layout, math.nan, 1.0) for layout in OPTIONS), ("fsdp1", math.inf, None), ("fsdp2", math.inf, None)],
)
def test_gradient_of_one_rank(layout, value, max_grad_norm):
    num_ranks = 4 if layout.startswith("hsdp") else 2
    bad_rank = num_ranks - 1
    ranks = run_ranks(num_ranks, step_with_bad_gradient, OPTIONS[layout], bad_rank, value, max_grad_norm)
    for unchanged, results, num_skipped in ranks:
        first, bad, last = results
        assert str(results) == str(ranks[0][1])  # as text, in which NaN equals NaN
        assert unchanged
        assert (first.stepped, bad.stepped, last.stepped) == (True, False, True)
        assert (first.version, bad.version, last.version) == (1, 1, 2)
        assert bad.reason == "a gradient is not finite"
        assert bad.rank == bad_rank
        assert bad.micro_batch == 0
        # The hook sits on the output of this module, where the fault enters the backward pass.
        assert bad.tensor == "model.layers.1.mlp"
        assert math.isfinite(bad.loss)
        assert not math.isfinite(bad.grad_norm)
        # The rate of a skipped step is that of the next one.
        assert bad.lr == last.lr != first.lr
        assert last.loss < first.loss
        assert num_skipped == 0


def step_with_bad_micro_batch(strategy, bad_rank, bad_index):
    policy = load(strategy=strategy)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    batch = my_batch()
    before = everything(policy, optimizer, None)
    calls = {"seen": 0}

    # The replay is a second pass over the same micro-batches; the fault is in the data, so it comes again.
    def hook(_, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            if calls["seen"] % 4 == bad_index:
                first.register_hook(lambda grad: grad * math.nan)
            calls["seen"] += 1

    if dist.get_rank() == bad_rank:
        policy.model.get_submodule(module_named(policy, "model.layers.0.self_attn")).register_forward_hook(
            hook
        )
    result = sp.train_step(policy, batch, optimizer, micro_batch_tokens=1)
    return result, before == everything(policy, optimizer, None)


@pytest.mark.parametrize("bad_index", [0, 2, 3])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_gradient_of_one_micro_batch(strategy, bad_index):
    for result, unchanged in run_ranks(2, step_with_bad_micro_batch, strategy, 1, bad_index):
        assert not result.stepped
        assert (result.rank, result.micro_batch) == (1, bad_index)
        assert result.tensor == "model.layers.0.self_attn"
        assert unchanged


def step_with_fleeting_fault(strategy):
    """The fault comes once and not again when the batch is replayed."""
    policy = load(strategy=strategy)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    before = everything(policy, optimizer, None)
    spoil_gradient(policy, [0], module_named(policy, "model.layers.0.mlp"), math.nan, calls=[0])
    result = sp.train_step(policy, my_batch(), optimizer)
    return result, before == everything(policy, optimizer, None)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_fault_that_does_not_come_again_is_said_to_be_so(strategy):
    for result, unchanged in run_ranks(2, step_with_fleeting_fault, strategy):
        assert not result.stepped
        assert "run again" in result.reason
        assert (result.micro_batch, result.tensor) == (None, None)
        assert unchanged


def nan_loss_on(bad_rank, bad_value=math.nan):
    """Cross-entropy in which the longest micro-batches of one rank have one bad token."""

    def function(scored, columns):
        row = -scored.logps
        if dist.get_rank() == bad_rank and len(row) >= 10:
            row = torch.where(torch.arange(len(row)) == 3, row * bad_value, row)
        return row, {"logp/mean": scored.logps.detach()}

    return sp.Loss("spoiled", function, metrics={"logp/mean": "mean"})


def step_with_bad_loss(options, bad_rank, value):
    policy = load(**options)
    optimizer = sp.make_optimizer(policy, lr=1e-2, weight_decay=0.1)
    schedule = sp.make_schedule(optimizer, warmup_steps=3)
    results = [sp.train_step(policy, my_batch(), optimizer, schedule)]
    before = everything(policy, optimizer, schedule)
    # One sequence a micro-batch, longest first: rank 0 holds 12, 11, 9, 5 and rank 1 holds 8, 7, 6, 4 tokens.
    how = {"loss": nan_loss_on(bad_rank, value), "micro_batch_tokens": 1}
    results.append(sp.train_step(policy, my_batch(), optimizer, schedule, **how))
    after = everything(policy, optimizer, schedule)
    results.append(sp.train_step(policy, my_batch(), optimizer, schedule))
    return before == after, results


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2", "offload"])
def test_loss_of_one_rank(layout, value):
    ranks = run_ranks(2, step_with_bad_loss, OPTIONS[layout], 0, value)
    for unchanged, (first, bad, last) in ranks:
        assert unchanged
        assert (first.stepped, bad.stepped, last.stepped) == (True, False, True)
        assert bad.reason == "the loss is not finite"
        assert (bad.rank, bad.micro_batch, bad.tensor) == (0, 0, "loss/spoiled")
        assert not math.isfinite(bad.loss)
        assert (bad.version, last.version) == (1, 2)
        assert last.loss < first.loss


def step_with_masked_nan():
    """A token that the mask leaves out may hold anything."""
    policy = load()
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    mask = [[1.0] * (len(tokens) - 2) + [0.0] for tokens in SEQUENCES]
    advantages = [[1.0] * (len(tokens) - 2) + [math.nan] for tokens in SEQUENCES]
    old_logps = [[-4.0] * (len(tokens) - 1) for tokens in SEQUENCES]
    batch = my_batch(mask=mask, advantages=advantages, old_logps=old_logps)
    return sp.train_step(policy, batch, optimizer, loss=policy_gradient())


def test_a_token_that_does_not_count_may_be_nan():
    for result in run_ranks(2, step_with_masked_nan):
        assert result.stepped
        assert math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        assert all(map(math.isfinite, result.metrics.values()))


def expert_shard(policy):
    """This rank's memory of some experts; FSDP1 may hold all of one parameter on one rank."""
    shards = [
        local_parameter(policy, f"model.layers.0.mlp.experts.{name}")
        for name in ("down_proj", "gate_up_proj")
    ]
    return max(shards, key=torch.Tensor.numel).view(-1)


def step_with_bad_expert(strategy, bad_rank):
    """One element of one expert, in one rank's shard, is NaN; then it is repaired."""
    policy = load("qwen3_moe", strategy=strategy)
    optimizer = sp.make_optimizer(policy, lr=1e-2, weight_decay=0.1)
    sp.train_step(policy, my_batch(), optimizer)
    shard = expert_shard(policy)
    kept = None
    if dist.get_rank() == bad_rank:
        kept = shard[7].item()
        shard[7] = math.nan
    before = everything(policy, optimizer, None)
    result = sp.train_step(policy, my_batch(), optimizer)
    after = everything(policy, optimizer, None)
    if kept is not None:
        shard[7] = kept
    return before == after, result, sp.train_step(policy, my_batch(), optimizer)


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_weight_of_one_expert(strategy, bad_rank):
    for unchanged, bad, last in run_ranks(2, step_with_bad_expert, strategy, bad_rank):
        assert unchanged
        assert not bad.stepped
        # The expert is gathered wherever it lies: the rank is the first whose tokens it spoiled.
        assert (bad.reason, bad.rank, bad.micro_batch) == ("the loss is not finite", 0, 0)
        assert last.stepped
        assert last.version == 2


def step_with_bad_expert_gradient(strategy, bad_rank):
    policy = load("qwen3_moe", strategy=strategy)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    before = everything(policy, optimizer, None)
    spoil_gradient(policy, [bad_rank], module_named(policy, "model.layers.1.mlp.experts"), math.nan)
    result = sp.train_step(policy, my_batch(), optimizer)
    return before == everything(policy, optimizer, None), result


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_gradient_of_the_experts(strategy):
    for unchanged, result in run_ranks(2, step_with_bad_expert_gradient, strategy, 1):
        assert unchanged
        assert not result.stepped
        assert (result.reason, result.rank) == ("a gradient is not finite", 1)
        assert result.tensor == "model.layers.1.mlp.experts"


def overflow_one_parameter(strategy):
    """Outputs have finite gradients; the square of one parameter's own gradient does not exist."""
    policy = load(strategy=strategy)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    before = everything(policy, optimizer, None)
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(grad):
        return grad * math.inf

    def hook(module, inputs, output):
        module.weight.register_hook(spoil)

    if dist.get_rank() == 1:
        module = policy.model.get_submodule(module_named(policy, name.removesuffix(".weight")))
        module.register_forward_hook(hook)
    result = sp.train_step(policy, my_batch(), optimizer)
    return before == everything(policy, optimizer, None), result, name


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_gradient_that_only_the_parameter_shows(strategy):
    for unchanged, result, name in run_ranks(2, overflow_one_parameter, strategy):
        assert unchanged
        assert not result.stepped
        assert result.reason == "a gradient is not finite"
        assert result.tensor == name


# Skips in a row.


def skip_until_it_raises(limit, clean_after=None):
    policy = load()
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    skips = []
    for number in range(10):
        loss = "sft" if number == clean_after else nan_loss_on(0)
        before = everything(policy, optimizer, None)
        try:
            result = sp.train_step(policy, my_batch(), optimizer, loss=loss, max_consecutive_skips=limit)
        except sp.TrainFault as fault:
            assert before == everything(policy, optimizer, None)
            return skips, str(fault)
        skips.append(result.stepped)
    return skips, None


@pytest.mark.parametrize(("limit", "clean_after"), [(3, None), (1, None), (3, 2)])
def test_skips_in_a_row_raise_on_all_ranks(limit, clean_after):
    ranks = run_ranks(2, skip_until_it_raises, limit, clean_after)
    assert ranks[0] == ranks[1]
    steps, message = ranks[0]
    expected = [False] * (limit - 1)
    assert steps == (expected if clean_after is None else [False] * clean_after + [True] + expected)
    assert message.startswith("T302 train_step: rank 0: ")
    for word in (f"{limit} steps in a row", "the loss is not finite", "micro-batch 0", "loss/spoiled"):
        assert word in message


# Optimizers.


def step_with_optimizer(kind, strategy):
    policy = load(strategy=strategy)
    params = policy.trainable_parameters()
    if kind == "one_missing":
        params = params[:-1]
    elif kind == "of_another_model":
        params = load(strategy=strategy).trainable_parameters()
    elif kind == "one_too_many":
        params = [*params, torch.nn.Parameter(torch.zeros(3, 5))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    sp.train_step(policy, my_batch(), optimizer)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("kind", "codes"),
    [("one_missing", ["S211"]), ("of_another_model", ["S211", "S212"]), ("one_too_many", ["S212"])],
)
def test_optimizer_of_other_parameters(kind, codes, strategy):
    outcomes = run_ranks_outcomes(2, step_with_optimizer, kind, strategy)
    message = assert_all_raise(outcomes, codes[0], "rank 0", "rank 1", kind="ShardFault")
    for code in ("S211", "S212"):
        assert (f"{code} attest" in message) == (code in codes)
    if kind == "one_missing":
        assert "'lm_head.weight'" in message or "'model.norm.weight'" in message


def step_with_optimizer_of_unsharded_model():
    """An optimizer that was built before the load, from the whole model."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    sp.train_step(load(), my_batch(), optimizer)


def test_optimizer_built_before_the_load():
    outcomes = run_ranks_outcomes(2, step_with_optimizer_of_unsharded_model)
    message = assert_all_raise(outcomes, "S211", kind="ShardFault")
    assert "S212" in message
    assert "build the optimizer after load" in message


# Requests that cannot be.


def request(batches, options, **load_options):
    """A step with this rank's batch. `batches` holds (sequences, columns) for each rank, or one for all."""
    sequences, columns = batches[dist.get_rank() % len(batches)]
    policy = load(**load_options)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    return sp.train_step(policy, sp.Batch(sequences, **columns), optimizer, **options)


def request_as(role, batches, options):
    return request(batches, options, role=role)


GOOD = ([[1, 2, 3], [4, 5]], {})


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([GOOD, ([[1, 2, 3], [7] * 129], {})], ["rank 1", "sequence 1", "129 tokens", "128 positions"]),
        ([GOOD, ([[1, 101]], {})], ["rank 1", "sequence 0", "token 101", "vocabulary has 101"]),
        ([([[1, -3]], {}), GOOD], ["rank 0", "token -3"]),
        ([([], {})], ["no rank has a sequence"]),
    ],
    ids=["too_long", "outside_vocabulary", "negative", "empty_everywhere"],
)
def test_batch_that_cannot_be_used(batches, words):
    outcomes = run_ranks_outcomes(2, request, batches, {}, timeout=60, group_timeout=20)
    assert_all_raise(outcomes, "C004", *words, kind="ConfigError")


def test_column_of_another_length():
    bad = ([[1, 2, 3]], {"mask": [[1.0]]})
    outcomes = run_ranks_outcomes(2, request, [bad], {})
    assert_all_raise(outcomes, "C004", "'mask'", "sequence 0", "expected (2,)", kind="ConfigError")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "stf"}, ["loss='stf'", "Did you mean 'sft'?"]),
        ({"loss": 7}, ["loss=7"]),
        ({"temperature": 0.0}, ["temperature=0.0"]),
        ({"temperature": math.nan}, ["temperature=nan"]),
        ({"max_grad_norm": -1.0}, ["max_grad_norm=-1.0", "above 0"]),
        ({"max_grad_norm": 0.0}, ["max_grad_norm=0.0"]),
        ({"router_coef": math.nan}, ["router_coef=nan"]),
        ({"micro_batch_tokens": 0}, ["micro_batch_tokens=0"]),
        ({"router_coef": 0.1}, ["router_coef=0.1", "'llama' has no router"]),
        ({"loss": "value"}, ["'value'", "critic", "policy"]),
    ],
    ids=lambda value: next(iter(value.items())).__repr__() if isinstance(value, dict) else "",
)
def test_setting_that_cannot_be(options, words):
    outcomes = run_ranks_outcomes(2, request, [GOOD], options)
    assert_all_raise(outcomes, "C001", *words, kind="ConfigError")


def test_missing_columns_are_named():
    outcomes = run_ranks_outcomes(2, request, [GOOD], {"loss": "policy"})
    assert_all_raise(outcomes, "C004", "'policy'", "advantages", "old_logps", kind="ConfigError")


@pytest.mark.parametrize(
    ("role", "loss", "words"),
    [
        ("reference", "sft", ["reference is frozen"]),
        ("critic", "policy", ["'policy' is for a policy", "critic"]),
    ],
)
def test_loss_of_another_role(role, loss, words):
    outcomes = run_ranks_outcomes(2, request_as, role, [GOOD], {"loss": loss})
    assert_all_raise(outcomes, "C001", *words, kind="ConfigError")


def request_on_one_rank(bad_options):
    """Only rank 1 asks for something that cannot be."""
    request([GOOD], bad_options if dist.get_rank() == 1 else {})


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"loss": "stf"}, {"micro_batch_tokens": 0}], ids=str
)
def test_setting_that_is_bad_on_one_rank(options):
    outcomes = run_ranks_outcomes(2, request_on_one_rank, options, timeout=60, group_timeout=10)
    ((key, value),) = options.items()
    assert_all_raise(outcomes, "C001", f"{key}={value!r}", kind="ConfigError")


# Ranks with unequal batches.


def step_with_columns(batches, loss):
    sequences, columns = batches[dist.get_rank()]
    policy = load()
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    result = sp.train_step(policy, sp.Batch(sequences, **columns), optimizer, loss=loss)
    return result.loss, result.grad_norm, result.num_tokens, sorted(result.metrics.items())


def weights_of(sequences):
    return {"weights": [[0.05] * (len(tokens) - 1) for tokens in sequences]}


def policy_columns(sequences):
    return {"advantages": [1.0] * len(sequences), "old_logps": [-4.0] * len(sequences)}


@pytest.mark.parametrize("columns_of", [weights_of, policy_columns])
def test_a_rank_without_sequences_needs_no_columns(columns_of):
    loss = "policy" if columns_of is policy_columns else "sft"
    all_of_it = (SEQUENCES, columns_of(SEQUENCES))
    (expected,) = run_ranks(1, step_with_columns, [all_of_it], loss)
    for ranks in ([all_of_it, ([], {})], [([], {}), all_of_it, ([], {})]):
        found = run_ranks(len(ranks), step_with_columns, ranks, loss, timeout=60, group_timeout=15)
        for result in found:
            assert result == found[0]
            assert result[:2] == pytest.approx(expected[:2], abs=2e-5)
            assert result[2] == expected[2]
            assert dict(result[3]) == pytest.approx(dict(expected[3]), abs=2e-5)


def test_columns_that_one_rank_alone_has():
    """Rank 1 has sequences and no weights: theirs would be computed over another batch than rank 0's."""
    batches = [(SEQUENCES[:2], weights_of(SEQUENCES[:2])), (SEQUENCES[2:], {})]
    outcomes = run_ranks_outcomes(2, step_with_columns, batches, "sft", timeout=60, group_timeout=15)
    assert_all_raise(outcomes, "C004", "weights", kind="ConfigError")


# Metrics.


def other_metrics_on(bad_rank, name):
    def function(scored, columns):
        metrics = {"a": scored.logps.detach()}
        if dist.get_rank() == bad_rank:
            metrics[name] = scored.logps.detach()
        return -scored.logps, metrics

    return sp.Loss("odd", function, metrics={"a": "mean"})


def step_with_other_metrics(bad_rank, name, options):
    policy = load(**options)
    batch = my_batch() if policy.sequence_parallel == 1 else sp.Batch(SEQUENCES)
    sp.train_step(policy, batch, sp.make_optimizer(policy), loss=other_metrics_on(bad_rank, name))


@pytest.mark.parametrize("name", ["extra", "timeout/mean"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_metrics_that_one_rank_alone_reports(num_ranks, name):
    outcomes = run_ranks_outcomes(
        num_ranks, step_with_other_metrics, 1, name, {}, timeout=60, group_timeout=20
    )
    assert_all_raise(outcomes, "T306", "rank 1", f"'{name}'", "rank 0", kind="TrainFault")


@pytest.mark.parametrize("bad_rank", [1, 2])
def test_metrics_under_sequence_parallelism(bad_rank):
    options = {"sequence_parallel": 2}
    outcomes = run_ranks_outcomes(
        4, step_with_other_metrics, bad_rank, "extra", options, timeout=60, group_timeout=20
    )
    assert_all_raise(outcomes, "T306", f"rank {bad_rank}", "'extra'", kind="TrainFault")


def step_after_a_fault():
    """A step that raised leaves nothing that the next one would add to."""
    losses = []
    for fault in (False, True):
        policy = load()
        optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
        before = everything(policy, optimizer, None)
        if fault:
            with pytest.raises(sp.TrainFault, match="T306"):
                sp.train_step(policy, my_batch(), optimizer, loss=other_metrics_on(1, "extra"))
            assert before == everything(policy, optimizer, None)
        losses.append([sp.train_step(policy, my_batch(), optimizer) for _ in range(2)])
    return losses


def test_a_step_after_one_that_raised_is_clean():
    for clean, after_fault in run_ranks(2, step_after_a_fault):
        assert clean == after_fault


# Scores.


def score_with_bad_weight(role, bad_rank, name, index):
    policy = load(role=role)
    if dist.get_rank() == bad_rank:
        local_parameter(policy, name).view(-1)[index] = math.nan
    score = sp.values if role == "critic" else sp.logprobs
    return score(policy, SEQUENCES[: 2 + dist.get_rank()])


@pytest.mark.parametrize(
    ("role", "what"), [("policy", "log-prob"), ("reference", "log-prob"), ("critic", "value")]
)
def test_scores_that_are_not_finite(role, what):
    name = "model.layers.0.mlp.down_proj.weight"
    outcomes = run_ranks_outcomes(2, score_with_bad_weight, role, 1, name, 5)
    assert_all_raise(
        outcomes, "T301", "rank 0", "rank 1", f"{what} of the {role} in sequence 0 at position 0 is nan",
        kind="TrainFault",
    )  # fmt: skip


def score_bad_token(bad_rank):
    """One hidden state of one rank is bad: the fifth token of the second of two packed sequences."""
    policy = load()
    sequences = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]

    def hook(_, inputs, output):
        if output.shape[1] == 7:  # the last token of a sequence predicts nothing and is not computed
            output[0, 2 + 4] = math.inf

    if dist.get_rank() == bad_rank:
        policy.model.model.norm.register_forward_hook(hook)
    return sp.logprobs(policy, sequences)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_the_first_bad_position_is_named(bad_rank):
    outcomes = run_ranks_outcomes(2, score_bad_token, bad_rank)
    assert_all_raise(
        outcomes,
        "T301",
        f"rank {bad_rank}",
        "of the policy",
        "in sequence 1 at position 4",
        "1 of 5",
        kind="TrainFault",
    )


def score_bad_request(sequences_by_rank, temperature):
    return sp.logprobs(load(), sequences_by_rank[dist.get_rank()], temperature=temperature)


@pytest.mark.parametrize(
    ("sequences", "temperature", "code", "word"),
    [
        ([[[1, 2]], [[3]]], 1.0, "C004", "1 tokens"),
        ([[[1, 2]], [[3, 500]]], 1.0, "C004", "token 500"),
        ([[[1, 2] * 80], [[3, 5]]], 1.0, "C004", "128 positions"),
        ([[[1, 2]], [[3, 5]]], 0.0, "C001", "temperature=0.0"),
        ([[[1, 2]], [[3, 5]]], math.nan, "C001", "temperature=nan"),
    ],
    ids=["too_short", "outside_vocabulary", "too_long", "temperature", "temperature_nan"],
)
def test_scores_that_cannot_be(sequences, temperature, code, word):
    outcomes = run_ranks_outcomes(2, score_bad_request, sequences, temperature, timeout=60, group_timeout=10)
    assert_all_raise(outcomes, code, word, kind="ConfigError")


# Attention that is asked for something that packed attention does not have.


def train_with_dropout(sequence_parallel):
    config = tiny_config("llama", attention_dropout=0.1)
    policy = load(config=config, sequence_parallel=sequence_parallel)
    result = sp.train_step(policy, my_batch(), sp.make_optimizer(policy))
    return training_state(policy).scoring, result.stepped


def test_attention_dropout_takes_the_slower_path():
    for scoring, stepped in run_ranks(2, train_with_dropout, 1):
        assert stepped
        assert not scoring.packed
        assert "dropout" in scoring.reason


def test_attention_dropout_cannot_be_split():
    outcomes = run_ranks_outcomes(2, train_with_dropout, 2)
    assert_all_raise(outcomes, "C001", "sequence_parallel=2", "dropout", kind="ConfigError")


def train_adapters_with_bad_gradient(strategy):
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    policy = load(strategy=strategy, lora=lora)
    optimizer = sp.make_optimizer(policy, lr=1e-2, weight_decay=0.1)
    first = sp.train_step(policy, my_batch(), optimizer)
    before = everything(policy, optimizer, None)
    spoil_gradient(policy, [1], module_named(policy, "model.layers.1.self_attn"), math.nan)
    result = sp.train_step(policy, my_batch(), optimizer)
    return before == everything(policy, optimizer, None), first.stepped, result


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_gradient_of_adapters(strategy):
    for unchanged, stepped, result in run_ranks(2, train_adapters_with_bad_gradient, strategy):
        assert unchanged
        assert stepped and not result.stepped
        assert (result.rank, result.tensor) == (1, "model.layers.1.self_attn")


# An optimizer that fails on one rank.


@contextlib.contextmanager
def memory_runs_out(optimizer, when):
    """On rank 1, when the optimizer has allocated part of its state, or when it has changed part of the weights."""
    zeros_like, step = torch.zeros_like, optimizer.step
    mine = {param for group in optimizer.param_groups for param in group["params"]}
    calls = itertools.count()

    def allocate(tensor, **options):
        if isinstance(tensor, torch.nn.Parameter) and tensor in mine and next(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return zeros_like(tensor, **options)

    def step_partly(closure=None):
        step(closure)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if dist.get_rank() == 1 and when == "allocating":
        torch.zeros_like = allocate
    elif dist.get_rank() == 1:
        optimizer.step = step_partly
    try:
        yield
    finally:
        torch.zeros_like, optimizer.step = zeros_like, step


def step_with_failing_optimizer(options, when):
    """(what is said, whether all is as it was, the result of the next step and of one that nothing preceded)."""
    policy = load(**options)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    schedule = sp.make_schedule(optimizer, warmup_steps=3)
    before = everything(policy, optimizer, schedule)
    batch = my_batch()
    with memory_runs_out(optimizer, when), pytest.raises(sp.TrainFault) as caught:
        sp.train_step(policy, batch, optimizer, schedule)
    unchanged = before == everything(policy, optimizer, schedule)
    again = sp.train_step(policy, batch, optimizer, schedule) if when == "allocating" else None
    other = load(**options)
    alone = sp.make_optimizer(other, lr=1e-2)
    first = sp.train_step(other, batch, alone, sp.make_schedule(alone, warmup_steps=3))
    return str(caught.value), unchanged, again, first


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2", "offload"])
def test_optimizer_state_that_does_not_fit_on_one_rank(layout):
    ranks = run_ranks(2, step_with_failing_optimizer, OPTIONS[layout], "allocating")
    assert len({message for message, *_ in ranks}) == 1
    for message, unchanged, again, alone in ranks:
        assert message.startswith("T309 train_step: rank 1: ")
        assert "out of memory" in message and "nothing was changed" in message
        assert unchanged
        assert again == alone


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_optimizer_that_fails_in_its_step_on_one_rank(strategy):
    ranks = run_ranks(2, step_with_failing_optimizer, {"strategy": strategy}, "stepping")
    assert len({message for message, *_ in ranks}) == 1
    message = ranks[0][0]
    assert message.startswith("T309 train_step: rank 1: ")
    assert "out of memory" in message and "resume from the last checkpoint" in message


def trajectory(kind, early):
    """Three steps whose state is allocated before the verdict, or inside the first of them."""
    policy = load()
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(policy.trainable_parameters(), lr=1e-2, **options)
    with pytest.MonkeyPatch.context() as patch:
        if not early:
            patch.setattr(optim, "_allocate", lambda optimizer, group: None)
        results = [sp.train_step(policy, my_batch(), optimizer) for _ in range(3)]
    return [(result.loss, result.grad_norm) for result in results], everything(policy, optimizer, None)[1]


@pytest.mark.parametrize("kind", ["Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "ASGD"])
def test_optimizer_state_is_the_same_allocated_early_or_in_the_step(kind):
    assert run_ranks(2, trajectory, kind, True) == run_ranks(2, trajectory, kind, False)
