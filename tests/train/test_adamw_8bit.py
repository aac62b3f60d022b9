"""AdamW with means in 8 bits: its numbers and tables, layouts, memory, checkpoints, and how it learns."""

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.checkpoints.ranges import Chunk, SavedTensor, files_to_read
from shardproof.rl.sizing.model import Sharding, held_bytes, shape_of
from shardproof.shard.local import LocalShard
from shardproof.shard.optimizer_state import blocks_of, state_bytes
from shardproof.train.adamw_8bit import MEAN, MEAN_SCALE, SQUARE, SQUARE_SCALE
from shardproof.train.moments_8bit import BLOCK, codes_of, num_blocks, tables, values_of
from shardproof.train.optim import Trainable, build_optimizer
from tests.models import tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise

CPU = torch.device("cpu")
CONFIG = tiny_config("llama")
CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.head_dim = (
    72,
    100,
    18,
)  # rows that are no multiple of a block
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6]]


def test_the_tables_are_the_published_ones():
    """Seven decades; the bits that the exponent leaves divide [0.1, 1], whose middles are the numbers."""
    for signed, smallest in ((True, 5.5e-7), (False, 3.25e-7)):
        code, borders = tables(signed, CPU)
        assert len(code) == 256 and len(borders) == 255 and bool((code[1:] > code[:-1]).all())
        assert float(code[-1]) == 1.0 and 0.0 in code.tolist()
        assert float(code[code > 0].min()) == pytest.approx(smallest)
        last = np.linspace(0.1, 1, 65 if signed else 129)
        middles = (last[1:] + last[:-1]) / 2
        assert np.allclose(code[code > 0.1][:-1], middles, atol=1e-6)
    assert float(tables(True, CPU)[0][0]) == pytest.approx(-0.99296875)


def test_rounding_is_to_the_nearest_and_a_mean_of_squares_never_to_zero():
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(4, BLOCK, generator=draw)
    scales = values.abs().amax(1)
    code, _ = tables(True, CPU)
    rows = values / scales[:, None]
    nearest = (rows[..., None] - code).abs().min(-1).values
    found = values_of(codes_of(rows, True).view(-1), scales, 0, True).view(4, -1)
    assert torch.allclose((found - values).abs(), nearest * scales[:, None], atol=1e-6)
    tiny = torch.full((1, BLOCK), 1e-9)
    tiny[0, 0] = 1.0
    assert bool((values_of(codes_of(tiny, False).view(-1), torch.ones(1), 0, False) > 0).all())
    assert not codes_of(torch.zeros(1, BLOCK), False).any()


def quadratic(kind, seed, size=20_000, steps=60):
    """Weights after some steps towards a target, and the target."""
    draw = torch.Generator().manual_seed(seed)
    target = torch.randn(size, generator=draw)
    scale = torch.rand(size, generator=draw) + 0.1
    param = torch.nn.Parameter(torch.zeros(size))
    trained = [Trainable(param, (size,), 0, False)]
    optimizer = build_optimizer(kind, trained, None, CPU, lr=3e-2, betas=(0.9, 0.95))
    for _ in range(steps):
        noise = 0.3 * torch.randn(size, generator=draw)
        param.grad = scale * (param.detach() - target) + noise
        optimizer.step()
    return param.detach(), target


@pytest.mark.parametrize("seed", [0, 1])
def test_it_goes_where_adamw_goes(seed):
    (ours, target), (plain, _) = quadratic("adamw_8bit", seed), quadratic("adamw", seed)
    apart, moved = (ours - plain).norm(), plain.norm()
    assert float(apart / moved) < 0.03
    losses = [float((each - target).square().mean()) for each in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=0.03)


def test_no_step_explodes_where_gradients_stop():
    """A row of small gradients beside large ones, and then none: a mean of squares of 0 would divide by eps alone."""
    param = torch.nn.Parameter(torch.zeros(2 * 4096))
    optimizer = build_optimizer("adamw_8bit", [Trainable(param, (2, 4096), 0, False)], None, CPU, lr=1e-2)
    for index in range(8):
        grad = torch.full((2 * 4096,), 2e-4 if index < 4 else 0.0)
        grad[::BLOCK] = 1.0
        param.grad = grad
        optimizer.step()
    assert float(param.detach().abs().max()) < 0.2


def train(policy, optimizer, steps):
    for _ in range(steps):
        assert sp.train_step(policy, sp.Batch(SEQUENCES), optimizer).stepped


def whole(policy):
    return {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().tolist()
        for name, param in policy.named_parameters()
    }


