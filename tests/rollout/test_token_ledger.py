"""The token ledger: a batch that trains on anything else than what was sampled is found, and the fault is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.errors import ShardproofError
from shardproof.rl.batches import make_batch
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.token_ledger import TokenLedger, compare_batch
from shardproof.rollout.trajectory import Reward, Segment, Trajectory
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes

Made = tuple[list[Trajectory], TokenLedger]


def turn(asked: Trajectory, ledger: TokenLedger, draws: random.Random, version: int = 3) -> Trajectory:
    """What an engine does: a few tokens at the end, and a record of them."""
    tokens = [draws.randrange(1000) for _ in range(draws.randrange(2, 6))]
    logps = [-draws.random() for _ in tokens]
    answered = Request(asked, 0).answered(tokens, logps, True, version)
    ledger.record(asked, answered)
    return answered


def converse(group: int, sample: int, ledger: TokenLedger, draws: random.Random) -> Trajectory:
    """Three turns, with tokens of the template and of the environment between them."""
    said = Trajectory.of_prompt(tuple(draws.randrange(1000) for _ in range(5)), group, sample)
    said = turn(said, ledger, draws)
    for _ in range(2):
        said = said.extended(Segment((1, 2), "template"))
        said = said.extended(
            Segment(tuple(draws.randrange(1000) for _ in range(draws.randrange(1, 4))), "environment")
        )
        said = turn(said, ledger, draws)
    return replace(said, reward=Reward(1.0))


def conversations(seed: int = 0, num: int = 4) -> Made:
    draws, ledger = random.Random(seed), TokenLedger()
    return [converse(k // 2, k % 2, ledger, draws) for k in range(num)], ledger


def interrupted() -> Made:
    """Two turns of five tokens each; weights changed while each of them was drawn."""
    ledger, said = TokenLedger(), Trajectory.of_prompt((9, 8, 7), 1, 0)
    for first, parts in ((10, ((2, 3), (3, 4))), (20, ((1, 4), (2, 5), (2, 6)))):
        tokens = range(first, first + 5)
        answered = Request(said, 0).answered(tokens, [-0.5] * 5, True, parts[0][1], parts)
        ledger.record(said, answered)
        said = answered.extended(Segment((1,), "environment"))
    return [replace(answered, reward=Reward(1.0))], ledger


def split_conversation() -> Made:
    """Two turns whose template dropped the first turn's thought: two sequences of one conversation."""
    draws, ledger = random.Random(1), TokenLedger()
    first = turn(Trajectory.of_prompt((9, 8, 7), 5, 1), ledger, draws)
    rewritten = Trajectory.of_prompt((9, 8, 7, *first.sampled[0].tokens[-1:], 1, 2), 5, 1)
    second = turn(rewritten, ledger, draws)
    return [replace(second, earlier=(first,), reward=Reward(0.5))], ledger


def batch_of(trajectories: list[Trajectory]) -> sp.Batch:
    return make_batch([part for t in trajectories for part in t.sequences])


def test_what_was_sampled_is_proved_and_counted():
    trajectories, ledger = conversations()
    batch = batch_of(trajectories)
    assert sp.attest_batch(batch, trajectories, ledger) == []
    found = compare_batch(batch, trajectories, ledger)
    num = sum(t.num_sampled for t in trajectories)
    assert (found.num_conversations, found.num_turns, found.num_tokens) == (4, 12, num)
    assert found.num_trained == num == int(batch.flat_mask().sum())
    assert len(ledger) == 12
    ledger.clear()
    assert len(ledger) == 0


def test_a_split_conversation_is_proved_sequence_by_sequence():
    trajectories, ledger = split_conversation()
    batch = batch_of(trajectories)
    assert len(batch) == 2
    assert sp.attest_batch(batch, trajectories, ledger) == []
    assert sp.attest_batch(batch, trajectories[0].sequences, ledger) == []


def test_a_later_sequence_may_repeat_a_turn_for_reading_only():
    draws, ledger = random.Random(1), TokenLedger()
    first = turn(Trajectory.of_prompt((9, 8, 7), 5, 1), ledger, draws)
    again = Trajectory(
        (Segment((9, 8, 7, 6), "prompt"), replace(first.segments[1], trained=False)), group=5, sample=1
    )
    second = turn(again.extended(Segment((4,), "environment")), ledger, draws)
    trajectories = [replace(second, earlier=(first,))]
    batch = batch_of(trajectories)
    assert sp.attest_batch(batch, trajectories, ledger) == []
    batch.columns["mask"][1][4] = 1.0
    (finding,) = sp.attest_batch(batch, trajectories, ledger)
    assert (
        "before turn 1, token 5 of the sequence: its mask is 1, but it was not sampled (author: policy)"
        in finding.message
    )


