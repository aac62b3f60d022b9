"""The manifests of examples/kubernetes: right by their schemas, and their commands are ones that `shardproof train` takes."""

import copy
import importlib
import os
import shutil
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from shardproof.cli import app
from shardproof.cli.options import UNUSABLE, Options, with_scheduler
from tests.cli.kubernetes.schemas import SCHEMAS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
SECRET = "0123456789abcdef0123456789abcdef"
IN_POD = "/shared"


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def check(document):
    jsonschema.Draft202012Validator(SCHEMAS[document["kind"]]).validate(document)


def jobset_pods():
    """By host name: the pod of each host, with the variables of its container."""
    jobset = documents(FOLDER / "jobset.yaml")[0]
    job = jobset["spec"]["replicatedJobs"][1]
    prefix, spec = f"{jobset['metadata']['name']}-{job['name']}-0", job["template"]["spec"]
    assert job["replicas"] == 1 and spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    return {f"{prefix}-{index}": (spec["template"], {}) for index in range(spec["completions"])}


def pytorchjob_pods():
    """The same, with the variables that the operator sets in a job without an elastic policy."""
    job = documents(FOLDER / "pytorchjob.yaml")[0]
    replicas, name = job["spec"]["pytorchReplicaSpecs"], job["metadata"]["name"]
    total = sum(each["replicas"] for each in replicas.values())
    (port,) = replicas["Master"]["template"]["spec"]["containers"][0]["ports"]
    found = {}
    for kind, each in replicas.items():
        for index in range(each["replicas"]):
            rank = index + (kind == "Worker")
            found[f"{name}-{kind.lower()}-{index}"] = (
                each["template"],
                {
                    "MASTER_ADDR": f"{name}-master-0",
                    "PET_MASTER_ADDR": f"{name}-master-0",
                    "MASTER_PORT": str(port["containerPort"]),
                    "PET_MASTER_PORT": str(port["containerPort"]),
                    "WORLD_SIZE": str(total),
                    "RANK": str(rank),
                    "PET_NODE_RANK": str(rank),
                    "PET_NNODES": str(total),
                    "PYTHONUNBUFFERED": "1",
                },
            )
    return found


PODS = {"jobset.yaml": jobset_pods, "pytorchjob.yaml": pytorchjob_pods}


@pytest.fixture(params=MANIFESTS, ids=lambda path: path.name)
def manifest(request):
    return request.param


@pytest.fixture
def pod(tmp_path, monkeypatch):
    """Sets the variables of a pod, and tells its command with paths of this machine, where the tiny recipe lies."""
    recipe = (ROOT / "recipes" / "tiny.toml").read_text()
    (tmp_path / "recipe.toml").write_text(recipe)
    shutil.copytree(ROOT / "recipes" / "tiny", tmp_path / "tiny")

    def enter(template, variables):
        for name in list(os.environ):
            if name.startswith(("SLURM_", "PET_", "MASTER_", "SHARDPROOF_")) or name in (
                "RANK",
                "WORLD_SIZE",
                "LOCAL_RANK",
            ):
                monkeypatch.delenv(name)
        (container,) = template["spec"]["containers"]
        for variable in container["env"]:
            value = SECRET if "valueFrom" in variable else variable["value"]
            monkeypatch.setenv(variable["name"], value)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        program, *words = container["command"]
        assert program == "shardproof"
        return [word.replace(IN_POD, str(tmp_path)) for word in words]

    return enter


def test_manifests_are_right_by_their_schemas(manifest):
    kinds = [document["kind"] for document in documents(manifest)]
    assert kinds[1:] == ["NetworkPolicy"]
    for document in documents(manifest):
        check(document)


@pytest.mark.fault
def test_schemas_refuse_what_an_api_server_would(manifest):
    for document in documents(manifest):
        for change in (
            lambda it: it["spec"].update(replica=1),
            lambda it: it.pop("spec"),
            lambda it: it["metadata"].update(name="Not_A_Name"),
        ):
            wrong = copy.deepcopy(document)
            change(wrong)
            with pytest.raises(jsonschema.ValidationError):
                check(wrong)


