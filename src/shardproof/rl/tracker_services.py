"""One class per tracker, each over the tracker's own package, which is imported when a run uses it."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardproof.user_code import import_named

SAMPLE_COLUMNS = ("step", "prompt", "completion", "reward")
_EXIT_CODES = {"finished": 0, "stopped": 0, "failed": 1}
_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MLFLOW_PARAMS, _MLFLOW_CHARACTERS = 100, 6000  # in one request, and in one value


@dataclass(frozen=True)
class TrackerStart:
    """What a tracker is started with."""

    folder: Path  # of the run
    project: str
    run_name: str
    first_step: int  # that this part of the run goes on from
    run_id: str | None = None  # of the earlier parts in the tracker; None where this is the first
    config: Mapping[str, Any] = field(default_factory=dict)  # the resolved recipe
    options: Mapping[str, Any] = field(default_factory=dict)  # of the user, for this tracker


class Tracker(Protocol):
    """A place that metrics of a run are sent to."""

    run_id: str | None  # what a later part of the run needs to go on in the same place
    takes_steps_again: bool  # whether steps that a resumed run takes again replace those that were sent

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None: ...

    def alert(self, step: int, text: str) -> None: ...

    def attach(self, path: Path) -> None: ...

    def close(self, status: str) -> None: ...


class TensorBoard:
    """TensorBoard's event files, under `tensorboard/` in the run's folder."""

    run_id: str | None = None
    takes_steps_again = True

    def __init__(self, start: TrackerStart):
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then hides what was logged of later steps before.
        first = start.first_step + 1 if start.first_step else 0
        place = str(start.folder / "tensorboard")
        self._writer = SummaryWriter(place, purge_step=first, **start.options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        text = "\n\n".join(
            f"**reward {line['reward']}**\n\n    "
            + f"{line['prompt']}{line['completion']}".replace("\n", "\n    ")
            for line in samples
        )
        self._writer.add_text("samples", text, step)

    def alert(self, step: int, text: str) -> None:
        self._writer.add_text("findings", text, step)

    def attach(self, path: Path) -> None:
        """Nothing: TensorBoard keeps no files, and the page lies beside its folder."""

    def close(self, status: str) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. Without a network: `mode = "offline"`, or WANDB_MODE=offline."""

    takes_steps_again = False

    def __init__(self, start: TrackerStart):
        import wandb

        self._wandb = wandb
        self.run_id: str | None = start.run_id or secrets.token_hex(4)
        # The terminal is the run's own: wandb neither captures what is printed nor prints.
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project=start.project,
            name=start.run_name,
            id=self.run_id,
            resume="allow",
            dir=str(start.folder),
            config=dict(start.config),
            settings=settings,
            **start.options,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        rows = [[line.get(column) for column in SAMPLE_COLUMNS] for line in samples]
        self._run.log({"samples": self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)}, step=step)

    def alert(self, step: int, text: str) -> None:
        # One title per step: wandb leaves out further alerts of a title for a minute.
        self._run.alert(f"step {step}", text, level="ERROR")

    def attach(self, path: Path) -> None:
        shutil.copy(path, self._run.dir)  # whose files wandb uploads with the run

    def close(self, status: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES[status])


class Trackio:
    """A run of trackio, in its local database unless its options say otherwise."""

    takes_steps_again = False

    def __init__(self, start: TrackerStart):
        import trackio

        self._trackio = trackio
        with _quiet():
            self._run = trackio.init(
                project=start.project,
                name=start.run_id or start.run_name,
                resume="never" if start.run_id is None else "must",
                config=dict(start.config),
                embed=False,
                **start.options,
            )
        self.run_id: str | None = self._run.name  # trackio finds a run again by its name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        rows = [[line.get(column) for column in SAMPLE_COLUMNS] for line in samples]
        self._run.log({"samples": self._trackio.Table(columns=list(SAMPLE_COLUMNS), data=rows)}, step=step)

    def alert(self, step: int, text: str) -> None:
        with _quiet():
            level = self._trackio.AlertLevel.ERROR
            self._run.alert(f"step {step}", text, level=level, step=step)

    def attach(self, path: Path) -> None:
        """Nothing: trackio's dashboard does not show pages."""

    def close(self, status: str) -> None:
        with _quiet():
            self._trackio.finish()


class Mlflow:
    """A run of MLflow, at `tracking_uri`, or MLFLOW_TRACKING_URI, or `mlflow.db` where the run was started."""

    takes_steps_again = False

    def __init__(self, start: TrackerStart):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._metric = Metric
        self._client: Any = MlflowClient(**start.options)
        if start.run_id is not None:
            self.run_id: str | None = start.run_id
            self._client.update_run(start.run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(start.project)
        experiment = (
            found.experiment_id if found is not None else self._client.create_experiment(start.project)
        )
        run_id = self._client.create_run(experiment, run_name=start.run_name).info.run_id
        values = [(key, str(value)[:_MLFLOW_CHARACTERS]) for key, value in flat(start.config).items()]
        for first in range(0, len(values), _MLFLOW_PARAMS):
            part = [Param(key, value) for key, value in values[first : first + _MLFLOW_PARAMS]]
            self._client.log_batch(run_id, params=part)
        self.run_id = run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=rows)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        rows = [[line.get(column) for column in SAMPLE_COLUMNS] for line in samples]
        # The layout of MLflow's own tables, which `log_table` writes with pandas alone.
        table = {"columns": list(SAMPLE_COLUMNS), "data": rows}
        self._client.log_dict(self.run_id, table, f"samples/step-{step:06}.json")

    def alert(self, step: int, text: str) -> None:
        self._client.set_tag(self.run_id, f"finding.step_{step}", text[:_MLFLOW_CHARACTERS])

    def attach(self, path: Path) -> None:
        self._client.log_artifact(self.run_id, str(path))

    def close(self, status: str) -> None:
        self._client.set_terminated(self.run_id, _MLFLOW_STATUS[status])


class UsersTracker:
    """A logger of the user's, named as module:name; only `log` and `close` are required of it."""

    run_id: str | None = None
    takes_steps_again = False

    def __init__(self, name: str, start: TrackerStart):
        self._logger = import_named("tracker", name)(start.folder, **start.options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logger.log(step, dict(metrics))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._call("log_samples", step, list(samples))

    def alert(self, step: int, text: str) -> None:
        self._call("alert", step, text)

    def attach(self, path: Path) -> None:
        self._call("attach", path)

    def close(self, status: str) -> None:
        self._logger.close()

    def _call(self, method: str, *arguments: Any) -> None:
        found = getattr(self._logger, method, None)
        if found is not None:
            found(*arguments)


SERVICES: Mapping[str, Any] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested recipe's values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _mlflow_name(name: str) -> str:
    """The name of a metric in the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what a package prints: standard output is the run's."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
