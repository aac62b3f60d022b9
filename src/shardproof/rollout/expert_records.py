"""From the experts that an engine returned to those that a batch replays, and the proof that they are the same.

A token's experts are those with which it was read to draw the token after it. The last token of a turn has been read by
nobody when the turn ends; the next turn reads it. So a turn's record goes on where that of the turn before ended.
Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardproof.errors import fail
from shardproof.rollout.experts import Experts, ExpertShape
from shardproof.rollout.trajectory import Trajectory

NO_RECORD = -1  # in a batch, in the place of the experts of a token that no engine read


def num_recorded(trajectory: Trajectory) -> int:
    """How many of a sequence's first tokens have a record."""
    records = [segment.experts for segment in trajectory.segments if segment.experts is not None]
    return records[-1].stop if records else 0


def new_record(trajectory: Trajectory, rows: np.ndarray, layers: Sequence[int]) -> Experts:
    """What is new in `rows`, the experts [tokens, layers, chosen] of all tokens of a sequence that an engine has read.

    Tokens that an earlier turn recorded keep what they were drawn with, also if the engine has read them again.
    """
    first = num_recorded(trajectory)
    return Experts(first, rows[first:], layers)


def sequence_experts(trajectory: Trajectory, shape: ExpertShape) -> np.ndarray:
    """The experts of each token of a sequence, [tokens, layers, chosen] in 16 bits; `NO_RECORD` where nobody read it.

    Raises R511 if a turn has no record, or one that does not fit its tokens or the policy's routers.
    """
    end = sum(len(segment.tokens) for segment in trajectory.segments)
    sizes = len(shape.layers), shape.num_chosen
    every = np.full((end, *sizes), NO_RECORD, np.int16)
    covered = place = turn = 0
    for segment in trajectory.segments:
        place += len(segment.tokens)
        if segment.author != "policy" or not segment.tokens:
            continue
        turn += 1
        found = segment.experts
        where = f"{_name(trajectory)}, turn {turn}"
        if found is None:
            fix = "use an engine that records them (docs/routing-replay.md), or set rollout.replay_experts to false"
            raise fail("R511", "rollout", f"{where}: the engine returned no experts.", fix=fix)
        if (found.layers, found.rows.shape[1:]) != (shape.layers, sizes):
            has = f"layers {list(found.layers)} and {found.rows.shape[-1]} experts per token"
            message = (
                f"{where}: its experts are of {has}, the policy has {list(shape.layers)} and {sizes[1]}."
            )
            raise fail("R511", "rollout", message)
        if (found.start, found.stop) != (covered, place - 1):
            message = f"{where}: its experts are of tokens {found.start} to {found.stop - 1}, expected {covered} to {place - 2}."
            raise fail("R511", "rollout", message)
        if found.digest != found.computed_digest():
            raise fail(
                "R511", "rollout", f"{where}: its experts have changed since the engine returned them."
            )
        _check_experts(where, found, shape)
        every[found.start : found.stop] = found.rows
        covered = found.stop
    return every


def _check_experts(where: str, found: Experts, shape: ExpertShape) -> None:
    """Raise if a number is not an expert's, or a token visits one twice."""
    ordered = np.sort(found.rows, axis=-1)
    wrong = (ordered[..., -1] >= shape.num_experts) | (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if wrong.any():
        token, layer = np.argwhere(wrong)[0].tolist()
        chosen = found.rows[token, layer].tolist()
        message = f"{where}, token {found.start + token} of the sequence, layer {shape.layers[layer]}: experts {chosen} are not {shape.num_chosen} different ones of {shape.num_experts}."
        raise fail("R511", "rollout", message)


def experts_difference(batch: np.ndarray | None, sampled: Experts | None) -> str | None:
    """What in a sequence's experts is not as the engine returned it for a turn; None if nothing is."""
    if sampled is None:
        return None
    if batch is None:
        return "the engine returned experts, but the batch has none to replay."
    here = batch[sampled.start : sampled.stop]
    if here.shape != sampled.rows.shape:
        return f"the batch has experts of shape {list(here.shape)}, the engine returned {list(sampled.rows.shape)}."
    same = (here == sampled.rows).all(-1)
    if same.all():
        return None
    token, layer = np.argwhere(~same)[0].tolist()
    has, wanted = here[token, layer].tolist(), sampled.rows[token, layer].tolist()
    place = f"token {sampled.start + token} of the sequence, layer {sampled.layers[layer]}"
    return f"{place}: the batch replays experts {has}, the engine chose {wanted}."


def unrecorded(batch: np.ndarray, first: int) -> str | None:
    """What is wrong with experts behind place `first`, where no engine has read a token; None if there are none."""
    found = np.argwhere((batch[first:] != NO_RECORD).any(axis=(1, 2)))
    if not len(found):
        return None
    return f"token {first + int(found[0, 0])} of the sequence: the batch replays experts, but no engine has read it."


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.sample} of prompt {trajectory.group}"
