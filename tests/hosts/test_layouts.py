"""Every layout on several hosts, with the documented commands, to the same bits as on one host with as many ranks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts.cluster import DISK, PORT, Cluster, Program, tiny_run
from tests.rl.runs import numbers, trajectory

_LIMIT_S = 300  # for a run of seconds: nothing here is about time

pytestmark = [pytest.mark.invariant, pytest.mark.slow]


def finish(programs: Sequence[Program]) -> None:
    """Wait until they have ended, and none of them with an error."""
    codes = {str(program.host): program.wait(_LIMIT_S) for program in programs}
    assert set(codes.values()) == {0}, f"exit codes {codes}"


def both_ways(cluster: Cluster, recipe: Path, *words: str, ranks: Sequence[int]) -> tuple[Path, Path]:
    """The folders of two runs that are made at the same time: over the hosts, and on the first of them alone."""
    apart, alone = recipe.parent / "apart", recipe.parent / "alone"
    one = cluster.hosts[0].start(
        "shardproof", "train", str(recipe), *words, f"train.ranks={sum(ranks)}", f"output.folder={alone}"
    )
    hosts = cluster.hosts[: len(ranks)]
    many = cluster.train(recipe, *words, f"output.folder={apart}", ranks=ranks, hosts=hosts)
    finish([one, *many])
    return apart, alone


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["model.strategy=fsdp1"], id="fsdp1"),
        pytest.param(["model.sequence_parallel=2", "rollout.engine=sharded"], id="sequences"),
    ],
)
def test_a_rank_on_each_of_two_hosts(two_hosts: Cluster, words: list[str]) -> None:
    """Here a host's own name means 127.0.1.1 to itself, as in all of these tests."""
    assert two_hosts.shared is not None
    apart, alone = both_ways(two_hosts, tiny_run(two_hosts.shared), *words, ranks=[1, 1])
    assert numbers(apart) == numbers(alone) and len(trajectory(apart)) == 2


def test_replicas_by_host_and_hosts_of_different_size(two_hosts: Cluster) -> None:
    """With 3 ranks and 1 rank a replica lies on both hosts."""
    assert two_hosts.shared is not None
    recipe = tiny_run(two_hosts.shared)
    apart, alone = both_ways(two_hosts, recipe, "model.replicate=2", ranks=[2, 2])
    assert numbers(apart) == numbers(alone)
    uneven = two_hosts.shared / "uneven"
    finish(two_hosts.train(recipe, "model.replicate=2", f"output.folder={uneven}", ranks=[3, 1]))
    assert numbers(uneven) == numbers(alone)


def test_three_hosts_of_one_name_and_weights_on_the_first_alone() -> None:
    """As containers are: one image, one hostname. Nothing but the address of the first host tells them apart."""
    with Cluster(3, hostnames=["node"] * 3) as cluster:
        assert cluster.shared is not None and cluster.endpoint == f"{cluster.hosts[0].address}:{PORT}"
        recipe = tiny_run(cluster.shared)
        first, second, _ = cluster.hosts  # the third has nothing of the model
        shutil.copytree(cluster.shared / "model", first.folder / "model")
        without_weights = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(cluster.shared / "model", second.folder / "model", ignore=without_weights)
        words = (f"model.path={DISK}/model", "model.replicate=3")
        apart, alone = both_ways(cluster, recipe, *words, ranks=[2, 2, 2])
        assert numbers(apart) == numbers(alone)


def test_a_run_goes_on_with_more_hosts_and_with_fewer() -> None:
    """Two hosts make the first step, three the second, one the third."""
    with Cluster(3) as cluster:
        assert cluster.shared is not None
        recipe = tiny_run(cluster.shared)
        for steps, num_hosts in enumerate((2, 3, 1), start=1):
            apart, alone = both_ways(cluster, recipe, f"train.steps={steps}", ranks=[1] * num_hosts)
            assert numbers(apart) == numbers(alone)
        assert len(trajectory(apart)) == 3


def test_torchrun(two_hosts: Cluster) -> None:
    """The command of docs/multi-node.md, as a scheduler's script calls it."""
    assert two_hosts.shared is not None
    recipe = tiny_run(two_hosts.shared)
    apart, alone = two_hosts.shared / "apart", two_hosts.shared / "alone"
    torchrun = (
        f"torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint a:{PORT} --rdzv-id mine"
    )
    command = f"{torchrun} -m shardproof train {recipe} output.folder={apart}".split()
    one = two_hosts["a"].start("shardproof", "train", str(recipe), "train.ranks=2", f"output.folder={alone}")
    first, second = (host.start(*command) for host in two_hosts.hosts)
    finish([one, first, second])
    assert numbers(apart) == numbers(alone)
    assert ", 2 ranks, 2 steps, " in first.output()  # not train.ranks, which torchrun overrules