def test_every_pod_parses_its_command_and_the_hosts_meet_at_one_of_them(manifest, pod, monkeypatch):
    """The command is parsed by the real parser and dry-run, with the variables that the pod has."""
    module, taken = importlib.import_module("shardproof.cli.dry_run"), []
    real = module.dry_run
    monkeypatch.setattr(module, "dry_run", lambda *given: taken.append(given[1]) or real(*given))
    pods = PODS[manifest.name]()
    for template, variables in pods.values():
        done = CliRunner().invoke(app, [*pod(template, variables), "train.ranks=2", "--dry-run"])
        assert done.exit_code == 0, done.output
        assert f"{len(pods)} x 2 ranks" in done.output and "nothing is wrong" in done.output
    assert len(taken) == len(pods)
    for options in taken:
        assert options.max_restarts > 0 and options.rdzv_id == SECRET
        assert options.nnodes == str(len(pods))
    (endpoint,) = {options.rdzv_endpoint for options in taken}
    name, _, port = endpoint.partition(":")
    meeting = "shardproof-meeting-0-0.shardproof" if manifest.name == "jobset.yaml" else "shardproof-master-0"
    assert (name, port) == (meeting, "29500")


def test_the_hosts_of_a_jobset_meet_apart_from_them_as_long_as_there_are_hosts(pod):
    spec = documents(FOLDER / "jobset.yaml")[0]["spec"]
    meeting, hosts = spec["replicatedJobs"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [hosts["name"]]}
    words = pod(meeting["template"]["spec"]["template"], {})
    name, *rest = words
    params = get_command(app).commands[name].make_context(name, rest).params
    assert name == "rendezvous" and params["rdzv_id"] == SECRET
    endpoint = f"shardproof-{meeting['name']}-0-0.{spec['network']['subdomain']}:29500"
    assert params["rdzv_endpoint"] == endpoint


def test_a_network_policy_admits_the_pods_of_its_run_alone(manifest):
    job, policy = documents(manifest)
    labels = {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}  # which a JobSet's pods have
    if job["kind"] == "PyTorchJob":
        (labels,) = [
            each["template"]["metadata"]["labels"]
            for kind, each in job["spec"]["pytorchReplicaSpecs"].items()
            if kind == "Master"
        ]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    (rule,) = policy["spec"]["ingress"]
    assert [each["podSelector"]["matchLabels"] for each in rule["from"]] == [labels]


def test_pods_have_a_secret_shared_memory_and_time_to_save(manifest):
    for template, _ in PODS[manifest.name]().values():
        (container,) = template["spec"]["containers"]
        (variable,) = container["env"]
        assert variable["name"] == "SHARDPROOF_RDZV_ID" and "value" not in variable
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounts[IN_POD]]
        assert template["spec"]["terminationGracePeriodSeconds"] > 180  # what the launcher gives its ranks


def test_a_jobset_is_not_started_again_after_a_recipe_that_cannot_be_used():
    jobset = documents(FOLDER / "jobset.yaml")[0]["spec"]
    spec = jobset["replicatedJobs"][1]["template"]["spec"]
    rules = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert rules == {UNUSABLE: "FailJob", 143: "Ignore"}
    assert jobset["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # which a podFailurePolicy needs


def test_an_elastic_pytorchjob_gives_a_range_of_hosts(monkeypatch):
    """What the operator sets with an elastic policy of one to four workers."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "shardproof-worker-0:23456")
    monkeypatch.setenv("PET_RDZV_BACKEND", "c10d")
    monkeypatch.setenv("PET_NNODES", "1:4")
    options = with_scheduler(Options(), None)
    assert (options.nnodes, options.rdzv_endpoint) == ("1:4", "shardproof-worker-0:23456")
