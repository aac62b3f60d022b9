"""`AttestCallback`: attestation inside any Hugging Face Trainer, after sharding and before the first step."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shardproof.errors import error_for
from shardproof.findings import Finding
from shardproof.shard.attest import attest

logger = logging.getLogger(__name__)


class AttestCallback(TrainerCallback):
    """Attests the model and the optimizer when training begins, and then every `every` steps unless that is 0.

    It works in transformers' Trainer, in trainers built on it such as TRL's, and wherever accelerate shards the model.
    A finding raises the same error on every rank; with `stop=False` it is logged and kept in `findings`.

    Collective: add the callback on every rank.
    """

    def __init__(self, every: int = 0, stop: bool = True):
        self.every = every
        self.stop = stop
        self.findings: list[Finding] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        self.attest(parts["model"], parts.get("optimizer"))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        if self.every and state.global_step % self.every == 0:
            self.attest(parts["model"], parts.get("optimizer"))

    def attest(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Attest now. Collective: every rank."""
        findings = attest(model, optimizer)
        self.findings += [finding for finding in findings if finding not in self.findings]
        if findings and self.stop:
            raise error_for(findings)
        if not dist.is_initialized() or dist.get_rank() == 0:
            for finding in findings:
                logger.warning("%s", finding)
