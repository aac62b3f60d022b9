"""Both drivers of conversations make the same trajectories: in waves, and each at its own pace."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardproof.rl.conversations.measures import reward_sample, with_environment
from shardproof.rl.conversations.steps import Start, with_text
from shardproof.rollout.engine import Request, answers
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Reward, Trajectory
from tests.ranks import run_ranks
from tests.rl.background_parts import SAMPLING, USERS, Letters, Parts, make_rules, making, starts_from


def untimed(trajectory: Trajectory) -> Trajectory:
    """Without the environment's seconds."""
    facts = dict(trajectory.facts)
    if "environment" in facts:
        facts["environment"] = {**facts["environment"], "seconds": 0.0}
    return replace(trajectory, facts=facts)


def in_waves(parts: Parts, starts: Sequence[Start], ledger: TokenLedger) -> list[Trajectory]:
    """What the driver of collective engines makes of the same starts."""
    found: dict[int, Trajectory] = {}
    if parts.conversations is None:
        asked = [Request(Trajectory.of_prompt(s.prompt.tokens, s.group, s.sample), s.seed) for s in starts]
        for ready in answers(parts.engine, asked, SAMPLING, ledger):
            found |= {place: with_text(t, starts[place].prompt, Letters()) for place, t in ready}
    else:
        for ready in parts.conversations.run(parts.engine, starts, SAMPLING, ledger):
            found |= dict(ready)
    scored = []
    for place, start in enumerate(starts):
        t, reward = found[place], Reward(0.0)
        if t.ended != "failed":
            (reward,) = parts.rewards.score([reward_sample(t, start.prompt.row)])
        scored.append(replace(t, reward=with_environment(t, reward, False)))
    return scored


def compare_with_waves(folder: str, environment: bool) -> int:
    """On a rank: both drivers make the same trajectories and record the same turns; how many there were."""
    sys.path.insert(0, folder)
    rows = [{"turns": 1 + n % 3, "answer": "a", "do": "raise" if n % 5 == 4 else ""} for n in range(10)]
    starts = starts_from(rows, 3)
    with making(environment, ["exact_match", "talking_users:score"]) as parts:
        before, ledger = TokenLedger(), TokenLedger()
        expected = in_waves(parts, starts, before)
        parts.engine.held = True
        batch = parts.background.begin(starts, SAMPLING, ledger)
        while batch.num_in_progress:
            if parts.engine.waiting:
                parts.engine.answer(parts.engine.waiting[-1])
        found = batch.wait()
        assert [untimed(found[place]) for place in range(30)] == [untimed(t) for t in expected]
        for t in expected:
            assert ledger.turns(t.group, t.sample) == before.turns(t.group, t.sample)
        sys.path.remove(folder)
        return len({t.ended for t in expected}) * len(ledger)


@pytest.mark.invariant
def test_trajectories_are_those_of_the_waves_in_whatever_order_answers_come(user_module):
    users = user_module("talking_users", USERS)
    assert run_ranks(1, compare_with_waves, str(users), False) == [30]
    (found,) = run_ranks(1, compare_with_waves, str(users), True)
    assert found > 3 * 30, "some ended by themselves, some by a limit, and some failed"


def turns_with_little_room(folder: str) -> list[list[int]]:
    """On a rank: how many turns conversations of both drivers have, where rows may say less than the run allows."""
    sys.path.insert(0, folder)
    starts = [
        replace(start, prompt=replace(start.prompt, sampling=own))
        for start, own in zip(starts_from([{"turns": 4}] * 2), [None, {"max_new_tokens": 2}], strict=True)
    ]
    with making(True, rules=make_rules(max_tokens=14), length=1) as parts:
        waves = in_waves(parts, starts, TokenLedger())
        found = parts.background.begin(starts, SAMPLING).wait()
    sys.path.remove(folder)
    return [[len(made[n].facts["turns"]) for n in range(2)] for made in (waves, found)]


def test_a_rows_own_length_decides_whether_another_turn_fits(user_module):
    """4 tokens are asked, and each turn of one token is followed by 3: a turn of 8 fits behind 4 tokens of 14 alone."""
    (found,) = run_ranks(1, turns_with_little_room, str(user_module("talking_users", USERS)))
    assert found == [[1, 3], [1, 3]]
