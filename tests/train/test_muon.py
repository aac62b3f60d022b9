"""Muon on sharded matrices against torch.optim.Muon on whole ones."""

import math

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.config import optimizer as settings
from shardproof.train import optim
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.train.test_step_faults import (
    everything,
    load,
    memory_runs_out,
    module_named,
    my_batch,
    spoil_gradient,
)

pytestmark = pytest.mark.distributed

SEQUENCES = [[(11 * i + 5 * j * j + 3) % 101 for j in range(5 + i)] for i in range(6)]
# So small a rate that one rounding of bfloat16 in Newton-Schulz, where gradients differ in their last bits, is below 1e-6.
LR, DECAY, BETAS, EPS = 1e-5, 0.1, (0.9, 0.95), 1e-2
LAYOUTS = {
    "1 rank": (1, {}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "fsdp1": (2, {"strategy": "fsdp1"}),
    "offload": (2, {"cpu_offload": True}),
    "3 ranks": (3, {"strategy": "fsdp1"}),
    "hsdp": (4, {"replicate": 2}),
}


def whole(policy):
    """Every parameter, whole, by name."""
    return {name: tensor.clone() for name, tensor in sp.WeightStream(policy)}


def train_sharded(source, options):
    """Weights after three steps, and which parameters Muon moved."""
    options = dict(options)
    mesh = sp.make_mesh(replicate=options.pop("replicate", 1))
    policy = sp.load(source, mesh=mesh, compute_dtype=torch.float32, **options)
    optimizer = sp.make_optimizer(policy, LR, DECAY, BETAS, EPS, name="muon")
    batch = sp.Batch(SEQUENCES[dist.get_rank() :: dist.get_world_size()])
    for _ in range(3):
        assert sp.train_step(policy, batch, optimizer, max_grad_norm=None).stepped
    names = {param: name for name, param in policy.named_parameters()}
    state = {names[param]: sorted(row) for param, row in optimizer.state.items()}
    return whole(policy), state


def is_apart(name):
    """What AdamW updates whatever its shape; a stack of experts' biases has two dimensions."""
    return "embed" in name or "lm_head" in name or name.endswith("bias")


def matrices_of(model):
    """(hidden matrices, one by one; the others) of a whole model, told apart by name."""
    hidden, others = [], []
    for name, param in model.named_parameters():
        apart = is_apart(name) or param.ndim < 2
        (others if apart else hidden).append(param)
    return hidden, others


def train_whole(model):
    """The same steps in one process. torch's Muon takes single matrices, so stacks of experts are taken apart."""
    hidden, others = matrices_of(model)
    pieces = {param: [nn.Parameter(p.detach()) for p in param] for param in hidden if param.ndim == 3}
    single = [param for param in hidden if param.ndim == 2] + [p for row in pieces.values() for p in row]
    muon = torch.optim.Muon(single, LR, DECAY, adjust_lr_fn="match_rms_adamw")
    biases = {param for name, param in model.named_parameters() if name.endswith("bias")}
    decay = [param for param in others if param.ndim > 1 and param not in biases]
    groups = [{"params": decay}, {"params": list({*others} - {*decay}), "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, LR, BETAS, EPS, weight_decay=DECAY)
    count = sum(len(sequence) - 1 for sequence in SEQUENCES)
    for _ in range(3):
        model.zero_grad()
        for sequence in SEQUENCES:
            tokens = torch.tensor([sequence])
            logps = model(tokens).logits[0, :-1].float().log_softmax(-1)
            (-logps.gather(1, tokens[0, 1:, None]).sum() / count).backward()
        for param, row in pieces.items():
            for piece, grad in zip(row, param.grad, strict=True):
                piece.grad = grad
        muon.step()
        adamw.step()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """{family: (its folder, its weights after three steps of torch's own)}."""
    found = {}
    for family in ("llama", "qwen3_moe", "gpt_oss"):
        folder = make_checkpoint(tmp_path_factory.mktemp(family), family)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        train_whole(model.train())
        model.save_pretrained(out := tmp_path_factory.mktemp("whole"))
        found[family] = folder, load_file(out / "model.safetensors")
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("llama", layout) for layout in LAYOUTS),
        *((family, layout) for family in ("qwen3_moe", "gpt_oss") for layout in ("fsdp2", "fsdp1")),
    ],
)
def test_the_numbers_are_those_of_torch(expected, family, layout):
    num_ranks, options = LAYOUTS[layout]
    folder, trained = expected[family]
    for weights, state in run_ranks(num_ranks, train_sharded, folder, options):
        assert weights.keys() == trained.keys()
        for name, tensor in weights.items():
            assert (tensor - trained[name]).abs().max() < 1e-6, name
        for name, keys in state.items():
            apart = is_apart(name) or "norm" in name or "sinks" in name
            assert keys == (["exp_avg", "exp_avg_sq", "step"] if apart else ["momentum_buffer"]), name


def train_and_save(source, root, name, strategy, options, num_steps):
    """Losses of `num_steps` steps after as many that were saved, and the weights then."""
    policy = sp.load(source, strategy=strategy, compute_dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, 1e-2, name=name, **options)
    batch = sp.Batch(SEQUENCES[dist.get_rank() :: dist.get_world_size()])
    for _ in range(num_steps):
        sp.train_step(policy, batch, optimizer)
    sp.save_checkpoint(root, policy, optimizer)
    losses = [sp.train_step(policy, batch, optimizer).loss for _ in range(num_steps)]
    return losses, whole(policy)


def go_on(source, root, name, strategy, options, num_steps):
    policy = sp.load(source, strategy=strategy, compute_dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, 1.0, name=name, **options)
    sp.resume(root, policy, optimizer)
    batch = sp.Batch(SEQUENCES[dist.get_rank() :: dist.get_world_size()])
    losses = [sp.train_step(policy, batch, optimizer).loss for _ in range(num_steps)]
    return losses, whole(policy)


