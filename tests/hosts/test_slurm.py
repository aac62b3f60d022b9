"""`srun` with one task per node: the hosts find each other by SLURM's variables, and a warning before the end is a stop."""

from __future__ import annotations

import re
import signal

import pytest

from tests.hosts.cluster import Cluster, Program, tiny_run

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

_LIMIT_S = 300


def srun(cluster: Cluster, *words: str, tasks_per_node: int = 1) -> list[Program]:
    """What srun does: the same command on every node, which knows nothing but SLURM's variables and the job's secret."""
    names, num = ",".join(host.name for host in cluster.hosts), len(cluster.hosts)
    env = {
        "SHARDPROOF_RDZV_ID": cluster.secret,
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": str(num),
        "SLURM_JOB_NODELIST": names,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": str(num),
        "SLURM_STEP_NUM_TASKS": str(num * tasks_per_node),
        "SLURM_STEP_NODELIST": names,
    }
    return [
        host.start("shardproof", "train", *words, env={**env, "SLURM_NODEID": str(number)})
        for number, host in enumerate(cluster.hosts)
    ]


def test_a_job_is_one_run_and_is_queued_again_before_its_time_is_over(two_hosts: Cluster) -> None:
    assert two_hosts.shared is not None
    recipe = str(tiny_run(two_hosts.shared, steps=1000))
    first = srun(two_hosts, recipe)
    first[0].wait_for("step 2/")
    assert "SLURM: this run has 2 hosts, which meet at a:24711" in first[0].output()
    for program in first:  # to every process of the tasks: which ones get it depends on SLURM's settings
        for process in [program.process, *program.ranks()]:
            assert process is not None
            process.send_signal(signal.SIGUSR1)
    assert [program.wait(_LIMIT_S) for program in first] == [128 + signal.SIGUSR1] * 2
    found = re.search(r"Stopped after step (\d+)\. Last checkpoint", first[1].output())
    assert found is not None
    last = int(found[1])
    again = srun(two_hosts, recipe, f"train.steps={last + 1}")
    assert [program.wait(_LIMIT_S) for program in again] == [0, 0]
    assert f"resuming from the checkpoint of step {last}" in again[0].output()


def test_several_tasks_on_a_node_are_refused_on_every_one(two_hosts: Cluster) -> None:
    assert two_hosts.shared is not None
    programs = srun(two_hosts, str(tiny_run(two_hosts.shared)), tasks_per_node=2)
    assert [program.wait(_LIMIT_S) for program in programs] == [2, 2]
    assert "srun started 4 tasks on 2 nodes; each would train by itself" in programs[1].output()
    assert not (two_hosts.shared / "run").exists()
