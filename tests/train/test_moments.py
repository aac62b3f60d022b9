"""AdamW with running means in bfloat16: unbiased, as good as float32, and the same bits however it is sharded."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn

import shardproof as sp
from shardproof.config import optimizer as settings
from shardproof.shard.optimizer_state import state_bytes
from shardproof.train.moments import random_bits, round_at_random
from shardproof.train.optim import Trainable, build_optimizer
from shardproof.train.rounded_adamw import Place, RoundedAdamW
from tests.models import make_checkpoint
from tests.ranks import RankError, run_ranks
from tests.train.test_muon import SEQUENCES, go_on, train_and_save, whole

CPU = torch.device("cpu")
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}


def rounded(params, places=None, **options):
    places = places or {param: Place(number, 0) for number, param in enumerate(params)}
    return RoundedAdamW([{"params": params}], places, **(OPTIONS | options))


def test_rounding_is_right_on_average_and_never_off_by_more_than_a_step():
    values = torch.tensor([1.0, 1.001, -1.0039, 3e-30, 0.0, -7.77e20]).repeat_interleave(20_000)
    found = round_at_random(values, random_bits(0, values.numel(), 1234, CPU) & 0xFFFF).float()
    step = torch.exp2(torch.floor(torch.log2(values.abs().clamp(min=1e-37)))) * 2**-7
    assert ((found - values).abs() < step).all()
    means = found.double().view(6, -1).mean(1)
    assert torch.allclose(means, values.view(6, -1)[:, 0].double(), rtol=1e-4, atol=0)
    assert (found.view(6, -1)[0] == 1.0).all() and (found.view(6, -1)[4] == 0.0).all()


def test_bits_depend_on_step_parameter_and_element_alone():
    some = random_bits(2**33 - 5, 1000, 77, CPU)
    assert torch.equal(some[400:], random_bits(2**33 + 395, 600, 77, CPU))
    assert (some == random_bits(2**33 - 5, 1000, 78, CPU)).float().mean() < 0.01
    assert (some == random_bits(-5, 1000, 77, CPU)).float().mean() < 0.01
    halves = torch.stack([some & 0xFFFF, (some >> 16) & 0xFFFF]).double().mean(1)
    assert ((halves - 2**15).abs() < 2000).all()


def test_small_changes_of_a_mean_are_not_lost():
    """With beta 0.999 every single change of the second mean is below half a step of bfloat16."""
    weights = nn.Parameter(torch.zeros(4000))
    optimizer = rounded([weights])
    optimizer.state[weights] |= {
        "exp_avg": torch.zeros(4000, dtype=torch.bfloat16),
        "exp_avg_sq": torch.full((4000,), 1.0, dtype=torch.bfloat16),
        "step": 1000,
    }
    for _ in range(300):
        weights.grad = torch.full((4000,), 1.2)
        optimizer.step()
    expected = 1.44 + (1 - 1.44) * 0.999**300
    assert abs(optimizer.state[weights]["exp_avg_sq"].double().mean() - expected) < 2e-3


def test_shards_get_the_bits_of_the_whole():
    torch.manual_seed(0)
    start = torch.randn(700_001)
    parts = [0, 1, 262_144, 300_000, 700_001]
    everything, *pieces = (nn.Parameter(part.clone()) for part in (start, *start.split(_sizes(parts))))
    optimizers = [rounded([everything])]
    optimizers += [rounded([p], {p: Place(0, at)}) for p, at in zip(pieces, parts, strict=False)]
    for _ in range(3):
        everything.grad = torch.randn_like(everything)
        for piece, grad in zip(pieces, everything.grad.split(_sizes(parts)), strict=True):
            piece.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(everything, torch.cat(pieces))
    for key in ("exp_avg", "exp_avg_sq"):
        found = [o.state[p][key] for o, p in zip(optimizers, (everything, *pieces), strict=True)]
        assert found[0].dtype == torch.bfloat16 and torch.equal(found[0], torch.cat(found[1:]))


def _sizes(bounds):
    return [high - low for low, high in pairwise(bounds)]


def test_it_learns_as_well_as_float32():
    """A regression with noise: the loss falls as with torch's AdamW, and the weights end up as close."""
    losses = {}
    for kind in ("float32", "bfloat16"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        target = torch.randn(16, 1)
        trained = [Trainable(p, tuple(p.shape), 0, False) for p in model.parameters()]
        optimizer = build_optimizer("adamw", trained, None, CPU, lr=3e-3, weight_decay=0.01, moments=kind)
        row = []
        for _ in range(400):
            x = torch.randn(32, 16)
            loss = (model(x) - x @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            row.append(loss.item())
        losses[kind] = row
    first, last = (
        {kind: sum(row[part]) for kind, row in losses.items()} for part in (slice(9), slice(-50, None))
    )
    assert last["float32"] < first["float32"] / 5
    assert abs(last["bfloat16"] / last["float32"] - 1) < 0.1


def test_other_optimizers_refuse_it_by_name():
    trained = [Trainable(nn.Parameter(torch.zeros(2, 2)), (2, 2), 0, True)]
    for name in ("muon", "torch.optim:SGD"):
        with pytest.raises(
            sp.ConfigError, match=f"moments='bfloat16' is only for name='adamw', not for '{name}'"
        ):
            build_optimizer(name, trained, None, CPU, moments="bfloat16")
        with pytest.raises(ValueError, match="moments='bfloat16' is only for name='adamw'"):
            settings.Optimizer(name=name, moments="bfloat16")
    with pytest.raises(sp.ConfigError, match="moments='float16'"):
        build_optimizer("adamw", trained, None, CPU, moments="float16")
    assert "moments" not in settings.Optimizer().arguments
    assert settings.Optimizer(moments="bfloat16").arguments["moments"] == "bfloat16"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_a_resumed_run_goes_on_with_the_same_bits(source, tmp_path, strategy):
    options = {"moments": "bfloat16"}
    ran = run_ranks(2, train_and_save, source, tmp_path, "adamw", strategy, options, 2)
    again = run_ranks(2, go_on, source, tmp_path, "adamw", strategy, options, 2)
    for (losses, weights), (more, others) in zip(ran, again, strict=True):
        assert losses == more
        assert all(torch.equal(weights[name], others[name]) for name in weights)
    others = run_ranks(1, go_on, source, tmp_path, "adamw", strategy, options, 2)
    assert others[0][0] == pytest.approx(ran[0][0], rel=1e-5)
    with pytest.raises(RankError, match=r"E407.*is torch.bfloat16 in the checkpoint.*float32"):
        run_ranks(1, go_on, source, tmp_path, "adamw", strategy, {}, 2)


def train(source, moments):
    policy = sp.load(source, compute_dtype=torch.float32, lora=LoraConfig(r=2, target_modules="all-linear"))
    optimizer = sp.make_optimizer(policy, 1e-3, moments=moments)
    batch = sp.Batch(SEQUENCES[dist.get_rank() :: dist.get_world_size()])
    for _ in range(3):
        assert sp.train_step(policy, batch, optimizer).stepped
    held = sum(
        state[key].to_local().nbytes
        for state in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    )
    return whole(policy), held, state_bytes(optimizer)


@pytest.mark.distributed
def test_adapters_train_with_half_the_memory(source):
    wide, narrow = (run_ranks(2, train, source, moments)[0] for moments in ("float32", "bfloat16"))
    assert 2 * narrow[1] == wide[1] and narrow[1:2] == narrow[2:]
    moved = max((narrow[0][name] - wide[0][name]).abs().max() for name in wide[0])
    assert 0 < moved < 1e-4
