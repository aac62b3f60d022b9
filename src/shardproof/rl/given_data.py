"""The data of a recipe whose algorithm does not sample, by what its rows hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from shardproof.config.schema import Recipe
from shardproof.model.families import max_positions
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.data import HeldOutPrompts, Prompt, Share
from shardproof.rl.labelled import LabelledData
from shardproof.rl.offline import OfflineData
from shardproof.rl.pairs import PairData
from shardproof.rl.reward_pairs import RewardPairs
from shardproof.rl.scorers import Scorers
from shardproof.rl.sft import CompletionData

logger = logging.getLogger(__name__)


def make_offline(
    recipe: Recipe,
    algorithm: Algorithm,
    scorers: Scorers,
    share: Share,
    prompts: Sequence[Prompt],
    held_out: HeldOutPrompts,
) -> OfflineData | None:
    """What a recipe trains on without sampling; None if it samples.

    Where the reference scores all rows in advance, it does that here: the policy must have its first weights.
    Collective: every rank.
    """
    spec = algorithm.spec
    if spec.samples:
        return None
    # Given tokens were not drawn at any temperature.
    scorers = replace(scorers, temperature=1.0)
    if spec.role == "reward":
        return RewardPairs(algorithm, scorers.policy, recipe.train.micro_batch_tokens, share)
    if spec.given == "pairs":
        pairs = PairData(algorithm, scorers, share)
        if spec.has_preference and recipe.algorithm.preference.precompute:
            sources = [prompts, *held_out.values()]
            logger.info("the reference scores %d pairs ...", sum(map(len, sources)))
            pairs.precompute(sources)
        return pairs
    if spec.given == "labelled":
        context = max_positions(scorers.policy.model.config)
        limits = [limit for limit in (recipe.data.max_length, context) if limit is not None]
        limit = min(limits, default=None)
        return LabelledData(algorithm, scorers, share, recipe.data.label_column, limit)
    return CompletionData(scorers.policy, recipe.train.micro_batch_tokens, share)
