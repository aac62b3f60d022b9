"""Scoring: log-probs, entropies and values of given tokens, the same number in every layout."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, overload

import torch
import torch.distributed as dist

from shardproof.bounds import require_number, within
from shardproof.dist.collectives import exchange, raise_together, together
from shardproof.errors import fail
from shardproof.findings import Finding
from shardproof.model import hf_private
from shardproof.model.attention import PACKED
from shardproof.model.compiling import forget_compiled, is_compiled, uncompiled
from shardproof.model.families import max_positions, num_experts, why_not_packed
from shardproof.model.head import can_chunk, head_facts
from shardproof.model.lora import adapters_off
from shardproof.model.roles import CRITIC
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import reshard, staying_gathered
from shardproof.train.batching import Batch, check_batch, spread
from shardproof.train.inputs import Inputs
from shardproof.train.loss import Scored
from shardproof.train.probe import Probe, Yardstick, make_probe

logger = logging.getLogger(__name__)

_DEFAULT_TOKENS = 16384
_COMPILED_PROBE = 256  # tokens of each sequence on which compiled blocks are compared
_COMPILED_ERROR = 0.05  # on average, where more is at stake


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
        return self.attention == PACKED


@overload
def logprobs(
    policy: ShardedModel,
    sequences: Sequence[Sequence[int]],
    temperature: float = ...,
    adapters: bool = ...,
    entropy: Literal[False] = ...,
    micro_batch_tokens: int = ...,
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
) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...


def logprobs(
    policy: ShardedModel,
    sequences: Sequence[Sequence[int]],
    temperature: float = 1.0,
    adapters: bool = True,
    entropy: bool = False,
    micro_batch_tokens: int = _DEFAULT_TOKENS,
) -> list[torch.Tensor] | tuple[list[torch.Tensor], list[torch.Tensor]]:
    """log p(token t + 1 | tokens <= t) of this rank's sequences, without gradients; with `entropy` also that.

    A sequence of n tokens gives n - 1 values. `adapters=False` scores with the LoRA base. A value that is not finite
    raises on every rank, naming role, rank and position.

    Collective: every rank; ranks of one sequence-parallel group pass the same sequences.
    """
    if policy.role == CRITIC:
        raise fail("C001", "logprobs", "a critic has values, not log-probs; use shardproof.values.")
    scored = _score_all(policy, sequences, temperature, adapters, entropy, micro_batch_tokens)
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


def _score_all(
    policy: ShardedModel,
    sequences: Sequence[Sequence[int]],
    temperature: float,
    adapters: bool,
    want_entropy: bool,
    micro_batch_tokens: int,
) -> list[Scored]:
    with together("score"):
        policy.check_resident("score")
        batch = Batch(sequences)
        check_batch(batch, vocabulary=vocabulary_size(policy), max_length=max_positions(policy.model.config))
        require_number("score", "temperature", temperature, above=0)
    check_same_in_group(policy, batch)
    scoring = scoring_of(policy)
    results: dict[int, Scored] = {}
    with torch.no_grad(), _evaluating(policy), scoring_context(policy, scoring), ExitStack() as stack:
        if not adapters:
            stack.enter_context(adapters_off(policy.model))
        if policy.settings.reshard_after_forward is False:
            stack.enter_context(staying_gathered(policy.module))
        for micro_batch, indices in spread(batch, micro_batch_tokens, one_by_one=not scoring.packed):
            scored, _ = score(
                policy, micro_batch, scoring, temperature=temperature, want_entropy=want_entropy
            )
            results.update(zip(indices, _split(scored, micro_batch.lengths), strict=True))
    # FSDP2 keeps its root gathered after a forward without gradients; whoever looks at parameters next wants shards.
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
                    f"{what} {float(row[bad[0]])} of the {policy.role} in sequence {index} at position {int(bad[0])}; "
                    f"{len(bad)} of {len(row)} are not finite."
                )
                findings.append(Finding("T301", "score", message, rank=dist.get_rank()))
                break
    raise_together(findings)


def check_same_in_group(policy: ShardedModel, batch: Batch) -> None:
    """Raise unless the ranks of each sequence-parallel group have the same sequences. Collective: every rank."""
    size = policy.sequence_parallel
    if size == 1:
        return
    digests = exchange(hashlib.sha256(str(batch.sequences).encode()).hexdigest())
    for rank, found in enumerate(digests):
        if found != digests[rank - rank % size]:
            message = f"it has other sequences than rank {rank - rank % size}, which is in its sequence-parallel group."
            raise fail(
                "C004", "batch", message, rank=rank, fix="pass the same sequences on the ranks of a group"
            )


def vocabulary_size(policy: ShardedModel) -> int:
    """How many tokens the model's embedding has."""
    # The embedding's shape is that of the whole table only in the inventory; the module holds a shard.
    embedding = policy.model.get_input_embeddings()
    name = next(name for name, module in policy.model.named_modules() if module is embedding)
    shapes = {alias: info.shape for info in policy.inventory.parameters for alias in info.names}
    clean = name.replace("_fsdp_wrapped_module.", "")
    return shapes.get(f"{clean}.weight", shapes.get(f"{clean}.base_layer.weight", (2**31,)))[0]


