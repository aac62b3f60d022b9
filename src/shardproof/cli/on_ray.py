"""`shardproof train --on ray`: Ray Train places the ranks on a cluster's nodes, and starts them again after a failure."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardproof.cli.footer import Part
from shardproof.cli.options import STOPPED_BY_FINDING, Options
from shardproof.cli.ray_console import Console, repeat
from shardproof.errors import fail
from shardproof.terminal import Terminal
from shardproof.text import printable

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

logger = logging.getLogger(__name__)

_HEAR_S = 0.5  # how long the terminal waits for news before it looks at signals
_NAMED = 8  # hosts that a line names
_OBJECT_STORE = 2**27  # bytes, for a cluster of our own: only lines of text and the recipe pass through it
# Workers inherit the environment of Ray's own processes. These variables of the starting terminal are for all ranks.
_PASSED_ON = (
    *(
        "HF_",
        "HUGGING_FACE_",
        "TRANSFORMERS_",
        "SHARDPROOF_",
        "WANDB_",
        "MLFLOW_",
        "TRACKIO_",
        "TENSORBOARD_",
    ),
    *("NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUBLAS_", "VLLM_"),
)
# Read when torch is imported, which is before Ray lets us set anything else. Ray shows them to whoever may see the cluster.
_PASSED_ON_EARLY = ("OMP_", "MKL_", "ONEDNN_", "TOKENIZERS_")
_TRAIN = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # ranks keep the folder in which the command was started
    # What Ray Train would print and measure: ranks speak for themselves.
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
}
_OWN_CLUSTER = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what makes Ray listen on the loopback interface alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
}


def launch_on_ray(recipe: Recipe, options: Options, terminal: Terminal) -> None:
    """Run the recipe's ranks on a Ray cluster, and end with the footer of the run."""
    from shardproof.cli.ranks import show_footer

    if importlib.util.find_spec("ray") is None:
        message = "--on ray needs the package ray, which is not installed."
        raise fail("C007", "ray", message, fix="pip install 'shardproof[ray]'")
    part = Part.begin(recipe, options.from_step)
    # Ray prints there what its own processes log when a node is lost. Ours speak on stderr.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), _connected(recipe, options):
        code = _run(recipe, options, terminal)
    show_footer(part, code, terminal)
    if code:
        raise SystemExit(code)


@contextlib.contextmanager
def _connected(recipe: Recipe, options: Options) -> Iterator[None]:
    """A connection to the cluster that RAY_ADDRESS names, or to one on this machine for the time of the block."""
    os.environ.update(_TRAIN)
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(options.rdzv_timeout_s))
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        for name, value in _OWN_CLUSTER.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    elif address.startswith("ray://"):
        message = f"RAY_ADDRESS={address!r}: Ray's client protocol cannot run a trainer."
        fix = "start the command on a node of the cluster, or through `ray job submit`"
        raise fail("C001", "ray", message, fix=fix)

    import ray

    # Ray's own lines stay in its log files; what ranks say comes through the console.
    quiet = {"logging_config": ray.LoggingConfig(log_level="CRITICAL"), "log_to_driver": False}
    level = logging.getLogger().level
    try:
        if address:
            logger.info("connecting to the Ray cluster at %s ...", address)
            ray.init(address=address, **quiet)
        else:
            logger.info("starting Ray on this machine ...")
            num_cpus = max(os.cpu_count() or 1, recipe.train.ranks or 0)
            own = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
            ray.init(address="local", **own, **quiet)  # not the one that `ray start` noted on this machine
    except (ConnectionError, RuntimeError, ValueError) as error:
        message = f"the Ray cluster cannot be reached or started: {error}"
        fix = "make sure that `ray status` answers with the same RAY_ADDRESS, Python and version of Ray"
        raise fail("C002", "ray", message, fix=fix) from error
    logging.getLogger().setLevel(level)
    try:
        yield
    finally:
        ray.shutdown()


def _run(recipe: Recipe, options: Options, terminal: Terminal) -> int:
    """The run's exit code, once its ranks have ended."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from shardproof.dist.signals import SIGNALLED, Signals

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    console = ray.remote(num_cpus=0, scheduling_strategy=here)(Console).remote()
    with tempfile.TemporaryDirectory(prefix="shardproof-ray-", ignore_cleanup_errors=True) as folder:
        fit = _Fit(_trainer(recipe, options, console, folder))
        with Signals() as signals:
            fit.start()
            is_told = False
            restarts = _Restarts(options.max_restarts, terminal)
            while fit.is_alive():
                if signals.is_repeated:
                    logger.warning("interrupted again: the ranks were killed before they could save")
                    return SIGNALLED + signal.SIGINT
                if signals.number and not is_told:
                    is_told = True
                    if not ray.get(console.stop.remote(signals.number)):
                        logger.info("stopped before the ranks began")
                        return SIGNALLED + signals.number
                    logger.info("stopping the ranks; press Ctrl-C again to kill them")
                for event in ray.get(console.hear.remote(_HEAR_S)):
                    _show(event, terminal, restarts)
        for event in ray.get(console.hear.remote(0.0)):
            _show(event, terminal, restarts)
    code, text = fit.outcome(restarts.hosts)
    terminal.pause()
    if text:
        terminal.show(text)
    return code


def _show(event: dict[str, Any], terminal: Terminal, restarts: _Restarts) -> None:
    if event["kind"] == "failed":
        restarts.see(event["ranks"])
    elif event["kind"] == "placed":
        restarts.hosts = event["hosts"]
        names = list(dict.fromkeys(restarts.hosts))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        logger.info("Ray placed the ranks on %s%s", ", ".join(names[:_NAMED]), more)
    else:
        repeat(event, terminal)


class _Restarts:
    """Says why ranks are started again. The failure after the last restart is the run's own, and said at its end."""

    def __init__(self, num: int, terminal: Terminal):
        self._num, self._used, self._terminal = num, 0, terminal
        self.hosts: list[str] = []  # of each rank

    def see(self, failures: dict[int, tuple[int, str]]) -> None:
        self._used += 1
        if self._used <= self._num:
            self._terminal.pause()
            self._terminal.show(_finding(failures, self.hosts)[1])
            logger.warning("Ray starts the ranks again: restart %d of %d", self._used, self._num)


