"""What a start needs of this machine: packages, GPUs, ports, write access, disk and memory.

The dry run and the start go through the same list, so that one finds what the other would.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from shardproof.config.evaluation_sets import named_sources
from shardproof.config.schema import Recipe
from shardproof.errors import ShardproofError
from shardproof.findings import Finding
from shardproof.folder_lock import LOCK_NAME, FolderLock
from shardproof.model.inventory import take_inventory
from shardproof.model.roles import POLICY
from shardproof.model.skeleton import build_skeleton
from shardproof.rl.checks import check_ahead, model_folder
from shardproof.rl.hub import check_hub
from shardproof.rl.machine import available_memory, existing_folder
from shardproof.rl.place import CHECKPOINTS, check_folder, check_own, checkpoint_steps
from shardproof.rl.same_run import Resume
from shardproof.rl.sizing.recipe import PROCESS_BYTES, held_in_host, saved_bytes
from shardproof.rl.trackers import check_logins
from shardproof.rollout.vllm_places import check_replica_devices, check_settings, check_sleep, port_problem
from shardproof.rollout.vllm_versions import installed_version, interface_of
from shardproof.user_code import is_user_name
from shardproof.weights.reader import open_checkpoint
from shardproof.weights.source import find_folder, read_config

_GIB = 2**30
_EXTRAS = {"peft": "lora", "pyarrow": "data", "datasets": "data", "tensorboard": "cli", "vllm": "vllm"}
_EXTRAS |= {name: name for name in ("wandb", "trackio", "mlflow")}


@dataclass(frozen=True)
class Start:
    """A start of a recipe on this node."""

    recipe: Recipe
    num_ranks: int  # of this node
    num_nodes: int = 1  # at most
    resume: Resume = field(default_factory=Resume)

    @cached_property
    def num_elements(self) -> int | None:
        """Elements of the policy's parameters; None where another node has its files. Raises if nobody has."""
        model = self.recipe.model
        if self.num_nodes > 1 and find_folder(model.path, None) is None:
            return None
        folder = model_folder(model.path)
        if model.random_init:
            config = read_config(folder, model.trust_remote_code)
            skeleton = build_skeleton(config, role=POLICY, trust_remote_code=model.trust_remote_code)
            return sum(info.numel for info in take_inventory(skeleton.model).parameters)
        try:
            tensors = open_checkpoint(folder).tensors.values()
        except ShardproofError:
            if self.num_nodes > 1:
                return None
            raise
        return sum(torch.Size(entry.shape).numel() for entry in tensors)


