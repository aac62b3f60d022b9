"""The section about what a run leaves behind."""

from __future__ import annotations

from shardproof.config.numbers import Count, CountOrNone, StepsOrNever
from shardproof.config.section import DtypeName, Section


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
    tensorboard: bool = True
    """Write metrics for TensorBoard to `tensorboard/`."""
