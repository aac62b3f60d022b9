"""What each host has is listed at the start, noted in run.json, and warned of where it is little or odd."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
import torch.distributed as dist

from shardproof.config.load import from_json
from shardproof.dist.launch import init_distributed
from shardproof.dist.traffic import traffic
from shardproof.rl import host_facts
from shardproof.rl.agreement import agree_on
from shardproof.rl.host_facts import host_table, host_warnings
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import RECIPES, run_recipe, small_recipe
from tests.several_hosts import pretend_hosts

pytestmark = pytest.mark.distributed

GIB = 2**30
HOST = {
    "name": "a", "ranks": [0, 1, 2, 3], "devices": "4 x NVIDIA H200", "cores": 64, "memory_bytes": 512 * GIB,
    "memory_free_bytes": 400 * GIB, "disk_bytes": 1000 * GIB, "disk_free_bytes": 700 * GIB, "clock_s": 0.0,
}  # fmt: skip


def test_hosts_are_listed():
    other = {**HOST, "name": "node-b", "ranks": [4, 6], "memory_free_bytes": None, "clock_s": -0.26}
    assert host_table([HOST, other]).splitlines() == [
        "2 hosts:",
        "  host    ranks  devices          cores  free memory  free disk  clock",
        "  a       0-3    4 x NVIDIA H200  64     400.0 GiB    700.0 GiB  +0.0 s",
        "  node-b  4, 6   4 x NVIDIA H200  64     unknown      700.0 GiB  -0.3 s",
    ]
    assert host_warnings([HOST, other]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clock_s": -6.25}, "the clock of host b is 6.2 s behind that of host a"),
        ({"memory_free_bytes": GIB}, "host b has 1.0 GiB of memory free for 4 ranks; host a has 400.0 GiB."),
        (
            {"disk_free_bytes": 2 * GIB},
            "host b has 2.0 GiB free on the disk of output.folder; host a has 700.0",
        ),
        ({"devices": "4 x NVIDIA A100"}, "host b has 4 x NVIDIA A100, host a has 4 x NVIDIA H200"),
    ],
)
def test_what_is_odd_is_warned_of_with_both_hosts_and_a_remedy(changes, said):
    (warning,) = host_warnings([HOST, {**HOST, "name": "b", **changes}])
    assert warning.startswith(said) and " Fix: " in warning


def test_a_small_disk_that_is_empty_is_no_reason_to_warn():
    assert host_warnings([HOST, {**HOST, "disk_bytes": GIB, "disk_free_bytes": GIB}]) == []


class Kept(logging.Handler):
    """What was logged."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append((record.levelname, record.getMessage()))


def run_with_clock(recipe, letters):
    """A run in which the last rank's clock is ahead; what this rank logged of hosts."""
    kept, logger = Kept(), logging.getLogger("shardproof.rl.agreement")
    real = host_facts.time.time_ns
    ahead = 90 * 10**9 if dist.get_rank() == dist.get_world_size() - 1 else 0
    with pytest.MonkeyPatch.context() as patch, pretend_hosts(letters):
        patch.setattr(host_facts.time, "time_ns", lambda: real() + ahead)
        logger.setLevel(logging.INFO)
        logger.addHandler(kept)
        try:
            run_recipe(recipe)
        finally:
            logger.removeHandler(kept)
            logger.setLevel(logging.NOTSET)
    return kept.said


def test_a_run_on_several_hosts_lists_them_and_notes_them(tmp_path):
    words = ("train.steps=1", "output.eval_every=0", "output.save_model=false")
    said = run_ranks(3, run_with_clock, small_recipe(tmp_path, *words), "aab")[0]
    table = next(text for level, text in said if level == "INFO")
    assert table.startswith("2 hosts:\n") and "host-a  0, 1" in table and "host-b  2" in table
    assert any(level == "WARNING" and text.startswith("the clock of host host-b is ") for level, text in said)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["nodes"] == 2 and [host["name"] for host in facts["hosts"]] == ["host-a", "host-b"]
    assert 60 < facts["hosts"][1]["clock_s"] < 120


def count_messages(recipe, letters):
    with pretend_hosts(letters):
        init_distributed()
        before = traffic.messages
        hosts = agree_on(from_json(recipe))
        return traffic.messages - before, len(hosts)


def test_ranks_that_agree_send_one_message_and_on_several_hosts_two(tmp_path):
    recipe = small_recipe(tmp_path)
    assert run_ranks(2, count_messages, recipe, "aa") == [(1, 0), (1, 0)]
    assert run_ranks(4, count_messages, recipe, "aabb") == [(2, 2)] * 4


def agree_on_own(recipes, letters):
    with pretend_hosts(letters):
        agree_on(from_json(recipes[dist.get_rank()]))


def test_another_tokenizer_on_a_host_is_named_and_none_at_all_is_not(tmp_path):
    model = RECIPES / "tiny" / "model"
    other = shutil.copytree(model, tmp_path / "other")
    recipes = [small_recipe(tmp_path / "run", f"model.path={path}") for path in (model, model, other)]
    run_ranks(3, agree_on_own, recipes, "aab")
    (other / "tokenizer.json").write_text("{}")
    for _, kind, message in run_ranks_outcomes(3, agree_on_own, recipes, "aab"):
        assert (
            kind == "ConfigError"
            and "the same tokenizer: tokenizer.json is sha256 44136fa355b3 on host " in message
        )
        assert "host-b (rank 2), sha256 " in message and "on host host-a (ranks 0, 1)." in message
        assert "give every host the same tokenizer files" in message
    for path in other.glob("*"):
        path.unlink()
    run_ranks(3, agree_on_own, recipes, "aab")


def agree_with_device(recipe, letters, capabilities):
    """Ranks whose GPUs are of several kinds."""
    with pytest.MonkeyPatch.context() as patch, pretend_hosts(letters):
        from shardproof.rl import agreement

        patch.setattr(agreement, "default_device", lambda: torch.device("cuda", 0))
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[dist.get_rank()])
        agree_on(from_json(recipe))


def test_devices_that_compute_in_other_dtypes_are_refused(tmp_path):
    recipe = small_recipe(tmp_path)
    run_ranks(2, agree_with_device, recipe, "ab", [(9, 0), (8, 9)])
    for _, kind, message in run_ranks_outcomes(2, agree_with_device, recipe, "ab", [(9, 0), (7, 5)]):
        assert kind == "ConfigError"
        said = "the same devices: dtypes is float32, float16 on host host-b (rank 1), float32, float16, bfloat16, float8 on"
        assert said in message
