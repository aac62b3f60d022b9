"""Engines that sample while the policy moves on: what they read may be older than their weights."""

import pytest
import torch

import shardproof as sp
from shardproof.rl.drift import MismatchWatch
from shardproof.rl.handover import hand_over
from shardproof.rl.proofs import Proof
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.kept import KeptTurns
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.trajectory import Trajectory
from tests.models import make_checkpoint
from tests.museum.pieces import piece
from tests.ranks import run_ranks, run_ranks_outcomes

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

# A system prompt that every request begins with, also the canary.
PROMPT = tuple((5 * at * at + 3) % 101 for at in range(40))
SAMPLING = Sampling(8)


class NeverForgets(KeptTurns):
    """NeMo RL 4018: keys and values of a prompt are found again whichever weights computed them."""

    def at(self, version):
        return self

    def clear(self):
        """Nothing: new weights leave the cache as it is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("ahead"), "llama"))


def first_version(folder, kept):
    """A policy and its engine, which has answered a prompt at the first version of the weights."""
    policy = sp.load(folder, compute_dtype=torch.float32)
    engine = EmbeddedEngine(policy)
    engine.kept = kept(2**30)
    engine.load_weights(sp.WeightStream(policy, torch.float32))
    generate(engine, [Request(Trajectory.of_prompt(PROMPT), 3, continues=True)], SAMPLING)
    assert len(engine.kept) == 1
    return policy, engine


def update(policy):
    result = sp.train_step(policy, sp.Batch([list(PROMPT)]), sp.make_optimizer(policy, lr=0.02))
    assert result.stepped


def sync_after_an_update(folder, kept):
    policy, engine = first_version(folder, kept)
    update(policy)
    canary = Request(Trajectory.of_prompt(PROMPT), 1)
    weights = sp.WeightStream(policy, torch.float32)
    return hand_over(engine, weights, canary, SAMPLING, 1e-3, Proof())["canary/gap"]


@piece("nemo-rl-4018")
def test_nemo_rl_4018_the_canary_reads_what_older_weights_computed(folder):
    assert max(run_ranks(2, sync_after_an_update, folder, KeptTurns)) < 1e-4
    for kind, error, message in run_ranks_outcomes(2, sync_after_an_update, folder, NeverForgets):
        assert (kind, error) == ("error", "RolloutFault")
        assert message.startswith(
            "R503 sync: after version 1 engine and trainer log-probs of the canary differ"
        )


def mismatch_of_steps(folder, kept, num_steps):
    """The mismatch KL of each step, as an update would report it, if nothing but the mismatch were looked at."""
    policy, engine = first_version(folder, kept)
    found = []
    for step in range(num_steps):
        # As in the story: nothing changes for a while, and then the policy moves on while the cache does not.
        if step >= num_steps // 2:
            update(policy)
            engine.load_weights(sp.WeightStream(policy, torch.float32))
        (said,) = generate(engine, [Request(Trajectory.of_prompt(PROMPT), step)], SAMPLING)
        (row,) = sp.logprobs(policy, [list(said.tokens)])
        gap = row[len(PROMPT) - 1 :] - torch.tensor(said.sampled[-1].logprobs)
        found.append(float((torch.expm1(gap) - gap).mean()))
    return found


@piece("nemo-rl-4018")
def test_nemo_rl_4018_the_mismatch_grows_from_step_to_step(folder):
    for kept, codes in ((KeptTurns, []), (NeverForgets, ["R510"])):
        (steps,) = run_ranks(1, mismatch_of_steps, folder, kept, 48)
        watch = MismatchWatch()
        said = [f for k, kl in enumerate(steps) for f in watch.see(k, {"mismatch/kl": kl})]
        assert [finding.code for finding in said] == codes
