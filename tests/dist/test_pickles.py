"""Ranks unpickle nothing that came over the network: a pickle runs the code of whoever wrote it."""

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.rl.runs import lines, run_recipe, small_recipe

pytestmark = pytest.mark.distributed

_watching: set[str] | None = None
_hooked = False


def _note(depth: int) -> None:
    """Remember who unpickles: the nearest caller outside of pickle itself."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_globals["__name__"] in ("pickle", __name__):
        frame = frame.f_back
    if _watching is not None:
        _watching.add(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")


def _hook(event: str, _: object) -> None:
    if event == "pickle.find_class" and _watching is not None:  # Python's own: no unpickler can avoid it
        _note(2)


def _noting(original):
    def noting(*args, **settings):
        _note(2)
        return original(*args, **settings)

    return noting


@contextmanager
def unpicklers() -> Iterator[set[str]]:
    """The functions that unpickle something inside the block, in whatever way they came to the unpickler."""
    global _watching, _hooked
    if not _hooked:  # it cannot be taken back
        sys.addaudithook(_hook)
        _hooked = True
    ways = [pickle.loads, pickle.load, pickle.Unpickler, torch.load]
    _watching = set()
    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            # multiprocessing has one as an attribute of a class
            classes = [each for each in list(vars(module).values()) if isinstance(each, type)]
            for place in [module, *classes]:
                for name, value in list(vars(place).items()):
                    if any(value is way for way in ways):
                        patch.setattr(place, name, _noting(value))
        try:
            yield _watching
        finally:
            _watching = None


def train_and_list(recipes):
    with unpicklers() as found:
        for recipe in recipes:
            run_recipe(recipe)
    return sorted(found)


def test_a_run_unpickles_nothing(tmp_path):
    """Load, attest, train, save, resume and export, with both strategies; rewards of its own workers come by pipe."""
    runs = [("train.steps=1", "model.strategy=fsdp1"), ("model.strategy=fsdp2",)]
    recipes = [small_recipe(tmp_path, "output.save_every=1", "output.eval_every=0", *each) for each in runs]
    assert run_ranks(2, train_and_list, recipes) == [[], []]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def gather_objects():
    with unpicklers() as found:
        mine, received = {"rank": dist.get_rank()}, [None, None]
        dist.all_gather_object(received, mine)
        pickle.loads(pickle.dumps(os.path.join))
    return sorted(found)


def test_what_torch_unpickles_from_other_ranks_would_be_seen():
    for found in run_ranks(2, gather_objects):
        assert "torch.distributed.distributed_c10d._tensor_to_object" in found and len(found) == 2
