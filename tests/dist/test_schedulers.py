"""What SLURM's and Kubernetes operators' variables say about the hosts of a run."""

from __future__ import annotations

import socket

import pytest

from shardproof.cli.options import Options, with_scheduler
from shardproof.dist.schedulers import Places, expand_hostlist, find_places
from shardproof.errors import ConfigError

# As `srun --nodes 2 --ntasks-per-node 1` sets them on the second node.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07,12]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07,12]",
}


def test_one_task_per_node_meets_on_the_first_node_of_the_step():
    assert find_places(STEP) == Places("2", "gpu07:24711", "SLURM")
    part = {**STEP, "SLURM_JOB_NUM_NODES": "8", "SLURM_JOB_NODELIST": "gpu[01-08]"}
    assert find_places(part) == Places("2", "gpu07:24711", "SLURM"), (
        "a step may have fewer nodes than its job"
    )


def test_a_step_on_one_node_runs_alone():
    one = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_places(one).nnodes == "1"


def test_several_tasks_on_a_node_are_refused_with_what_to_do():
    many = {**STEP, "SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "16"}
    with pytest.raises(
        ConfigError, match="srun started 16 tasks on 2 nodes; each would train by itself"
    ) as caught:
        find_places(many)
    assert "srun --ntasks-per-node=1 shardproof train" in str(caught.value)


def test_a_batch_script_without_srun_uses_one_node_and_says_so():
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    places = find_places(batch)
    assert places.nnodes is None and places.warning == (
        "this job has 2 nodes, but the command was not started by srun: it uses one node"
    )
    assert find_places({**batch, "SLURM_JOB_NUM_NODES": "1"}) == Places()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[09-10]-ib", ["r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"]),
        ("", []),
    ],
)
def test_lists_of_hosts(text, names):
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text", ["gpu[1-", "gpu]1[", "gpu[a-b]", "gpu[9-1]", "gpu[1-999999999]", "rack[1-300]gpu[1-300]"]
)
def test_lists_that_cannot_be_read_are_refused(text):
    with pytest.raises(ConfigError, match="cannot be read"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("variables", "places"),
    [
        ({"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "job-master-0:29400"}, ("2:4", "job-master-0:29400")),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "job-master-0"}, ("2", "job-master-0:29500")),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "1", "RANK": "1"}, ("2", "m:1")),
        ({"MASTER_ADDR": "m", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "0"}, ("3", "m:23456")),
        ({"MASTER_ADDR": "localhost", "WORLD_SIZE": "3"}, ("3", f"{socket.gethostname()}:29500")),
        ({"MASTER_ADDR": "m"}, (None, None)),
        ({"WORLD_SIZE": "3"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_what_operators_of_kubernetes_set(variables, places):
    found = find_places(variables)
    assert (found.nnodes, found.endpoint) == places


def test_options_come_before_variables(monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    found = with_scheduler(Options(), None)
    assert (found.nnodes, found.rdzv_endpoint) == ("2", "gpu07:24711")
    found = with_scheduler(Options(rdzv_endpoint="login:1"), "1:2")
    assert (found.nnodes, found.rdzv_endpoint) == ("1:2", "login:1")
    assert with_scheduler(Options(), "1:2").rdzv_endpoint == "gpu07:24711"
    assert with_scheduler(Options(), "1") == Options(), "every task trains by itself, on purpose"
    assert with_scheduler(Options(on="ray"), None) == Options(on="ray")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert with_scheduler(Options(), None) == Options(), "torchrun has decided"
