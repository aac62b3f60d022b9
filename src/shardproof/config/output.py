"""The section about what a run leaves behind."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from shardproof.config.numbers import Count, CountOrNone, StepsOrNever
from shardproof.config.section import DtypeName, Section, known_or_users

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
# What the run itself tells each tracker, and the key that sets it.
_GIVEN = {"project": "output.project", "name": "output.run_name", "run_name": "output.run_name"}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class Output(Section):
    """What a run writes, where, and how often it evaluates."""

    folder: str
    """Folder of the run. Use one folder per run; rerun the same command to resume."""
    save_every: StepsOrNever = 50
    """Steps between checkpoints. 0: only when the run stops or ends."""
    keep: Count = 2
    """How many checkpoints to keep; older ones are deleted."""
    eval_every: StepsOrNever = 0
    """Steps between evaluations on `data.evaluation`, with one before the first step. 0 disables evaluation.
    """
    eval_samples: Count = 1
    """Completions per held-out prompt. 1: greedy decoding; more: sampled, for pass@K."""
    eval_prompts: Count = 64
    """How many held-out prompts to evaluate on. More give a smaller standard error and take longer."""
    samples_per_step: CountOrNone = 4
    """Completions per step that are written to `samples.jsonl` and shown in the report."""
    save_model: bool = True
    """Write the final model to `model/`, in the format that `from_pretrained` and vLLM read."""
    model_dtype: DtypeName | None = None
    """Dtype of the final model. By default that of the checkpoint it was loaded from."""
    trackers: list[str] = Field(default=["tensorboard"])
    """Where metrics go besides the run's own files: `"tensorboard"`, `"wandb"`, `"trackio"`, `"mlflow"`, or your own
    class as `module:name`. `[]` for none. The old key `tensorboard = false` still works and removes
    `"tensorboard"` from this list."""
    project: str = "shardproof"
    """Name of the project in Weights & Biases and trackio, and of the experiment in MLflow."""
    run_name: str | None = None
    """Name of the run in trackers. By default the name of `output.folder` with four random characters."""
    tracker_options: dict[str, dict[str, bool | int | float | str]] = Field(default_factory=dict)
    """Further options by tracker, such as `wandb = { entity = "my-team", mode = "offline" }`. They are passed to
    `wandb.init`, `trackio.init`, `MlflowClient`, TensorBoard's `SummaryWriter` or your class."""
    push_to_hub: str | None = None
    """Repository on the Hugging Face Hub, `user/name`, that the final model is uploaded to. It is created if it does
    not exist. You need to be logged in with `hf auth login`, or to set `HF_TOKEN`."""
    hub_private: bool = True
    """Whether a repository that `push_to_hub` creates is private."""

    @model_validator(mode="before")
    @classmethod
    def _read_old_key(cls, data: Any) -> Any:
        """`tensorboard` as older recipes and runs have it, read into `trackers`."""
        if not isinstance(data, dict) or "tensorboard" not in data:
            return data
        data = dict(data)
        wanted, named = data.pop("tensorboard"), data.get("trackers", ["tensorboard"])
        if not isinstance(wanted, bool):
            raise ValueError("tensorboard must be true or false; the new key is trackers = ['tensorboard']")
        if isinstance(named, list):
            others = [name for name in named if name != "tensorboard"]
            data["trackers"] = ["tensorboard", *others] if wanted else others
        return data

    @field_validator("trackers")
    @classmethod
    def _are_known(cls, trackers: list[str]) -> list[str]:
        return [known_or_users(name, TRACKERS) for name in trackers]

    @field_validator("push_to_hub")
    @classmethod
    def _is_hub_name(cls, name: str | None) -> str | None:
        if name is not None and not _HUB_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not of the form user/name")
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> Output:
        for name, options in self.tracker_options.items():
            if name not in self.trackers:
                raise ValueError(
                    f"tracker_options.{name}: add {name!r} to output.trackers, or remove the options"
                )
            taken = next((key for key in options if key in _GIVEN and name in TRACKERS), None)
            if taken is not None:
                raise ValueError(f"tracker_options.{name}.{taken}: set {_GIVEN[taken]} instead")
        if self.push_to_hub is not None and not self.save_model:
            raise ValueError("push_to_hub needs the final model: set output.save_model = true")
        return self
