"""One update from one global batch, or nothing at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from shardproof.dist.collectives import exchange
from shardproof.dist.deadline import deadline, is_lost, mesh_groups
from shardproof.errors import fail
from shardproof.model.compiling import is_compiled
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch
from shardproof.train.forward import scoring_context
from shardproof.train.guard import Verdict, agree, local_square_norm, scale_gradients
from shardproof.train.loss import Loss
from shardproof.train.metrics import MetricSums
from shardproof.train.optim import FirstState
from shardproof.train.passes import accumulate, drop_gradients, locate
from shardproof.train.prepare import StepSettings, Work, prepare
from shardproof.train.state import training_state

logger = logging.getLogger(__name__)

_DEADLINE_S = {"cpu": 60.0, "cuda": 600.0}


@dataclass(frozen=True)
class StepResult:
    """What a step did. Equal on every rank."""

    stepped: bool
    reason: str | None  # why not, if it did not
    rank: int | None  # where it went wrong
    micro_batch: int | None
    tensor: str | None
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    metrics: Mapping[str, float]
    version: int


class Trainer:
    """Updates a model through its optimizer and learning-rate schedule.

    `state` caches what training has measured of the model; all trainers of one model, `train_step`, `logprobs` and
    `values` share it.
    """

    def __init__(
        self, model: ShardedModel, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ):
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.state = training_state(model)
        self.num_steps = 0  # begun by this object

    def step(
        self,
        batch: Batch,
        *,
        loss: str | Loss = "sft",
        micro_batch_tokens: int = 8192,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        router_coef: float = 0.0,
        max_consecutive_skips: int = 3,
        deadline_s: float | None = None,
    ) -> StepResult:
        """Apply one update from one global batch, or leave everything as it was.

        The loss is sum(weight * token_loss) over the global batch; without a `weights` column every counted token
        weighs the same. If a loss or gradient is not finite on any rank, all ranks skip the update.

        Collective: every rank of the model's mesh.
        """
        model, optimizer = self.model, self.optimizer
        settings = StepSettings(loss, micro_batch_tokens, max_grad_norm, temperature, router_coef)
        seconds = deadline_s if deadline_s is not None else default_deadline(model)
        self.num_steps += 1
        with deadline("train_step", "T308", seconds, _groups(model)):
            work = prepare(model, batch, optimizer, settings)
            try:
                verdict, tensor = self._decide(work)
                lr = optimizer.param_groups[0]["lr"]
                if verdict.step:
                    model.before_change()
                    scale_gradients(model, verdict.grad_norm, max_grad_norm)
                    self._apply()
                    model.mark_updated(changed=lr > 0 and verdict.grad_norm > 0)
            finally:
                drop_gradients(model, optimizer)
        result = StepResult(
            stepped=verdict.step,
            reason=verdict.reason,
            rank=verdict.rank,
            micro_batch=verdict.micro_batch,
            tensor=tensor,
            loss=verdict.loss,
            grad_norm=verdict.grad_norm,
            lr=lr,
            num_tokens=work.num_tokens,
            metrics=verdict.metrics,
            version=model.version,
        )
        self._count_skips(result, max_consecutive_skips)
        return result

    def _decide(self, work: Work) -> tuple[Verdict, str | None]:
        """The verdict on a step whose gradients are then there, and the culprit's name if it is not taken.

        Collective: every rank.
        """
        with scoring_context(self.model, work.scoring, work.routers):
            sums = MetricSums(work.loss.metrics)
            losses = accumulate(self.model, work, sums)
            with FirstState(self.optimizer) as state:
                verdict = agree(self.model, losses, sums, local_square_norm(self.model), state.problem)
                if verdict.step:
                    state.keep()
                    return verdict, None
            return locate(self.model, work, verdict, self.optimizer)

    def _apply(self) -> None:
        """Take the step that all ranks agreed on. What fails on one rank is raised on all, none of which may go on.

        Collective: every rank.
        """
        problem: str | None = None
        cause: Exception | None = None
        try:
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        except Exception as error:
            if is_lost(error):  # nobody is left to be told
                raise
            problem, cause = f"{type(error).__name__}: {error}", error
        for rank, said in enumerate(exchange(problem)):
            if said is not None:
                message = f"the optimizer's step failed ({said}); other ranks have completed theirs, so the ranks' weights no longer match."
                fix = "remove the cause, then load the model again and resume from the last checkpoint"
                raise fail("T309", "train_step", message, rank=rank, fix=fix) from cause

    def _count_skips(self, result: StepResult, limit: int) -> None:
        """Count skips in a row, say so once, and raise the same fault everywhere when there are too many."""
        is_first = dist.get_rank() == 0
        if result.stepped:
            self.state.num_skipped = 0
            logger.log(
                logging.INFO if is_first else logging.DEBUG,
                "step %d: loss %.6g, grad norm %.4g, lr %.3g, %d tokens",
                result.version,
                result.loss,
                result.grad_norm,
                result.lr,
                result.num_tokens,
            )
            return
        self.state.num_skipped += 1
        where = f"rank {result.rank}, micro-batch {result.micro_batch}, {result.tensor}"
        level = logging.WARNING if is_first else logging.DEBUG
        logger.log(level, "step skipped: %s (%s)", result.reason, where)
        if self.state.num_skipped >= limit:
            skips = f"{self.state.num_skipped} steps in a row were skipped"
            message = f"{skips}; the last because {result.reason} ({where})."
            raise fail("T302", "train_step", message, rank=result.rank, tensor=result.tensor)


def train_step(
    policy: ShardedModel,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    loss: str | Loss = "sft",
    micro_batch_tokens: int = 8192,
    max_grad_norm: float | None = 1.0,
    temperature: float = 1.0,
    router_coef: float = 0.0,
    max_consecutive_skips: int = 3,
    deadline_s: float | None = None,
) -> StepResult:
    """`Trainer(policy, optimizer, scheduler).step(batch, ...)`. Collective: every rank of policy.mesh."""
    return Trainer(policy, optimizer, scheduler).step(
        batch,
        loss=loss,
        micro_batch_tokens=micro_batch_tokens,
        max_grad_norm=max_grad_norm,
        temperature=temperature,
        router_coef=router_coef,
        max_consecutive_skips=max_consecutive_skips,
        deadline_s=deadline_s,
    )


def default_deadline(policy: ShardedModel) -> float:
    """The deadline where none is given; what is compiled is compiled in the first step."""
    plain = policy.device.type == "cpu" and not is_compiled(policy.model)
    return _DEADLINE_S["cpu" if plain else "cuda"]


def _groups(policy: ShardedModel) -> list[dist.ProcessGroup]:
    groups = mesh_groups(policy.mesh)
    return [*groups, policy.sequence_group.group] if policy.sequence_group is not None else groups
