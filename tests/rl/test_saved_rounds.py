"""What a run goes on with of what was sampled ahead: rewards that failed, or that others gave, are asked for again."""

from dataclasses import replace

from shardproof.rl.known import Known
from shardproof.rl.saved_rounds import _to_go_on_with
from shardproof.rollout.trajectory import Reward, Segment, Trajectory

ASKED, SAID = Segment((1, 2), "prompt"), Segment((5, 6), "policy", (-1.0, -1.0), 3)
GOOD = Trajectory((ASKED, SAID), reward=Reward(1.0, {"a": 1.0}))
# Also where it counts for nothing: what is shown of it would be another number.
FAILED = replace(GOOD, reward=Reward(1.0, {"a": 1.0, "b": 0.0}, {"b": "KeyError"}))
LOST = replace(GOOD, ended="failed", reward=Reward(0.0, {"environment": 0.0}, {"environment": "down"}, True))


def test_rewards_that_failed_or_that_others_gave_are_asked_for_again():
    known = {(2, 0, 0): Known(GOOD), (2, 0, 1): Known(FAILED), (2, 1, 0): Known(LOST), (2, 1, 1): Known()}
    again = {**known, (2, 0, 1): Known(replace(GOOD, reward=None))}
    assert _to_go_on_with(known, True) == again
    assert _to_go_on_with(known, False) == {**again, (2, 0, 0): Known(replace(GOOD, reward=None))}


def test_a_round_of_which_every_environment_failed_begins_again():
    drawn = Known(begun=SAID)
    known = {(2, 0, 0): Known(LOST), (3, 0, 0): Known(LOST), (3, 0, 1): Known(GOOD), (2, 0, 1): drawn}
    kept = _to_go_on_with(known, True)
    assert kept == {key: known[key] for key in ((3, 0, 0), (3, 0, 1), (2, 0, 1))}


def test_what_was_drawn_goes_on_from_its_tokens_if_it_is_no_conversation():
    assert Known(GOOD).drawn == Known(begun=SAID).drawn == SAID
    assert Known(replace(GOOD, ended="done")).drawn is None and Known().drawn is None
