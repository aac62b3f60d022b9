"""Launches that skip Triton's look at the arguments: only where the kernel that was compiled for them is the same."""

import pytest
import torch

from shardproof.rollout.paged import launching


class Kernel:
    """Stands in for a Triton kernel, and for what it compiles: both note how they were launched."""

    def __init__(self, error=None):
        self.seen = []
        self.compiled = _Compiled(self.seen, error)

    def __getitem__(self, grid):
        def run(*args, **others):
            self.seen.append(("triton", grid))
            return self.compiled

        return run


class _Compiled:
    def __init__(self, seen, error):
        self.seen, self.error = seen, error

    def __getitem__(self, grid):
        def run(*args):
            if self.error is not None:
                raise self.error
            self.seen.append(("compiled", grid, args[-1]))

        return run


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching._Trust, "holds", True)


def test_a_kernel_is_looked_up_once_for_arguments_of_one_kind():
    kernel, x = Kernel(), torch.zeros(64)
    launching.launch(kernel, (3, 1), (x, 32, 0.5), {"BLOCK": 8}, num_warps=4)
    launching.launch(kernel, (5, 2), (x, 48, 0.7), {"BLOCK": 8}, num_warps=4)
    assert kernel.seen == [("triton", (3, 1)), ("compiled", (5, 2, 1), 8)]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((torch.zeros(64)[1:], 32, 0.5), {"BLOCK": 8}),  # not aligned
        ((torch.zeros(64, dtype=torch.float16), 32, 0.5), {"BLOCK": 8}),
        ((torch.zeros(64), 33, 0.5), {"BLOCK": 8}),
        ((torch.zeros(64), 1, 0.5), {"BLOCK": 8}),
        ((torch.zeros(64), 2**31, 0.5), {"BLOCK": 8}),
        ((torch.zeros(64), 32, 0.5), {"BLOCK": 16}),
    ],
)
def test_what_triton_compiles_anew_goes_through_triton(args, constants):
    kernel = Kernel()
    launching.launch(kernel, (3, 1), (torch.zeros(64), 32, 0.5), {"BLOCK": 8})
    launching.launch(kernel, (3, 1), args, constants)
    assert [how for how, *_ in kernel.seen] == ["triton", "triton"]


def test_another_interface_of_triton_is_found_out():
    kernel, x = Kernel(TypeError("function takes 9 arguments")), torch.zeros(64)
    for _ in range(3):
        launching.launch(kernel, (3, 1), (x,), {"BLOCK": 8})
    assert [how for how, *_ in kernel.seen] == ["triton"] * 3
