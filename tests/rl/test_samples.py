"""What is kept of a step's completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from shardproof.rl.batches import make_batch
from shardproof.rl.experience import Experience
from shardproof.rl.samples import sample_lines
from shardproof.rollout.trajectory import Reward, Segment, Trajectory
from shardproof.train.batching import Batch


def spell(tokens: Sequence[int]) -> str:
    """Text of tokens: a word for each."""
    return " ".join(f"<{token}>" for token in tokens)


def made(group: int, sample: int, reward: float, **facts: object) -> Trajectory:
    segments = (Segment((1, 2), "prompt"), Segment((3, 4), "policy", (-0.1, -0.2), 0, trained=True))
    return Trajectory(
        segments,
        group,
        sample,
        text=f"answer {sample}",
        reward=Reward(reward, {"exact": reward}),
        facts={"prompt": f"question {group}", **facts},
    )


def test_groups_stay_together_and_the_first_line_has_the_rewards_of_all():
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (3, 0): 0.5, (3, 1): 0.5}
    trajectories = [made(group, sample, reward) for (group, sample), reward in rewards.items()]
    found = list(sample_lines(Experience(trajectories, Batch([[1, 2, 3, 4]] * 4)), spell))
    assert [(line["group"], line["sample"], line["reward"]) for line in found] == [
        (*k, v) for k, v in rewards.items()
    ]
    assert [line.get("group_rewards") for line in found] == [[1.0, 0.0], None, [0.5, 0.5], None]
    assert found[2]["prompt"] == "question 3" and found[3]["completion"] == "answer 1"
    assert found[0]["rewards"] == {"exact": 1.0}
    assert "answer" not in found[0] and "advantage" not in found[0]


def test_the_advantage_is_the_mean_over_trained_tokens():
    batch = Batch([[1, 2, 3, 4]], mask=[[0, 0, 1, 1]], advantages=[[9.0, 9.0, 1.0, 2.0]])
    (line,) = sample_lines(Experience([made(0, 0, 1.0)], batch), spell)
    assert line["advantage"] == pytest.approx(1.5)
    nothing = Batch([[1, 2, 3, 4]], mask=[[0, 0, 0, 0]], advantages=[1.0])
    (line,) = sample_lines(Experience([made(0, 0, 1.0)], nothing), spell)
    assert "advantage" not in line


def test_a_long_answer_is_cut_and_any_answer_is_text():
    trajectories = [made(0, 0, 1.0, answer="x" * 5000), made(1, 0, 1.0, answer=[1, 2])]
    first, second = sample_lines(Experience(trajectories, Batch([[1, 2]] * 2)), spell)
    assert len(first["answer"]) == 1000 and second["answer"] == "[1, 2]"


def test_where_a_completion_came_from_is_said_where_engines_run_ahead():
    plain = made(0, 0, 1.0)
    (line,) = sample_lines(Experience([plain], Batch([[1, 2, 3, 4]])), spell)
    assert not {"versions", "replica", "drawn_for", "pieces"} & set(line)
    parts = ((1, 4), (2, 5))
    drawn = Segment((3, 4, 5), "policy", (-0.1, -0.2, -0.3), 4, trained=True, parts=parts)
    moved = replace(made(0, 0, 1.0, replica="vllm-1", drawn_for=7), segments=(plain.segments[0], drawn))
    (line,) = sample_lines(Experience([moved], Batch([[1, 2, 3, 4, 5]])), spell)
    assert (line["versions"], line["replica"], line["drawn_for"]) == ([[1, 4], [2, 5]], "vllm-1", 7)
    assert [piece["text"] for piece in line["pieces"]] == ["<3>", " <4> <5>"]
    assert [piece["version"] for piece in line["pieces"]] == [4, 5]
    whole = replace(made(0, 0, 1.0, drawn_for=3), segments=plain.segments)
    (line,) = sample_lines(Experience([whole], Batch([[1, 2, 3, 4]])), spell)
    assert line["versions"] == [[2, 0]] and "pieces" not in line


def test_a_letter_of_several_bytes_belongs_to_the_part_that_ends_it():
    def decode(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    tokens = tuple("aé!".encode())
    parts = ((2, 1), (1, 2), (1, 3))
    drawn = Segment(tokens, "policy", (0.0,) * 4, 1, trained=True, parts=parts)
    given = replace(made(0, 0, 1.0), segments=(Segment((1, 2), "prompt"), drawn))
    (line,) = sample_lines(Experience([given], Batch([[1, 2, *tokens]])), decode)
    assert [piece["text"] for piece in line["pieces"]] == ["a", "é", "!"]


def conversation(ended: str = "done") -> Trajectory:
    """Two turns: a call that is answered, and one that is malformed."""
    segments = (
        Segment((1, 2), "prompt"),
        Segment((3, 4, 5), "policy", (-0.1, -0.2, -0.3), 7, trained=True, reward=0.5),
        Segment((6,), "template"),
        Segment((8, 9), "environment"),
        Segment((10, 11), "policy", (-0.1, -0.2), 8, trained=True),
    )
    turns = [
        {
            "text": "add(1, 2)",
            "calls": [
                {"name": "add", "arguments": {"a": 1, "b": 2}, "id": "x"},
                {"name": "sub", "arguments": {}},
            ],
            "malformed": [],
            "reward": 0.5,
            "reply": [
                {"role": "tool", "content": "3"},
                {"role": "tool", "content": "Error: there is no tool 'sub'."},
            ],
        },
        {"text": "add(", "calls": [], "malformed": ["it has no end"], "reward": 0.0, "reply": []},
    ]
    facts = {"prompt": "1 + 2", "turns": turns, "environment": {"seconds": 0.1, "facts": {}, "error": ""}}
    return Trajectory(segments, 4, 1, text="3", reward=Reward(1.5, {}), facts=facts, ended=ended)


def test_a_conversation_has_its_segments_as_the_tokens_say_them():
    said = conversation()
    batch = make_batch([said]).with_column(
        "advantages", [torch.tensor([0.0, 2.0, 2.0, 2.0, 0, 0, 0, 1.0, 1.0])]
    )
    (line,) = sample_lines(Experience([said], batch), spell)
    assert line["ended"] == "done" and "error" not in line and line["advantage"] == 1.6
    prompt, first, template, reply, second = line["segments"]
    assert prompt == {"author": "prompt", "text": "<1> <2>", "tokens": 2, "trained": False}
    assert template["author"] == "template" and reply["text"] == "<8> <9>" and not reply["trained"]
    assert (first["text"], first["trained"], first["turn"]) == ("<3> <4> <5>", True, 1)
    assert (first["version"], first["reward"], first["advantage"]) == (7, 0.5, 2.0)
    assert first["calls"] == [
        {"name": "add", "arguments": '{"a": 1, "b": 2}', "answer": "3", "failed": False},
        {"name": "sub", "arguments": "{}", "answer": "Error: there is no tool 'sub'.", "failed": True},
    ]
    assert second["malformed"] == ["it has no end"] and second["turn"] == 2 and "calls" not in second
    assert "sequence" not in first


def test_what_the_mask_leaves_out_is_not_trained():
    said = conversation("turns")
    batch = make_batch([said])
    batch = batch.with_column("mask", [torch.zeros(9)])
    (line,) = sample_lines(Experience([said], batch), spell)
    assert [segment["trained"] for segment in line["segments"]] == [False] * 5


def test_a_split_conversation_has_all_its_sequences_and_the_next_line_its_own_place():
    first = conversation()
    second = Trajectory(
        (Segment((20, 21), "prompt"), Segment((22,), "policy", (-0.5,), 8, trained=True)), 4, 1
    )
    said = replace(first, segments=second.segments, earlier=(replace(first, earlier=()),))
    other = made(5, 0, 1.0)
    batch = make_batch([*said.sequences, other])
    batch = batch.with_column("advantages", [row * k for k, row in enumerate(batch.columns["mask"], 1)])
    one, two = sample_lines(Experience([said, other], batch), spell)
    assert [segment["sequence"] for segment in one["segments"]] == [1] * 5 + [2, 2]
    assert [segment["turn"] for segment in one["segments"] if segment["author"] == "policy"] == [1, 2, 3]
    assert one["advantage"] == pytest.approx((5 * 1 + 1 * 2) / 6, abs=1e-4)
    assert two["advantage"] == 3.0 and "segments" not in two


def test_a_conversation_that_failed_says_why_and_long_texts_are_cut():
    said = conversation("failed")
    said = replace(said, facts={**said.facts, "environment": {"error": "turn 1: KeyError: 'x'"}})
    (line,) = sample_lines(Experience([said], make_batch([said])), lambda tokens: "y" * 5000)
    assert line["error"] == "turn 1: KeyError: 'x'" and line["ended"] == "failed"
    assert line["segments"][0]["text"] == "y" * 4000 + " … and 1000 more characters"
