"""Scoring: log-probs, entropies and values of given tokens, the same number in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal, overload

import torch
import torch.distributed as dist

from shardproof.bounds import require_number
from shardproof.dist.collectives import raise_together, together
from shardproof.errors import fail
from shardproof.findings import Finding
from shardproof.model.families import max_positions
from shardproof.model.lora import adapters_off
from shardproof.model.roles import CRITIC, REWARD, VALUED
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import reshard, staying_gathered
from shardproof.train.batching import Batch, batch_facts, check_batch, check_same_in_group, spread
from shardproof.train.forward import evaluating, score, scoring_context, vocabulary_size
from shardproof.train.loss import Scored
from shardproof.train.routing import replayed_routers
from shardproof.train.scoring import scoring_of

_DEFAULT_TOKENS = 16384


@overload
def logprobs(
    policy: ShardedModel,
    sequences: Sequence[Sequence[int]],
    temperature: float = ...,
    adapters: bool = ...,
    entropy: Literal[False] = ...,
    micro_batch_tokens: int = ...,
    experts: Sequence[torch.Tensor] | None = ...,
) -> list[torch.Tensor]: ...


@overload
def logprobs(
    policy: ShardedModel,
    sequences: Sequence[Sequence[int]],
    temperature: float = ...,
    adapters: bool = ...,
    *,
    entropy: Literal[True],
    micro_batch_tokens: int = ...,
    experts: Sequence[torch.Tensor] | None = ...,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...


def logprobs(
    policy: ShardedModel,
    sequences: Sequence[Sequence[int]],
    temperature: float = 1.0,
    adapters: bool = True,
    entropy: bool = False,
    micro_batch_tokens: int = _DEFAULT_TOKENS,
    experts: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor] | tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs of this rank's tokens, given the tokens before them, without gradients; with `entropy`, entropies too.

    A sequence of n tokens gives n - 1 values. `adapters=False` scores with the LoRA base. `experts`, as
    `Batch.with_experts` takes them, are chosen instead of the routers' own. A value that is not finite raises on every
    rank, naming role, rank and position.

    Collective: every rank; ranks of one sequence-parallel group pass the same sequences.
    """
    if policy.role in VALUED:
        name = "values" if policy.role == CRITIC else "scores"
        raise fail("C001", "logprobs", f"a {policy.role} has {name}, not log-probs; use shardproof.{name}.")
    scored = _score_all(policy, sequences, temperature, adapters, entropy, micro_batch_tokens, experts)
    logps = [each.logps for each in scored]
    _check_finite(policy, "log-prob", logps)
    return (logps, [each.entropy for each in scored]) if entropy else logps


def values(
    critic: ShardedModel, sequences: Sequence[Sequence[int]], micro_batch_tokens: int = _DEFAULT_TOKENS
) -> list[torch.Tensor]:
    """The critic's value at each position that predicts a token, without gradients: n - 1 values for n tokens.

    Collective: every rank.
    """
    if critic.role != CRITIC:
        raise fail("C001", "values", f"a {critic.role} has no value head; load it with role='critic'.")
    scored = _score_all(critic, sequences, 1.0, True, False, micro_batch_tokens)
    found = [each.values for each in scored]
    _check_finite(critic, "value", found)
    return found


def scores(
    reward: ShardedModel, sequences: Sequence[Sequence[int]], micro_batch_tokens: int = _DEFAULT_TOKENS
) -> torch.Tensor:
    """The reward model's score of each text, [sequences], without gradients: its value at the text's last token.

    Tokens at the end that are the config's `pad_token_id` are padding, as transformers' sequence classifiers take them.

    Collective: every rank; ranks of one sequence-parallel group pass the same sequences.
    """
    if reward.role != REWARD:
        raise fail("C001", "scores", f"a {reward.role} has no scores; load it with role='reward'.")
    padding = reward.model.config.get_text_config().pad_token_id
    scored = _score_all(
        reward, [scored_text(text, padding) for text in sequences], 1.0, True, False, micro_batch_tokens
    )
    found = [each.values[-1:] for each in scored]
    _check_finite(reward, "score", found)
    return torch.cat([torch.empty(0, device=reward.device), *found])


def scored_text(tokens: Sequence[int], padding: int | None) -> list[int]:
    """A text without padding at its end, and one token more: values are those of tokens that another one follows.

    What follows a token does not change its value.
    """
    last = len(tokens) - 1
    while last > 0 and tokens[last] == padding:
        last -= 1
    return [*tokens[: last + 1], *tokens[last : last + 1]]


def _score_all(
    policy: ShardedModel,
    sequences: Sequence[Sequence[int]],
    temperature: float,
    adapters: bool,
    want_entropy: bool,
    micro_batch_tokens: int,
    experts: Sequence[torch.Tensor] | None = None,
) -> list[Scored]:
    share = policy.sequence_parallel
    with together("score") as message:
        policy.check_resident("score")
        batch = Batch(sequences) if experts is None else Batch(sequences).with_experts(experts)
        check_batch(batch, vocabulary=vocabulary_size(policy), max_length=max_positions(policy.model.config))
        require_number("score", "temperature", temperature, above=0)
        message.mine = batch_facts(batch, micro_batch_tokens, share)
    check_same_in_group(message.rows, share)
    scoring, routers = scoring_of(policy), replayed_routers(policy, message.rows)
    results: dict[int, Scored] = {}
    with torch.no_grad(), evaluating(policy), ExitStack() as stack:
        stack.enter_context(scoring_context(policy, scoring, routers))
        if not adapters:
            stack.enter_context(adapters_off(policy.model))
        if policy.settings.reshard_after_forward is False:
            stack.enter_context(staying_gathered(policy.module))
        for micro_batch, indices in spread(batch, message.rows, one_by_one=not scoring.packed):
            scored, _ = score(
                policy,
                micro_batch,
                scoring,
                temperature=temperature,
                want_entropy=want_entropy,
                routers=routers,
            )
            results.update(zip(indices, _split(scored, micro_batch.lengths), strict=True))
    # The root stays gathered after a forward without gradients; whoever looks at parameters next wants shards.
    reshard(policy.module)
    return [results[index] for index in range(len(batch))]


def _split(scored: Scored, lengths: list[int]) -> list[Scored]:
    sizes = [length - 1 for length in lengths]
    if not sizes:
        return []
    parts = [
        row.split(sizes) if row.numel() else [row] * len(sizes)
        for row in (scored.logps, scored.entropy, scored.values)
    ]
    return [Scored(*part) for part in zip(*parts, strict=True)]


def _check_finite(policy: ShardedModel, what: str, rows: list[torch.Tensor]) -> None:
    """Raise on every rank if any rank has a value that is not finite. Collective: every rank."""
    findings = []
    if rows and not bool(torch.isfinite(torch.cat(rows)).all()):
        for index, row in enumerate(rows):
            bad = torch.nonzero(~torch.isfinite(row)).flatten()
            if len(bad):
                message = (
                    f"{what} of the {policy.role} in sequence {index} at position {int(bad[0])} is {float(row[bad[0]])}; "
                    f"{len(bad)} of {len(row)} are not finite."
                )
                findings.append(Finding("T301", "score", message, rank=dist.get_rank()))
                break
    raise_together(findings)