@contextmanager
def _evaluating(policy: ShardedModel) -> Iterator[None]:
    was_training = policy.module.training
    if was_training:
        policy.module.eval()
    try:
        yield
    finally:
        if was_training:
            policy.module.train()


@contextmanager
def scoring_context(policy: ShardedModel, scoring: Scoring) -> Iterator[None]:
    """The model attends as `scoring` says inside the block, which must hold the backward pass too."""
    if scoring.attention is None:
        yield
        return
    with hf_private.attention_implementation(policy.model, scoring.attention):
        yield


def score(
    policy: ShardedModel,
    micro_batch: Batch,
    scoring: Scoring,
    *,
    temperature: float = 1.0,
    want_entropy: bool = False,
    want_router: bool = False,
) -> tuple[Scored, torch.Tensor | None]:
    """What the model says about a micro-batch's predictions, in one row, and the router's statistics if wanted.

    An empty micro-batch runs a dummy sequence, so that this rank takes part in every collective; its row is empty.

    Collective: every rank.
    """
    inputs = Inputs(policy, micro_batch, scoring.packed, every_token=want_router)
    if policy.role == CRITIC:
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


def scoring_of(policy: ShardedModel) -> Scoring:
    """How this model can be scored, found out once by comparing a few tokens with the model's own forward.

    Collective: every rank, the first time.
    """
    if policy.scoring is None:
        # Compiled, every candidate would be compiled.
        with uncompiled():
            policy.scoring, yardstick = _find_scoring(policy)
        if is_compiled(policy.model):
            _check_compiled(policy, policy.scoring, min(_COMPILED_ERROR, yardstick.largest_mean))
    return policy.scoring


def _find_scoring(policy: ShardedModel) -> tuple[Scoring, Yardstick]:
    refused = why_not_packed(policy.model.config)
    own, candidates = _ways(policy, refused)
    probe = make_probe(vocabulary_size(policy), max_positions(policy.model.config))
    # Autocast would put its own noise between two ways that agree.
    exact = torch.autocast(policy.device.type, enabled=False)
    with torch.no_grad(), _evaluating(policy), exact:
        truth, joined = _probe(policy, probe.batch, own), _probe(policy, probe.joined, own)
        assert isinstance(truth, torch.Tensor) and isinstance(joined, torch.Tensor)
        at_stake = probe.at_stake(truth, joined)
        has_experts = num_experts(policy.model.config) is not None
        yardstick = Yardstick(truth, at_stake, policy.settings.compute_dtype, has_experts)
        # A truth that is not finite on some rank is reported where the user's own tokens are scored. Under sequence
        # parallelism it spoils what the others compute too, which would look like a way of scoring that differs.
        finite = all(exchange(bool(torch.isfinite(truth).all()) and math.isfinite(at_stake)))
        problems = []
        for candidate in candidates:
            problem = _problem(policy, probe, candidate, yardstick)
            if all(exchange(problem is None or not finite)):
                return candidate, yardstick
            problems.append(problem or "it differs on another rank")
    if policy.sequence_parallel > 1:
        message = f"{policy.model.config.model_type!r} cannot run with sequence parallelism: {[*problems, refused][0]}."
        raise fail("T303", "score", message, fix="load it with sequence_parallel=1")
    return own, yardstick