def steps_and_save(settings, folder, steps):
    policy = sp.load(sp.RandomInit(CONFIG, seed=0), compute_dtype=torch.float32, **settings)
    optimizer = sp.make_optimizer(policy, lr=1e-2, weight_decay=0.1, eps=1e-4, name="adamw_8bit")
    train(policy, optimizer, steps)
    if folder is not None:
        sp.save_checkpoint(folder, policy, optimizer)
        train(policy, optimizer, 2)
    held = sum(
        (value.to_local() if hasattr(value, "to_local") else value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return export(policy), held, state_bytes(optimizer), sp.attest(policy, optimizer)


def export(policy):
    return {name: tensor.tolist() for name, tensor in sp.WeightStream(policy, torch.float32)}


def go_on(settings, folder):
    policy = sp.load(sp.RandomInit(CONFIG, seed=0), compute_dtype=torch.float32, **settings)
    optimizer = sp.make_optimizer(policy, lr=1e-2, weight_decay=0.1, eps=1e-4, name="adamw_8bit")
    sp.resume(folder, policy, optimizer)
    shapes = {
        key: tuple(value.shape) if isinstance(value, torch.Tensor) else value
        for key, value in optimizer.state[next(policy.parameters())].items()
    }
    train(policy, optimizer, 2)
    return export(policy), shapes


def close(one, other, share=2e-3):
    """Gradients are summed in another order, which may round some means to a neighbour: few weights differ."""
    for name, values in one.items():
        mine, theirs = torch.tensor(values), torch.tensor(other[name])
        off = (mine - theirs).abs() > 1e-4
        assert float(off.float().mean()) <= share, (name, float(off.float().mean()))
        assert torch.allclose(mine, theirs, atol=4e-3)


@pytest.mark.distributed
def test_layouts_agree_and_a_checkpoint_of_two_ranks_goes_on_on_one(tmp_path):
    alone, held, declared, findings = run_ranks(1, steps_and_save, {}, tmp_path / "alone", 3)[0]
    elements = 2 * 101 * 72 + 2 * (2 * 72 * 72 + 3 * 100 * 72)  # of large tensors
    small = 2 * 2 * 36 * 72 + 5 * 72
    scales = held - 2 * elements - 2 * 4 * small
    assert findings == [] and held == declared
    assert scales == pytest.approx(2 * 4 * elements / BLOCK, rel=0.05)
    two = run_ranks(2, steps_and_save, {}, tmp_path / "two", 3)
    close(alone, two[0][0])
    fsdp1 = run_ranks(2, steps_and_save, {"strategy": "fsdp1"}, tmp_path / "fsdp1", 3)
    close(alone, fsdp1[0][0])
    for folder in ("two", "fsdp1"):
        found, shapes = run_ranks(1, go_on, {}, tmp_path / folder)[0]
        close(found, two[0][0] if folder == "two" else fsdp1[0][0])
        assert shapes == {
            MEAN: (101, 72), SQUARE: (101, 72), MEAN_SCALE: (29,), SQUARE_SCALE: (29,), "step": 3,
        }  # fmt: skip
    again, _ = run_ranks(2, go_on, {}, tmp_path / "two")[0]
    assert again == two[0][0]  # bit for bit
    shape = shape_of(CONFIG, "policy", torch.float32)
    estimated = held_bytes(shape, Sharding(optimizer="adamw_8bit"), 1).optimizer
    assert held <= estimated <= 1.01 * held


def resume_as_adamw(folder):
    policy = sp.load(sp.RandomInit(CONFIG, seed=0), compute_dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, lr=1e-2, name="adamw_8bit")
    train(policy, optimizer, 1)
    sp.save_checkpoint(folder, policy, optimizer)
    sp.resume(folder, policy, sp.make_optimizer(policy, lr=1e-2))


@pytest.mark.distributed
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    outcomes = run_ranks_outcomes(1, resume_as_adamw, tmp_path)
    assert_all_raise(outcomes, "E407", "torch.uint8 in the checkpoint", "optimizer.name", kind="ExportFault")


def test_blocks_of_a_range():
    assert [num_blocks(*each) for each in ((0, 256), (0, 257), (255, 257), (3, 3), (300, 400))] == [
        1,
        2,
        2,
        0,
        1,
    ]


def test_a_rank_reads_the_files_that_hold_its_blocks():
    def saved(dtype, *chunks):
        rows = [Chunk(((start, stop),), file, 0) for start, stop, file in chunks]
        return SavedTensor(dtype, chunks[-1][1], rows)

    files = {
        "model.w": saved(torch.float32, (0, 500, "rank-0.bin"), (500, 1000, "rank-1.bin")),
        "optim.w.exp_avg": saved(torch.uint8, (0, 500, "rank-0.bin"), (500, 1000, "rank-1.bin")),
        "optim.w.exp_avg_scale": saved(torch.float32, (0, 2, "rank-0.bin"), (2, 4, "rank-1.bin")),
    }
    for start, stop, expected in ((0, 500, {0}), (520, 1000, {1}), (505, 600, {0, 1}), (7, 7, set())):
        mine = LocalShard.of_range("w", (1000,), start, stop, torch.zeros(stop - start))
        assert files_to_read({"model.w": mine}, files) == {f"rank-{rank}.bin" for rank in expected}
        blocks = blocks_of(mine, torch.arange(num_blocks(start, stop)), owned=True)
        owned = [block for block in range(4) if start <= block * BLOCK < stop]
        assert list(range(*blocks.flat_range)) == owned and len(blocks.flat) == len(owned)