def test_a_conversation_that_failed_before_its_first_turn_has_nothing_to_prove():
    failed = Trajectory.of_prompt((1, 2), 0, 0).extended(Segment((), "policy", (), 0))
    assert sp.attest_batch(batch_of([failed]), [failed], TokenLedger()) == []


# Faults: each changes what is trained, and says what must be named.


def token_replaced(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    at = 5 + 1
    was, batch.sequences[1][at] = batch.sequences[1][at], 1234
    return f"trajectory 1 of prompt 0, turn 1, token 1: the batch has 1234, the engine sampled {was}."


def tokens_swapped(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    row = batch.sequences[0]
    row[5], row[6] = row[6], row[5]
    return f"trajectory 0 of prompt 0, turn 1, token 0: the batch has {row[5]}, the engine sampled {row[6]}."


def turn_tokenised_again(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    """The same text as fewer tokens: everything behind it moves."""
    tokens = trajectories[2].segments[1].tokens
    again = Segment((777, *tokens[2:]), "policy", (-0.1,) * (len(tokens) - 1), 3, trained=True)
    segments = (trajectories[2].segments[0], again, *trajectories[2].segments[2:])
    trajectories[2] = replace(trajectories[2], segments=segments)
    return "trajectory 0 of prompt 1, turn 1, token 0: the batch has 777"


def logprob_altered(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    batch.columns["rollout_logps"][3][5] = -2.5
    return "trajectory 1 of prompt 1, turn 1, token 1: the batch has log-prob -2.5, the engine's is -0."


def version_altered(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    segments = [*trajectories[0].segments]
    segments[-1] = replace(segments[-1], version=4)
    trajectories[0] = replace(trajectories[0], segments=tuple(segments))
    return "trajectory 0 of prompt 0, turn 3: the batch has it from weights of version 4, the engine sampled it from version 3."


def mask_on_the_environment(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    at = sum(len(s.tokens) for s in trajectories[1].segments[:3])
    batch.columns["mask"][1][at - 1] = 1.0
    return f"trajectory 1 of prompt 0, after turn 1, token {at} of the sequence: its mask is 1, but it was not sampled (author: environment)"


def mask_on_the_template(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    at = sum(len(s.tokens) for s in trajectories[1].segments[:2])
    batch.columns["mask"][1][at - 1] = 1.0
    return "its mask is 1, but it was not sampled (author: template)"


def mask_on_the_prompt(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    batch.columns["mask"][2][0] = 1.0
    return "trajectory 0 of prompt 1, before turn 1, token 1 of the sequence: its mask is 1, but it was not sampled (author: prompt)"


def mask_shifted(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    batch.columns["mask"] = [mask.roll(1) for mask in batch.columns["mask"]]
    return "trajectory 0 of prompt 0, turn 1, token 0: it was sampled, but its mask is 0. Masked are 1 of "


def turn_masked(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    num = len(trajectories[0].segments[1].tokens)
    batch.columns["mask"][0][4 : 4 + num] = 0.0
    return f"trajectory 0 of prompt 0, turn 1, token 0: it was sampled, but its mask is 0. Masked are {num} of {num} tokens"


def context_rewritten(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    """The template dropped a thought of the first turn before the second was trained."""
    segments = trajectories[3].segments
    shorter = replace(segments[1], tokens=segments[1].tokens[1:], logprobs=segments[1].logprobs[1:])
    prompt = replace(segments[0], tokens=(*segments[0].tokens, *shorter.tokens))
    trajectories[3] = replace(trajectories[3], segments=(prompt, *segments[2:]))
    return "trajectory 1 of prompt 1, turn 1, token 0: the batch has "


def environment_rewritten(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    at = sum(len(s.tokens) for s in trajectories[0].segments[:3])
    was, batch.sequences[0][at] = batch.sequences[0][at], 4321
    return f"turn 2, token {at} of what it follows: the batch has 4321, the engine read {was}. It is in sequence 0 of the batch."


def samples_swapped(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    rows = batch.sequences
    rows[0], rows[1] = rows[1], rows[0]
    return f"trajectory 0 of prompt 0, turn 1, token 0 of what it follows: the batch has {rows[0][0]}, the engine read {rows[1][0]}."


def labels_swapped(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    trajectories[0], trajectories[1] = (
        replace(trajectories[0], sample=1),
        replace(trajectories[1], sample=0),
    )
    return "trajectory 1 of prompt 0, turn 1, token 0 of what it follows: the batch has "


def turn_trained_twice(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    trajectories.append(trajectories[0])
    return "trajectory 0 of prompt 0, turn 4: the batch has it, but the engine sampled 3 turns of this conversation. It is in sequence 4 of the batch."


def last_turn_dropped(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    num = len(trajectories[1].segments[-1].tokens)
    trajectories[1] = replace(trajectories[1], segments=trajectories[1].segments[:-1])
    return f"trajectory 1 of prompt 0, turn 3: its {num} sampled tokens are in no sequence of the batch."


def last_token_dropped(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    last = trajectories[1].segments[-1]
    shorter = replace(last, tokens=last.tokens[:-1], logprobs=last.logprobs[:-1])
    trajectories[1] = replace(trajectories[1], segments=(*trajectories[1].segments[:-1], shorter))
    return (
        f"turn 3, token {len(shorter.tokens)}: the batch has nothing, the engine sampled {last.tokens[-1]}."
    )


def sequence_missing(batch: sp.Batch, trajectories: list[Trajectory]) -> str:
    batch.sequences.pop()
    for column in batch.columns.values():
        column.pop()
    return "the batch has 3 sequences, the trajectories have 4."


EDITS = [token_replaced, tokens_swapped, logprob_altered, mask_on_the_environment, mask_on_the_template]
EDITS += [mask_on_the_prompt, mask_shifted, turn_masked, environment_rewritten, samples_swapped]
EDITS += [version_altered, labels_swapped, sequence_missing]
# These change the trajectories, and the batch is made of what is left.
REBUILT = [turn_tokenised_again, context_rewritten, turn_trained_twice, last_turn_dropped, last_token_dropped]


@pytest.mark.fault
@pytest.mark.parametrize("fault", [*EDITS, *REBUILT], ids=lambda fault: fault.__name__)
def test_a_fault_names_trajectory_turn_and_token(fault: Callable[..., str]):
    trajectories, ledger = conversations()
    batch = batch_of(trajectories)
    expected = fault(batch, trajectories)
    if fault in REBUILT:
        batch = batch_of(trajectories)
    findings = sp.attest_batch(batch, trajectories, ledger)
    assert findings and {(f.code, f.stage) for f in findings} == {("R507", "attest")}
    assert expected in findings[0].message
    per_conversation = 2 if fault in (samples_swapped, labels_swapped) else 1
    assert len(findings) == (4 if fault is mask_shifted else per_conversation)


@pytest.mark.fault
def test_a_split_turn_that_is_left_out_or_behind_other_tokens_is_found():
    trajectories, ledger = split_conversation()
    only_last = [replace(trajectories[0], earlier=())]
    (finding,) = sp.attest_batch(batch_of(only_last), only_last, ledger)
    assert "trajectory 1 of prompt 5, turn 1, token" in finding.message
    batch = batch_of(trajectories)
    batch.sequences[1][3] = 5000
    (finding,) = sp.attest_batch(batch, trajectories, ledger)
    assert "turn 2, token 3 of what it follows: the batch has 5000" in finding.message


@pytest.mark.fault
@pytest.mark.parametrize(
    ("parts", "version", "said"),
    [
        (((2, 4), (1, 5), (2, 6)), 4, "turn 2, token 1: the batch has it from weights of version 4, the engine sampled it from version 5."),
        (((1, 4), (2, 5), (2, 7)), 4, "turn 2, token 3: the batch has it from weights of version 7, the engine sampled it from version 6."),
        (((1, 4), (2, 5)), 4, "turn 2, token 3: the batch has it from weights of version nothing, the engine sampled it from version 6."),
        ((), 4, "turn 2, token 1: the batch has it from weights of version 4, the engine sampled it from version 5."),
        (((1, 4), (2, 5), (2, 6)), 5, "turn 2: the batch has it from weights of version 5, the engine sampled it from version 4."),
    ],
)  # fmt: skip
def test_the_version_of_every_token_is_compared(parts, version, said):
    trajectories, ledger = interrupted()
    batch = batch_of(trajectories)
    assert sp.attest_batch(batch, trajectories, ledger) == []
    (trajectory,) = trajectories
    changed = replace(trajectory.segments[-1], parts=parts, version=version)
    other = replace(trajectory, segments=(*trajectory.segments[:-1], changed))
    (finding,) = sp.attest_batch(batch, [other], ledger)
    assert finding.code == "R507" and f"trajectory 0 of prompt 1, {said}" in finding.message


def test_parts_of_one_version_are_the_same_as_none():
    trajectories, ledger = conversations(num=1)
    last = trajectories[0].segments[-1]
    same = replace(last, parts=((1, 3), (len(last.tokens) - 1, 3)))
    trajectories[0] = replace(trajectories[0], segments=(*trajectories[0].segments[:-1], same))
    assert sp.attest_batch(batch_of(trajectories), trajectories, ledger) == []


@pytest.mark.parametrize("seed", range(40))
def test_any_single_change_of_what_is_trained_is_found(seed):
    draws = random.Random(seed)
    trajectories, ledger = conversations(seed)
    batch = batch_of(trajectories)
    row = draws.randrange(len(batch))
    trained = torch.nonzero(batch.columns["mask"][row]).flatten().tolist()
    at = draws.choice(trained)
    what = draws.choice(["token", "context", "logprob", "mask", "mask elsewhere"])
    if what == "token":
        batch.sequences[row][at + 1] += draws.choice([-1, 1]) * draws.randrange(1, 500)
    elif what == "context":
        batch.sequences[row][draws.randrange(trained[-1] + 2)] += 1
    elif what == "logprob":
        old = float(batch.columns["rollout_logps"][row][at])
        new = torch.nextafter(torch.tensor(old), torch.tensor(draws.choice([-9.0, 9.0])))
        batch.columns["rollout_logps"][row][at] = new
    elif what == "mask":
        batch.columns["mask"][row][at] = draws.choice([0.0, 0.5, 2.0, float("nan")])
    else:
        others = [k for k in range(len(batch.sequences[row]) - 1) if k not in trained]
        batch.columns["mask"][row][draws.choice(others)] = 1.0
    (finding,) = sp.attest_batch(batch, trajectories, ledger)
    where = trajectories[row]
    assert finding.message.startswith(f"trajectory {where.sample} of prompt {where.group}, "), what


def test_what_is_deliberately_left_out_may_have_a_mask_of_zeros():
    trajectories, ledger = conversations()
    batch = batch_of(trajectories)
    trajectories[0] = replace(trajectories[0], reward=Reward(0.0, failed=True))
    trajectories[1] = replace(trajectories[1], reward=Reward(1.0, left_out=True))
    for row in (0, 1):
        batch.columns["mask"][row][:] = 0.0
    segments = list(trajectories[2].segments)
    segments[1] = replace(segments[1], trained=False)
    trajectories[2] = replace(trajectories[2], segments=tuple(segments))
    batch.columns["mask"][2][4 : 4 + len(segments[1].tokens)] = 0.0
    assert sp.attest_batch(batch, trajectories, ledger) == []
    batch.columns["mask"][3][4] = 0.0
    (finding,) = sp.attest_batch(batch, trajectories, ledger)
    assert "trajectory 1 of prompt 1, turn 1, token 0: it was sampled, but its mask is 0." in finding.message
    assert sp.attest_batch(batch, trajectories, ledger, whole_turns=False) == []


def test_a_batch_without_log_probs_of_the_engine_is_compared_in_the_rest():
    trajectories, ledger = conversations()
    whole = batch_of(trajectories)
    batch = sp.Batch(whole.sequences, mask=whole.columns["mask"])
    assert sp.attest_batch(batch, trajectories, ledger) == []
    no_mask = sp.Batch(whole.sequences)
    assert (
        "its mask is 1, but it was not sampled (author: prompt)"
        in sp.attest_batch(no_mask, trajectories, ledger)[0].message
    )


# What an engine may return.


def asked() -> Trajectory:
    return Trajectory.of_prompt((1, 2, 3), 4, 2).extended(Segment((5, 6), "environment"))


def right(request: Trajectory, **changes: Any) -> Trajectory:
    return request.extended(Segment((7, 8), "policy", (-0.5, -0.25), 0, trained=True, **changes))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (asked(), "R500", "appended nothing, expected one policy segment"),
        (right(right(asked())), "R500", "appended policy, policy, expected one policy segment"),
        (asked().extended(Segment((7,), "environment")), "R500", "appended environment"),
        (asked().extended(Segment((7,), "policy")), "R500", "has no log-probs for 1 tokens"),
        (
            asked().extended(Segment((7, 8), "policy", (-1.0,))),
            "R500",
            "has 1 log-probs for 2 tokens",
        ),
        (right(asked(), parts=((1, 0), (2, 1))), "R500", "has parts ((1, 0), (2, 1)) for 2 tokens"),
        (right(asked(), parts=((2, 0), (0, 1))), "R500", "has parts ((2, 0), (0, 1)) for 2 tokens"),
        (right(asked(), parts=((1, 1), (1, 2))), "R500", "has version 0, its oldest part 1"),
        (replace(right(asked()), sample=3), "R500", "belongs to trajectory 3 of prompt 4"),
        (
            right(Trajectory.of_prompt((1, 2, 9), 4, 2).extended(Segment((5, 6), "environment"))),
            "R507",
            "changed segment 0, which it was to continue: token 2 was 3 and is now 9.",
        ),
        (
            right(Trajectory.of_prompt((1, 2, 3), 4, 2).extended(Segment((5, 6), "template"))),
            "R507",
            "changed segment 1, which it was to continue: its tokens are the same, but not its author",
        ),
    ],
)
def test_an_engine_only_appends_one_turn_of_the_policy(answer, code, said):
    with pytest.raises(ShardproofError) as caught:
        TokenLedger().record(asked(), answer)
    assert caught.value.code == code and said in str(caught.value)
    assert "the engine's answer to trajectory 2 of prompt 4" in str(caught.value)


class Rewrites:
    """A user's engine that, on rank 1, makes the prompt anew."""

    busy = False
    version = 0

    def submit(self, requests: Any, sampling: Any) -> list[int]:
        self.requests, self.busy = requests, True
        return list(range(len(requests)))

    def poll(self) -> list[tuple[int, Trajectory]]:
        self.busy = False
        answers = [request.answered([7], [-0.5], True, 0) for request in self.requests]
        if torch.distributed.get_rank() == 1:
            answers[1] = replace(answers[1], segments=(Segment((1, 9), "prompt"), *answers[1].segments[1:]))
        return list(enumerate(answers))


def ask_rewriting_engine() -> None:
    engine: Any = Rewrites()
    generate(engine, [Request(Trajectory.of_prompt((1, 2), k), k) for k in range(2)], Sampling(4))


@pytest.mark.fault
@pytest.mark.distributed
def test_an_engine_that_rewrites_what_it_read_is_named_on_every_rank():
    first, second = run_ranks_outcomes(2, ask_rewriting_engine)
    assert first == second and first[1] == "RolloutFault"
    assert (
        "R507 generate: rank 1: the engine's answer to trajectory 0 of prompt 1 changed segment 0" in first[2]
    )


def converse_with_the_embedded_engine(folder: str) -> dict[str, Any]:
    """Three turns of four conversations, while what is drawn is written down beside."""
    from shardproof.rollout import decode

    policy = sp.load(folder)
    engine = EmbeddedEngine(policy, 8)
    engine.load_weights(sp.WeightStream(policy, policy.settings.compute_dtype))
    drawn: dict[int, list[tuple[int, float]]] = {}
    draw = decode.draw

    def tapped(logits: torch.Tensor, seeds: Any, step: int, sampling: Sampling) -> Any:
        tokens, logprobs = draw(logits, seeds, step, sampling)
        for seed, token, logp in zip(seeds, tokens.tolist(), logprobs.tolist(), strict=True):
            drawn.setdefault(seed, []).append((token, logp))
        return tokens, logprobs

    ledger = TokenLedger()
    said = [Trajectory.of_prompt((3 + k, 4, 5), k // 2, k % 2) for k in range(4)]
    prompts = list(said)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "draw", tapped)
        for number in range(3):
            # Keys and values are kept between the turns.
            requests = [Request(t, 100 * number + k, number < 2) for k, t in enumerate(said)]
            said = generate(engine, requests, Sampling(6, stop_ids=(7, 9)), ledger)
            if number < 2:
                said = [t.extended(Segment((11, 12), "environment")) for t in said]
    # What was drawn, put together without looking at any trajectory.
    expected = []
    for k, prompt in enumerate(prompts):
        tokens = list(prompt.tokens)
        for number in range(3):
            tokens += [token for token, _ in drawn[100 * number + k]] + ([11, 12] if number < 2 else [])
        expected.append(tokens)
    logps = [[lp for n in range(3) for _, lp in drawn[100 * n + k]] for k in range(4)]
    batch = make_batch(said)
    kept = [
        column[mask.bool()].tolist()
        for column, mask in zip(batch.columns["rollout_logps"], batch.masks(), strict=True)
    ]
    return {
        "tokens": batch.sequences == expected,
        "logps": kept == logps,
        "findings": [f.message for f in sp.attest_batch(batch, said, ledger)],
        "turns": compare_batch(batch, said, ledger).num_turns,
    }


@pytest.mark.distributed
def test_a_batch_has_the_tokens_that_the_embedded_engine_drew(tmp_path):
    (found,) = run_ranks(
        1, converse_with_the_embedded_engine, str(make_checkpoint(tmp_path / "m", "qwen3_tied"))
    )
    assert found == {"tokens": True, "logps": True, "findings": [], "turns": 12}