class Lion(torch.optim.Optimizer):
    """A user's optimizer: elementwise, with one momentum in another dtype than the parameter's."""

    def __init__(self, groups, lr, betas=(0.9, 0.99), scale=1.0):
        super().__init__(groups, {"lr": lr, "betas": betas, "scale": scale, "weight_decay": 0.0})

    def declare_state(self, group, param):
        return {"momentum": torch.bfloat16, "count": None}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"], state["count"] = torch.zeros_like(param, dtype=torch.bfloat16), 0
                state["count"] += 1
                first, second = group["betas"]
                update = (state["momentum"].float() * first + param.grad * (1 - first)).tanh()
                state["momentum"].mul_(second).add_(param.grad.bfloat16(), alpha=1 - second)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * group["scale"])


@pytest.mark.parametrize(("name", "options"), [("muon", {}), (f"{__name__}:Lion", {"scale": 0.5})])
def test_state_is_saved_and_resharded(expected, tmp_path, name, options):
    folder, _ = expected["llama"]
    saved = run_ranks(2, train_and_save, folder, tmp_path, name, "fsdp2", options, 2)
    for num_ranks, strategy in ((2, "fsdp2"), (1, "fsdp2"), (2, "fsdp1")):
        for losses, weights in run_ranks(num_ranks, go_on, folder, tmp_path, name, strategy, options, 2):
            assert losses == pytest.approx(saved[0][0], abs=1e-4)
            for key, tensor in weights.items():
                assert torch.allclose(tensor, saved[0][1][key], atol=2e-4), key


def fail_then_skip_then_step(strategy):
    """What memory that runs out on rank 1, and a gradient that is not finite, leave behind; then a step."""
    policy = load(strategy=strategy)
    optimizer = sp.make_optimizer(policy, lr=1e-2, name="muon")
    before = everything(policy, optimizer, None)
    with memory_runs_out(optimizer, "allocating"), pytest.raises(sp.TrainFault) as caught:
        sp.train_step(policy, my_batch(), optimizer)
    states = [everything(policy, optimizer, None)]
    handle = spoil_gradient(policy, [1], module_named(policy, "model.layers.1.mlp"), math.nan)
    skipped = sp.train_step(policy, my_batch(), optimizer)
    states.append(everything(policy, optimizer, None))
    if handle is not None:
        handle.remove()
    losses = [sp.train_step(policy, my_batch(), optimizer).loss for _ in range(2)]
    findings = [finding.code for finding in sp.attest(policy, optimizer)]
    return str(caught.value), states == [before] * 2, skipped.stepped, losses, findings


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_step_that_fails_or_is_skipped_changes_nothing(strategy):
    for message, unchanged, stepped, losses, findings in run_ranks(2, fail_then_skip_then_step, strategy):
        assert message.startswith("T309 train_step: rank 1: ")
        assert unchanged and not stepped
        assert losses[1] < losses[0]
        assert findings == []


def no_optimizer(groups, lr):
    return len(groups) * lr


def make_badly(what):
    policy = load()
    return sp.make_optimizer(policy, **what)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"name": "moun"}, "Did you mean 'muon'?"),
        ({"name": "adamw", "momentum": 0.9}, "'adamw' has no option 'momentum'"),
        ({"name": "muon", "momentun": 0.9}, "Did you mean 'momentum'?"),
        ({"name": "muon", "adjust_lr": "mine"}, "match_rms_adamw"),
        ({"name": "torch.optim:SDG"}, "Did you mean 'SGD'?"),
        ({"name": "torch.optim:SGD", "momentun": 0.9}, "unexpected keyword argument 'momentun'"),
        ({"name": f"{__name__}:no_optimizer"}, "returned a float"),
        (
            {"name": "torch.optim:SGD", "betas": (0.5, 0.9)},
            "betas=[0.5, 0.9]: 'torch.optim:SGD' has no parameter",
        ),
    ],
)
def test_optimizers_that_cannot_be(what, said):
    (outcome,) = run_ranks_outcomes(1, make_badly, what)
    assert outcome[1] == "ConfigError"
    assert "C001" in outcome[2] and said in outcome[2]


def resume_as_another(root):
    """What is said of AdamW's state by an optimizer that keeps another, and of state that is not as declared."""
    policy = load()
    optimizer = sp.make_optimizer(policy, 1e-2)
    sp.train_step(policy, my_batch(), optimizer)
    sp.save_checkpoint(root, policy, optimizer)
    said = []
    other = sp.make_optimizer(policy, 1e-2, name="torch.optim:SGD", momentum=0.9)
    with pytest.raises(sp.ExportFault) as caught:
        sp.resume(root, policy, other)
    said.append(str(caught.value))
    optimizer.state[policy.trainable_parameters()[0]]["more"] = 1
    with pytest.raises(sp.ExportFault) as caught:
        sp.save_checkpoint(root, policy, optimizer)
    said.append(str(caught.value))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(sp.ConfigError) as caught:
        sp.resume(root, policy, optimizer, schedule, keep_settings=True)
    return [*said, str(caught.value)]


def test_state_of_another_optimizer_is_refused(tmp_path):
    for resumed, saved, kept in run_ranks(2, resume_as_another, tmp_path):
        assert resumed.startswith("E407") and "has no such state" in resumed
        assert saved.startswith("E408") and "'more'" in saved and "declares" in saved
        assert "ConstantLR" in kept


def test_recipes_know_the_optimizers():
    assert settings.OPTIMIZERS == optim.OPTIMIZERS