class _Fit(threading.Thread):
    """Ray Train's controller, awaited in a thread: the main one has signals and the terminal."""

    def __init__(self, trainer: Any):
        super().__init__(daemon=True, name="shardproof-ray")
        self._trainer = trainer
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._result = self._trainer.fit()
        except Exception as error:
            self._error = error

    def outcome(self, hosts: list[str]) -> tuple[int, str]:
        """The exit code, and what there is to say; `hosts` are those of the ranks."""
        from ray.train import WorkerGroupError

        from shardproof.cli.ray_ranks import describe_failures

        if self._error is None:
            return self._result.return_value["code"], self._result.return_value["text"]
        if isinstance(self._error, WorkerGroupError):
            return _finding(describe_failures(self._error.worker_failures), hosts)
        cause = getattr(self._error, "controller_failure", self._error)
        cause = (
            getattr(cause, "cause", None) or cause
        )  # an error of a worker, without Ray's traceback around it
        message = f"Ray could not run the ranks: {type(cause).__name__}: {printable(str(cause))}"
        return STOPPED_BY_FINDING, str(fail("T308", "ray", message, fix="see `ray status` and Ray's logs"))


def _finding(failures: dict[int, tuple[int, str]], hosts: list[str]) -> tuple[int, str]:
    """The exit code and the finding of ranks that failed: their own where one of them had the time to find it."""
    for _, (code, text) in sorted(failures.items()):
        if code == STOPPED_BY_FINDING and text:
            return code, text
    rank, (_, text) = min(failures.items())
    host = f" on host {hosts[rank]}" if rank < len(hosts) else ""
    others = ", ".join(map(str, sorted(failures)[1:]))
    message = f"failed{host}{f', as did ranks {others}' if others else ''}: {text}"
    fix = "read the lines above, and Ray's logs of that host; --max-restarts lets a run go on by itself"
    return STOPPED_BY_FINDING, str(fail("T308", "ray", message, rank=rank, fix=fix))


def _trainer(recipe: Recipe, options: Options, console: Any, folder: str) -> Any:
    from ray.train import FailureConfig, RunConfig
    from ray.train.torch import TorchTrainer

    from shardproof.cli.ray_ranks import RankConfig, Watcher, run_rank
    from shardproof.config.load import to_json
    from shardproof.rl.run_facts import COMMAND

    os.environ[COMMAND] = shlex.join(["shardproof", *sys.argv[1:]])  # ranks have arguments of their own
    recipe_json = to_json(recipe)
    options = replace(
        options, rdzv_id=None
    )  # Ray publishes what ranks are given, and needs no secret of ours
    early = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON_EARLY)}
    early.setdefault("OMP_NUM_THREADS", "1")
    return TorchTrainer(
        run_rank,
        train_loop_config={"recipe": recipe_json, "options": options, "console": console},
        torch_config=RankConfig(
            backend="gloo",  # not used: ranks make their own process group
            job=secrets.token_hex(8),
            recipe=recipe_json,
            options=options,
            environment={name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)},
            folder=os.getcwd(),
            console=console,
        ),
        scaling_config=_scaling(recipe, options),
        run_config=RunConfig(
            storage_path=folder,
            failure_config=FailureConfig(
                max_failures=options.max_restarts,
                max_preemption_failures=options.max_restarts,
                controller_failure_limit=options.max_restarts,  # a node that is lost while ranks start
            ),
            callbacks=[Watcher(console)],
            worker_runtime_env={"env_vars": early},
        ),
    )


def _scaling(recipe: Recipe, options: Options) -> Any:
    """How many workers, with which resources, and where: `train.ranks` for each of `--nnodes` hosts."""
    import ray
    from ray.train import ScalingConfig

    from shardproof.dist.start import node_range

    gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    per_host = recipe.train.ranks or max(gpus, default=0) or 1
    low, high = (per_host * hosts for hosts in node_range(options.nnodes))
    each = {"CPU": 1, "GPU": 1} if any(gpus) else {"CPU": 1}
    there = ray.cluster_resources()
    for name, amount in each.items():
        if there.get(name, 0) < low * amount:
            text = "waiting for the cluster to grow: %d ranks need %d %ss, and it has %d"
            logger.warning(text, low, low * amount, name, there.get(name, 0))
    logger.info("starting %d rank%s on Ray ...", high, "s" * (high > 1))
    return ScalingConfig(
        num_workers=high if low == high else (low, high),
        use_gpu="GPU" in each,
        resources_per_worker=each,
        placement_strategy="SPREAD" if per_host == 1 and high > 1 else "PACK",
    )