def _ways(policy: ShardedModel, refused: str | None) -> tuple[Scoring, list[Scoring]]:
    """(the model's own way of scoring, faster ones that may say the same, the fastest first)."""
    chunked = (
        policy.role != CRITIC
        and policy.model.base_model is not policy.model
        and can_chunk(policy.model.get_output_embeddings())
    )
    # Eager attention is each family's own definition; SDPA leaves out what it does not know, such as soft caps.
    own = Scoring("eager", False, refused or "only the model's own head and eager attention agree with it")
    candidates = [
        Scoring(None, chunked, refused or "packed attention differs from the model's own"),
        Scoring("eager", chunked, refused or "the attention it was loaded with differs from the model's own"),
    ]
    if refused is None:
        candidates.insert(0, Scoring(PACKED, chunked, "packed sequences"))
    if policy.sequence_parallel > 1:
        # Anything but packed attention would compute the whole batch on every rank of a group.
        candidates = candidates[:1] if refused is None else []
    return own, candidates


def _problem(policy: ShardedModel, probe: Probe, scoring: Scoring, yardstick: Yardstick) -> str | None:
    """What is wrong with a way of scoring: it fails, says something else, or lets sequences see each other.

    Collective: every rank.
    """
    found = _probe(policy, probe.batch, scoring)
    if isinstance(found, str):
        return found
    problem = yardstick.error(found)
    for at, variant in probe.variants.items() if scoring.packed else ():
        again = _probe(policy, variant, scoring)
        if isinstance(again, str):
            return again
        problem = problem or yardstick.leak(probe.change_of_others(at, found, again))
    return problem


def _check_compiled(policy: ShardedModel, scoring: Scoring, limit: float) -> None:
    """Keep compiled blocks only if they say what the blocks say as they are written. Collective: every rank."""
    length = min(_COMPILED_PROBE, max_positions(policy.model.config) or _COMPILED_PROBE)
    vocabulary = vocabulary_size(policy)
    probe = Batch([[(17 * i + 3 * n + 1) % vocabulary for i in range(length)] for n in range(4)])
    problem: str | None = f"sequences are not packed ({scoring.reason})"
    if scoring.packed:
        with torch.no_grad(), _evaluating(policy):
            found = _probe(policy, probe, scoring)
            with uncompiled():
                truth = _probe(policy, probe, scoring)
        if isinstance(found, str):
            problem = found
        else:
            assert isinstance(truth, torch.Tensor)  # the blocks as written have just been found to work
            # Single tokens differ by what 16 bits cannot say; all of them together hardly do.
            error = float((found - truth).abs().mean())
            finite = bool(torch.isfinite(truth).all())
            fits = within(error, limit) or not finite
            problem = None if fits else f"log-probs differ by {error:.3g} on average"
    problems = [each for each in exchange(problem) if each is not None]
    if problems:
        forget_compiled(policy.model)
        if dist.get_rank() == 0:
            logger.warning("the %s's blocks are not compiled: %s", policy.role, problems[0])


def _probe(policy: ShardedModel, probe: Batch, scoring: Scoring) -> torch.Tensor | str:
    """The probe's row under one way of scoring, or why that way does not work."""
    parts = [probe] if scoring.packed else [probe.select([i]) for i in range(len(probe))]
    try:
        with scoring_context(policy, scoring):
            rows = [score(policy, part, scoring)[0] for part in parts]
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError) as error:
        if scoring.attention == "eager" and not scoring.chunked:
            raise
        first, *more = str(error).splitlines()
        return f"{first} {more[0]}" if first.endswith(":") and more else first
    return torch.cat([row.values if policy.role == CRITIC else row.logps for row in rows])
