"""Experts from an engine to a batch: bound to tokens and layers, proved before the update, and named if they are not."""

import json
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest

import shardproof as sp
from shardproof.errors import ShardproofError
from shardproof.rollout.engine import Request
from shardproof.rollout.expert_records import NO_RECORD, new_record, num_recorded, sequence_experts
from shardproof.rollout.experts import Experts, ExpertShape
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Segment, Trajectory

SHAPE = ExpertShape(layers=(1, 3), num_experts=6, num_chosen=2)


def some_experts(num_tokens, draws):
    return np.array([[draws.sample(range(6), 2) for _ in SHAPE.layers] for _ in range(num_tokens)], np.uint8)


def turn(asked, ledger, draws):
    """What an engine does that reads everything again in each turn: other experts for what it has read before."""
    tokens = [draws.randrange(100) for _ in range(4)]
    rows = some_experts(len(asked.tokens) + len(tokens) - 1, draws)
    record = new_record(asked, rows, SHAPE.layers)
    answered = Request(asked, 0).answered(tokens, [-1.0] * len(tokens), True, 3, experts=record)
    ledger.record(asked, answered)
    return answered


def converse(seed=0):
    draws, ledger = random.Random(seed), TokenLedger()
    said = turn(Trajectory.of_prompt((5, 6, 7), 2, 1), ledger, draws)
    said = turn(said.extended(Segment((8, 9), "environment")), ledger, draws)
    return said, ledger


def batch_of(said):
    masks = [[float(segment.trained) for segment in said.segments for _ in segment.tokens]]
    return sp.Batch([said.tokens], mask=masks).with_experts([sequence_experts(said, SHAPE)])


def test_each_token_has_the_experts_that_it_was_first_read_with():
    said, ledger = converse()
    first, second = (segment.experts for segment in said.sampled)
    num = len(said.segments[0].tokens) + len(said.segments[1].tokens)
    # The first turn's last token is read by the second turn.
    assert (first.start, first.stop, second.start, second.stop) == (0, num - 1, num - 1, len(said.tokens) - 1)
    assert num_recorded(said) == len(said.tokens) - 1
    found = sequence_experts(said, SHAPE)
    assert np.array_equal(found[:-1], np.concatenate([first.rows, second.rows]))
    assert (found[-1] == NO_RECORD).all()
    assert sp.attest_batch(batch_of(said), [said], ledger) == []


def test_a_record_survives_files_and_processes():
    said, _ = converse()
    again = Trajectory.from_json(json.loads(json.dumps(said.to_json())))
    assert again == said == pickle.loads(pickle.dumps(said))
    for one, other in zip(said.sampled, again.sampled, strict=True):
        assert one.experts == other.experts and np.array_equal(one.experts.rows, other.experts.rows)
        assert other.experts.computed_digest() == one.experts.digest
    assert Trajectory.from_json(Trajectory.of_prompt((1, 2)).to_json()).segments[0].experts is None


def test_records_differ_by_place_layers_and_experts():
    rows = some_experts(4, random.Random(0))
    record = Experts(0, rows, (1, 3))
    others = [Experts(1, rows, (1, 3)), Experts(0, rows, (1, 2)), Experts(0, rows[::-1], (1, 3))]
    assert record == Experts(0, rows.copy(), (1, 3)) and hash(record) == hash(Experts(0, rows, (1, 3)))
    assert all(other != record for other in others)
    with pytest.raises(ValueError, match="read-only"):
        record.rows[0, 0, 0] = 5


# Faults: what does not belong to the tokens is named with trajectory, turn, layer and token.


def with_experts(said, number, change):
    """The conversation, with the record of one of its turns replaced."""
    segments = list(said.segments)
    at = [k for k, segment in enumerate(segments) if segment.author == "policy"][number]
    segments[at] = replace(segments[at], experts=change(segments[at].experts))
    return replace(said, segments=tuple(segments))


def swapped(rows):
    rows = rows.copy()
    rows[[0, 1]] = rows[[1, 0]]
    return rows


def twice(rows):
    rows = rows.copy()
    rows[2, 1] = 4
    return rows


def too_large(rows):
    rows = rows.copy()
    rows[1, 0, 1] = 6
    return rows


FAULTS = {
    "missing": (lambda e: None, "turn 2: the engine returned no experts"),
    "too short": (
        lambda e: Experts(e.start, e.rows[:-1], e.layers),
        "turn 2: its experts are of tokens 6 to",
    ),
    "of other tokens": (
        lambda e: Experts(e.start + 1, e.rows, e.layers),
        "turn 2: its experts are of tokens 7 to",
    ),
    "of other layers": (lambda e: Experts(e.start, e.rows, (0, 1)), "turn 2: its experts are of layers"),
    "of one layer": (lambda e: Experts(e.start, e.rows[:, :1], (1,)), "turn 2: its experts are of layers"),
    "changed": (
        lambda e: Experts(e.start, swapped(e.rows), e.layers, e.digest),
        "turn 2: its experts have changed",
    ),
    "twice": (
        lambda e: Experts(e.start, twice(e.rows), e.layers),
        r"turn 2, token 8 of the sequence, layer 3: experts \[4, 4\] are not 2 different ones of 6",
    ),
    "no expert": (
        lambda e: Experts(e.start, too_large(e.rows), e.layers),
        r"turn 2, token 7 of the sequence, layer 1: experts \[\d, 6\] are not",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_record_that_does_not_fit_is_named(fault):
    change, expected = FAULTS[fault]
    said, _ = converse()
    assert said.sampled[1].experts.start == 6
    with pytest.raises(ShardproofError, match=f"R511.*trajectory 1 of prompt 2, {expected}"):
        sequence_experts(with_experts(said, 1, change), SHAPE)


def test_experts_of_another_conversation_are_found_by_the_ledger():
    said, ledger = converse()
    other = with_experts(said, 0, lambda e: Experts(e.start, swapped(e.rows), e.layers))
    (finding,) = sp.attest_batch(batch_of(other), [other], ledger)
    assert finding.code == "R511"
    assert "trajectory 1 of prompt 2, turn 1, token 0 of the sequence, layer 1" in finding.message
    assert "the batch replays experts" in finding.message and "the engine chose" in finding.message


def shifted(experts):
    experts[0][7, 1, 0] += 1


def of_the_last(experts):
    experts[0][-1] = 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (shifted, "turn 2, token 7 of the sequence, layer 3: the batch replays"),
        (of_the_last, "of the sequence: the batch replays experts, but no engine has read it"),
    ],
)
def test_experts_that_changed_in_the_batch_are_found(change, expected):
    said, ledger = converse()
    batch = batch_of(said)
    change(batch.experts)
    (finding,) = sp.attest_batch(batch, [said], ledger)
    assert finding.code == "R511" and expected in finding.message


def test_a_batch_without_the_engines_experts_is_found():
    said, ledger = converse()
    batch = sp.Batch([said.tokens], mask=batch_of(said).columns["mask"])
    (finding,) = sp.attest_batch(batch, [said], ledger)
    assert finding.code == "R511" and "the batch has none to replay" in finding.message
