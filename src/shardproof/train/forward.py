"""One micro-batch through the model: what it says about the predictions, under one way of scoring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from shardproof.model import hf_private
from shardproof.model.attention import PACKED
from shardproof.model.exact_attention import PACKED as EXACT_PACKED
from shardproof.model.head import head_facts
from shardproof.model.roles import VALUED
from shardproof.model.routing import Routers
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch
from shardproof.train.inputs import Inputs
from shardproof.train.loss import Scored


@dataclass(frozen=True)
class Scoring:
    """How a model is scored: through which attention, and the head in chunks or as the model applies it.

    Sequences are packed with our attention, and run one by one with any other.
    """

    attention: str | None  # None: the implementation that the model was loaded with
    chunked: bool
    reason: str

    @property
    def packed(self) -> bool:
        return self.attention in (PACKED, EXACT_PACKED)


def vocabulary_size(policy: ShardedModel) -> int:
    """How many tokens the model's embedding has."""
    # The embedding's shape is that of the whole table only in the inventory; the module holds a shard.
    embedding = policy.model.get_input_embeddings()
    name = next(name for name, module in policy.model.named_modules() if module is embedding)
    shapes = {alias: info.shape for info in policy.inventory.parameters for alias in info.names}
    clean = name.replace("_fsdp_wrapped_module.", "")
    return shapes.get(f"{clean}.weight", shapes.get(f"{clean}.base_layer.weight", (2**31,)))[0]


@contextmanager
def evaluating(policy: ShardedModel) -> Iterator[None]:
    """The model is in evaluation mode inside the block."""
    was_training = policy.module.training
    if was_training:
        policy.module.eval()
    try:
        yield
    finally:
        if was_training:
            policy.module.train()


@contextmanager
def scoring_context(policy: ShardedModel, scoring: Scoring, routers: Routers | None = None) -> Iterator[None]:
    """The model attends as `scoring` says inside the block, which must hold the backward pass too.

    `routers`, if given to `score` inside, choose by themselves again when the block ends.
    """
    attention = scoring.attention
    try:
        with hf_private.attention_implementation(policy.model, attention) if attention else nullcontext():
            yield
    finally:
        if routers is not None:
            routers.replay(None)


def score(
    policy: ShardedModel,
    micro_batch: Batch,
    scoring: Scoring,
    *,
    temperature: float = 1.0,
    want_entropy: bool = False,
    want_router: bool = False,
    routers: Routers | None = None,
) -> tuple[Scored, torch.Tensor | None]:
    """What the model says about a micro-batch's predictions, in one row, and the router's statistics if wanted.

    An empty micro-batch runs a dummy sequence, so that this rank takes part in every collective; its row is empty.
    `routers` choose the micro-batch's experts, until `score` is called again or `scoring_context` ends.

    Collective: every rank.
    """
    inputs = Inputs(policy, micro_batch, scoring.packed, every_token=want_router)
    if routers is not None:
        routers.replay(inputs.experts)
    if policy.role in VALUED:
        row = policy.module(task="values", use_cache=False, **inputs.model_inputs)[0].float()
        empty = row.new_empty(0)
        return Scored(empty, empty, inputs.predictions(row)), None
    output = policy.module(
        task="logprobs",
        **inputs.model_inputs,
        targets=inputs.targets,
        temperature=temperature,
        want_entropy=want_entropy,
        router_tokens=inputs.num_tokens if want_router else None,
        head=head_facts(policy.model.config) if scoring.chunked else None,
    )
    logps = inputs.predictions(output["logps"])
    entropy = inputs.predictions(output["entropy"]) if want_entropy else output["entropy"]
    statistics = output.get("router")
    if statistics is not None and policy.sequence_group is not None:
        gathered = policy.sequence_group.gather_tokens(statistics.reshape(-1))
        statistics = gathered.view(policy.sequence_parallel, *statistics.shape).sum(0)
    return Scored(logps, entropy, logps.new_empty(0)), statistics
