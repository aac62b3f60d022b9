"""Kernels are compiled ahead, each once, and what goes wrong is left to the first launch."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from shardproof.rollout.paged.compiling import Compiling


class Kernel:
    """As one of Triton's: a launch asks the hook about what is not compiled, and goes on without it."""

    def __init__(self, knobs, broken=False):
        self.knobs, self.broken = knobs, broken
        self.compiled, self.launched = [], []

    def __call__(self, data):
        if data not in self.compiled:
            facts = {"fn": SimpleNamespace(jit_function=self), "compile": {"specialization_data": data}}
            assert self.knobs.runtime.jit_cache_hook(**facts, key="", repr="", already_compiled=False)
            return
        self.launched.append(data)

    def preload(self, data):
        if self.broken:
            raise RuntimeError("no such instruction")
        self.compiled.append(data)


def test_each_missing_kernel_is_compiled_once_and_none_is_launched_before(monkeypatch):
    knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    good, bad = Kernel(knobs), Kernel(knobs, broken=True)

    def fails():
        raise TypeError("it takes something from a kernel that was not launched")

    launches = [
        lambda: good("16 rows"),
        fails,
        lambda: good("32 rows"),
        lambda: good("16 rows"),
        lambda: bad("16 rows"),
    ]
    assert Compiling(launches, torch.device("cpu")).wait() == 2
    assert sorted(good.compiled) == ["16 rows", "32 rows"] and good.launched == []
    assert knobs.runtime.jit_cache_hook is None
    assert Compiling([lambda: good("16 rows")], torch.device("cpu")).wait() == 0
    assert good.launched == ["16 rows"]


def test_without_triton_or_with_another_one_nothing_is_compiled_ahead(monkeypatch):
    for module in (None, SimpleNamespace()):
        monkeypatch.setitem(sys.modules, "triton", module)
        assert Compiling([lambda: None], torch.device("cpu")).wait() == 0
