"""Sharded RL post-training for Hugging Face models, in which every rank can prove what it holds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardproof.version import __version__

# Public names and the modules they live in; resolved on first use so that `import shardproof` stays light.
_EXPORTS = {
    "load": "shardproof.shard.load",
    "ShardedModel": "shardproof.shard.sharded_model",
    "LoadReceipt": "shardproof.shard.sharded_model",
    "attest": "shardproof.shard.attest",
    "AttestCallback": "shardproof.doctor.callback",
    "RandomInit": "shardproof.weights.source",
    "logprobs": "shardproof.train.score",
    "values": "shardproof.train.score",
    "scores": "shardproof.train.score",
    "Batch": "shardproof.train.batching",
    "weigh": "shardproof.train.batching",
    "Trainer": "shardproof.train.trainer",
    "train_step": "shardproof.train.trainer",
    "StepResult": "shardproof.train.trainer",
    "Loss": "shardproof.train.loss",
    "save_pretrained": "shardproof.export.pretrained",
    "verify_pretrained": "shardproof.export.receipts",
    "save_checkpoint": "shardproof.checkpoints.save",
    "resume": "shardproof.checkpoints.resume",
    "SharedWeights": "shardproof.export.shared",
    "WeightStream": "shardproof.export.stream",
    "make_optimizer": "shardproof.train.optim",
    "make_schedule": "shardproof.train.schedules",
    "make_mesh": "shardproof.dist.mesh",
    "init_distributed": "shardproof.dist.launch",
    "deadline": "shardproof.dist.deadline",
    "Trajectory": "shardproof.rollout.trajectory",
    "Segment": "shardproof.rollout.trajectory",
    "TokenLedger": "shardproof.rollout.token_ledger",
    "attest_batch": "shardproof.rollout.token_ledger",
    "Environment": "shardproof.environments.protocol",
    "Opening": "shardproof.environments.protocol",
    "Reply": "shardproof.environments.protocol",
    "ToolCall": "shardproof.environments.protocol",
    "ToolEnvironment": "shardproof.environments.tools",
    "tool": "shardproof.environments.typed_functions",
    "Turn": "shardproof.environments.protocol",
    "Finding": "shardproof.findings",
    "ShardproofError": "shardproof.errors",
    "ConfigError": "shardproof.errors",
    "Fault": "shardproof.errors",
    "LoadFault": "shardproof.errors",
    "ShardFault": "shardproof.errors",
    "TrainFault": "shardproof.errors",
    "ExportFault": "shardproof.errors",
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from shardproof.checkpoints.resume import resume
    from shardproof.checkpoints.save import save_checkpoint
    from shardproof.dist.deadline import deadline
    from shardproof.dist.launch import init_distributed
    from shardproof.dist.mesh import make_mesh
    from shardproof.doctor.callback import AttestCallback
    from shardproof.environments.protocol import Environment, Opening, Reply, ToolCall, Turn
    from shardproof.environments.tools import ToolEnvironment
    from shardproof.environments.typed_functions import tool
    from shardproof.errors import (
        ConfigError,
        ExportFault,
        Fault,
        LoadFault,
        ShardFault,
        ShardproofError,
        TrainFault,
    )
    from shardproof.export.pretrained import save_pretrained
    from shardproof.export.receipts import verify_pretrained
    from shardproof.export.shared import SharedWeights
    from shardproof.export.stream import WeightStream
    from shardproof.findings import Finding
    from shardproof.rollout.token_ledger import TokenLedger, attest_batch
    from shardproof.rollout.trajectory import Segment, Trajectory
    from shardproof.shard.attest import attest
    from shardproof.shard.load import load
    from shardproof.shard.sharded_model import LoadReceipt, ShardedModel
    from shardproof.train.batching import Batch, weigh
    from shardproof.train.loss import Loss
    from shardproof.train.optim import make_optimizer
    from shardproof.train.schedules import make_schedule
    from shardproof.train.score import logprobs, scores, values
    from shardproof.train.trainer import StepResult, Trainer, train_step
    from shardproof.weights.source import RandomInit


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'shardproof' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