def look_ahead(start: Start) -> list[Finding]:
    """Everything that would stop this start on this machine. Nothing is written."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(start)
        except ShardproofError as error:
            findings += [finding for finding in error.findings if finding not in findings]
        except (OSError, ValueError) as error:  # a path that cannot be looked at, or cannot be one
            findings.append(_finding(check.__name__.removeprefix("check_"), f"{error}."))
    return findings


def check_versions(start: Start) -> list[Finding]:
    """Python and the packages that every run needs are of versions that this package names."""
    try:
        about = importlib.metadata.metadata("shardproof")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return []
    findings = []
    python = about["Requires-Python"] or ""
    if platform.python_version() not in SpecifierSet(python, prereleases=True):
        findings.append(
            _finding("versions", f"Python is {platform.python_version()}; supported versions are {python}.")
        )
    for text in about.get_all("Requires-Dist") or []:
        need = Requirement(text)
        # vLLM has several packages and a table of its own.
        if need.marker is None or (need.name in _needed(start.recipe) and need.name != "vllm"):
            installed = _version(need.name)
            if installed is not None and not need.specifier.contains(installed, prereleases=True):
                message = f"{need.name} is {installed}; supported versions are {need.specifier}."
                findings.append(_finding("versions", message))
    return findings


def check_packages(start: Start) -> list[Finding]:
    """The packages that these settings need are installed."""
    return [
        _finding(
            "packages",
            f"{setting} needs the package {name}, which is not installed.",
            _install(name) + (", or `make vllm` for CPU" if name == "vllm" else ""),
        )
        for name, setting in _needed(start.recipe).items()
        if importlib.util.find_spec(name) is None
    ]


def _install(name: str) -> str:
    """The command that installs a package: by our extra, which knows the versions, if there is one for it alone."""
    return f"pip install 'shardproof[{_EXTRAS[name]}]'" if name in _EXTRAS else f"pip install {name}"


def check_accounts(start: Start) -> list[Finding]:
    """This user is logged in where trackers, or the upload of the model, need it."""
    return check_logins(start.recipe.output) + check_hub(start.recipe.output)


def _needed(recipe: Recipe) -> dict[str, str]:
    """The optional packages that a recipe needs, each with the setting that asks for it."""
    needed = {}
    for key, source in named_sources(recipe).items():
        if source.startswith("hf:"):
            needed["datasets"] = f"{key}={source!r}"
        elif source.endswith(".parquet"):
            needed["pyarrow"] = f"{key}={source!r}"
    if recipe.model.lora is not None:
        needed["peft"] = "model.lora"
    for name in recipe.output.trackers:
        if not is_user_name(name):
            needed[name] = f"output.trackers={recipe.output.trackers}"
    if recipe.rollout.engine == "vllm":
        needed["aiohttp"] = "rollout.engine='vllm'"
    if recipe.rollout.engine == "vllm" and not recipe.rollout.vllm.urls:
        needed["vllm"] = "rollout.engine='vllm'"
    return needed


def check_devices(start: Start) -> list[Finding]:
    """There is a GPU per rank, on a machine that has any."""
    found = torch.cuda.device_count()
    if found and start.num_ranks > found:
        message = f"train.ranks={start.num_ranks} needs {start.num_ranks} GPUs; this machine has {found}."
        return [
            _finding("devices", message, "lower train.ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES=")
        ]
    return []


def check_vllm(start: Start) -> list[Finding]:
    """The vLLM that is installed is supported, its settings can work, and a port that its server shall have is free."""
    vllm = start.recipe.rollout.vllm
    if start.recipe.rollout.engine != "vllm":
        return []
    check_settings(vllm)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_replica_devices(vllm, device)
    if start.recipe.rollout.sleep:
        check_sleep(vllm, device, start.recipe.model.lora is not None and vllm.lora == "adapter")
    version = installed_version() if not vllm.urls else None
    if version is not None:
        interface_of(version)
    if vllm.urls or vllm.mode != "server" or not vllm.port or start.num_nodes > 1:
        return []
    found = port_problem(vllm.host, range(vllm.port, vllm.port + vllm.replicas))
    if found is None:
        return []
    message = f"rollout.vllm.port={found[0]} on {vllm.host} cannot be used: {found[1]}."
    return [_finding("ports", message, "use another port, or 0 for a free one")]


def check_output(start: Start) -> list[Finding]:
    """The run's folder is, or may become, this run's; nobody else is at work in it; this user may write there."""
    folder = Path(start.recipe.output.folder)
    if start.num_nodes == 1:
        check_folder(start.recipe, start.resume)
    else:  # what the run goes on from may lie on other hosts
        check_own(start.recipe, start.resume)
    existing = existing_folder(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):  # has no name where the file system can do without
            pass
    except OSError as error:
        message = f"{existing} cannot be written: {error.strerror or error}."
        return [_finding("output", message, "use an output.folder that you can write to")]
    # Where there are several nodes, another one may have begun this very run.
    if start.num_nodes == 1 and (folder / LOCK_NAME).exists():
        lock = FolderLock(folder)
        lock.acquire("output")
        lock.release()
    return []


def check_disk(start: Start) -> list[Finding]:
    """The disk has room for one checkpoint more than are kept, and for the model."""
    recipe = start.recipe
    if start.num_elements is None or not recipe.output.folder.strip():
        return []
    output, folder = recipe.output, Path(recipe.output.folder)
    num_kept = output.keep + 1 if output.save_every else 1
    num_checkpoints = max(num_kept - len(checkpoint_steps(folder / CHECKPOINTS)), 1)
    model = start.num_elements * _itemsize(output.model_dtype or "bfloat16") if output.save_model else 0
    needed, free = (
        num_checkpoints * saved_bytes(recipe) + model,
        shutil.disk_usage(existing_folder(folder)).free,
    )
    if needed <= free:
        return []
    what = f"{num_checkpoints} checkpoint{'s' * (num_checkpoints > 1)}{' and the model' if model else ''}"
    message = f"{folder} has {_gib(free)} free; {what} take {_gib(needed)}."
    return [
        _finding("disk", message, "free space, lower output.keep, or use an output.folder on another disk")
    ]


def check_memory(start: Start) -> list[Finding]:
    """Host memory holds at least what the ranks hold between steps: weights, gradients, moments, replicas.

    Activations come on top; `shardproof estimate` counts them too.
    """
    available = available_memory()
    if available is None:
        return []
    needed = start.num_ranks * PROCESS_BYTES
    if start.num_elements is not None:
        num_ranks = start.num_ranks * start.num_nodes
        needed += held_in_host(start.recipe, num_ranks, torch.cuda.is_available()) // start.num_nodes
    if needed <= available:
        return []
    message = (
        f"{start.num_ranks} ranks need at least {_gib(needed)} of host memory; {_gib(available)} are free."
    )
    fix = "lower train.ranks, use a smaller model or dtype, or see shardproof estimate"
    return [_finding("memory", message, fix)]


def check_running_ahead(start: Start) -> list[Finding]:
    """The engine that samples while the policy trains needs no memory of the policy's."""
    if start.recipe.rollout.engine == "vllm":
        check_ahead(start.recipe.rollout)
    return []


CHECKS: tuple[Callable[[Start], list[Finding]], ...] = (
    check_versions,
    check_packages,
    check_accounts,
    check_devices,
    check_vllm,
    check_running_ahead,
    check_output,
    check_disk,
    check_memory,
)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB"


def _finding(stage: str, message: str, fix: str | None = None) -> Finding:
    return Finding("C007", stage, message, fix=fix)
