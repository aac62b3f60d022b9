"""How a model can be scored: found out once, by comparing a few tokens with the model's own forward."""

from __future__ import annotations

import logging
import math

import torch
import torch.distributed as dist

from shardproof.bounds import within
from shardproof.dist.collectives import exchange
from shardproof.dist.deadline import is_lost
from shardproof.errors import fail
from shardproof.model.attention import PACKED
from shardproof.model.compiling import forget_compiled, is_compiled, uncompiled
from shardproof.model.exact import is_exact
from shardproof.model.exact_attention import PACKED as EXACT_PACKED
from shardproof.model.families import max_positions, num_experts, why_not_packed
from shardproof.model.head import HeadFacts, can_chunk, head_facts
from shardproof.model.roles import VALUED
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch
from shardproof.train.forward import Scoring, evaluating, score, scoring_context, vocabulary_size
from shardproof.train.probe import Probe, Yardstick, make_probe
from shardproof.train.state import training_state

logger = logging.getLogger(__name__)

_COMPILED_PROBE = 256  # tokens of each sequence on which compiled blocks are compared
_COMPILED_ERROR = 0.05  # on average, where more is at stake and rounding alone makes less
_COMPILED_NOISE = 2.0  # times what rounding puts between two right ways of scoring


def scoring_of(policy: ShardedModel) -> Scoring:
    """How this model can be scored, found out once by comparing a few tokens with the model's own forward.

    Collective: every rank, the first time.
    """
    state = training_state(policy)
    if state.scoring is None:
        # Compiled, every candidate would be compiled.
        with uncompiled():
            state.scoring, yardstick, noise = _find_scoring(policy)
        if is_compiled(policy.model):
            # In 16 bits a large model with random weights differs from itself by more than the usual limit.
            limit = min(max(_COMPILED_ERROR, _COMPILED_NOISE * noise), yardstick.largest_mean)
            _check_compiled(policy, state.scoring, limit)
    return state.scoring


def _find_scoring(policy: ShardedModel) -> tuple[Scoring, Yardstick, float]:
    """(how to score, how far scores may be off, how far this way is from the model's own on average)."""
    refused = why_not_packed(policy.model.config)
    own, candidates = _ways(policy, refused)
    probe = make_probe(vocabulary_size(policy), max_positions(policy.model.config))
    # Autocast would put its own noise between two ways that agree.
    exact = torch.autocast(policy.device.type, enabled=False)
    with torch.no_grad(), evaluating(policy), exact:
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
            problem, noise = _problem(policy, probe, candidate, yardstick)
            if all(exchange(problem is None or not finite)):
                return candidate, yardstick, noise if math.isfinite(noise) else 0.0
            problems.append(problem or "it differs on another rank")
    if policy.sequence_parallel > 1:
        message = f"{policy.model.config.model_type!r} cannot run with sequence parallelism: {[*problems, refused][0]}."
        raise fail("T303", "score", message, fix="load it with sequence_parallel=1")
    if is_exact(policy.model):
        message = f"{policy.model.config.model_type!r} cannot run in exact mode: {[*problems, refused][0]}."
        raise fail("T303", "score", message, fix="set rollout.exact=false")
    return own, yardstick, 0.0


def _ways(policy: ShardedModel, refused: str | None) -> tuple[Scoring, list[Scoring]]:
    """(the model's own way of scoring, faster ones that may say the same, the fastest first)."""
    chunked = (
        policy.role not in VALUED
        and policy.model.base_model is not policy.model
        and can_chunk(policy.model.get_output_embeddings())
    )
    # Eager attention is each family's own definition; SDPA leaves out what it does not know, such as soft caps.
    own = Scoring(
        "eager", False, refused or "only eager attention and the model's own head give the right scores"
    )
    candidates = [
        Scoring(None, chunked, refused or "packed attention differs from the model's own"),
        Scoring("eager", chunked, refused or "the attention it was loaded with differs from the model's own"),
    ]
    if refused is None:
        candidates.insert(0, Scoring(PACKED, chunked, "packed sequences"))
    if is_exact(policy.model):
        # An engine gets the logits that the model makes; in chunks, a scale or a cap would be rounded differently.
        plain = chunked and head_facts(policy.model.config) == HeadFacts()
        candidates = [Scoring(EXACT_PACKED, plain, "packed sequences, exactly")] if refused is None else []
    if policy.sequence_parallel > 1:
        # Anything but packed attention would compute the whole batch on every rank of a group.
        candidates = candidates[:1] if refused is None else []
    return own, candidates


def _problem(
    policy: ShardedModel, probe: Probe, scoring: Scoring, yardstick: Yardstick
) -> tuple[str | None, float]:
    """(what is wrong with a way of scoring: it fails, says something else, or lets sequences see each other; how far off
    it is on average).

    Collective: every rank.
    """
    found = _probe(policy, probe.batch, scoring)
    if isinstance(found, str):
        return found, 0.0
    problem = yardstick.error(found)
    for at, variant in probe.variants.items() if scoring.packed else ():
        again = _probe(policy, variant, scoring)
        if isinstance(again, str):
            return again, 0.0
        problem = problem or yardstick.leak(probe.change_of_others(at, found, again))
    return problem, yardstick.mean_distance(found)


def _check_compiled(policy: ShardedModel, scoring: Scoring, limit: float) -> None:
    """Keep compiled blocks only if they say what the blocks say as they are written. Collective: every rank."""
    length = min(_COMPILED_PROBE, max_positions(policy.model.config) or _COMPILED_PROBE)
    vocabulary = vocabulary_size(policy)
    probe = Batch([[(17 * i + 3 * n + 1) % vocabulary for i in range(length)] for n in range(4)])
    problem: str | None = f"sequences are not packed ({scoring.reason})"
    if scoring.packed:
        logger.info("compiling the %s's blocks and comparing them with the uncompiled ones ...", policy.role)
        with torch.no_grad(), evaluating(policy):
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
        if is_lost(error) or (scoring.attention == "eager" and not scoring.chunked):
            raise
        first, *more = str(error).splitlines()
        return f"{first} {more[0]}" if first.endswith(":") and more else first
    return torch.cat([row.values if policy.role in VALUED else row.logps for row in rows])
