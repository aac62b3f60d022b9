"""Recorded experts are those that the model's routers choose for these tokens, in every way of decoding and over turns."""

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.model.routing import Routers
from shardproof.rl.batches import make_batch
from shardproof.rollout.decode import decode, last_logits
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.expert_records import sequence_experts
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.kept import GIB, KeptTurns
from shardproof.rollout.local import EmbeddedEngine, ShardedEngine
from shardproof.rollout.paged import graphs, steps
from shardproof.rollout.paged.cache import CacheShape
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.paged.model_step import attend_plain, why_not_paged
from shardproof.rollout.recording import Recorder, expert_shape
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Segment, Trajectory
from tests.models import make_checkpoint, make_model
from tests.ranks import run_ranks, run_ranks_outcomes

CPU = torch.device("cpu")
SAMPLING = Sampling(9, stop_ids=(5, 17, 33))
PROMPTS = [tuple((7 * row + 3 * at + at * at) % 101 for at in range(17 + 5 * row)) for row in range(3)]
FAMILIES = ("qwen3_moe", "deepseek_v3")


class Talk:
    """Conversations with one model, decoded one way."""

    def __init__(self, family, kept=None, blocks=None, num_tokens=SAMPLING.max_new_tokens):
        self.model = make_model(family)
        self.routers = Routers(self.model)
        self.routers.settle(lambda: self.model(torch.zeros(1, 2, dtype=torch.int64), use_cache=False))
        facts = self.routers.layers, self.routers.num_experts, self.routers.num_chosen
        self.shape = ExpertShape(*facts)
        self.recorder = Recorder(self.routers, self.shape)
        self.kept, self.num_tokens = kept, num_tokens
        self.paged = None
        if blocks is not None:
            gib = (blocks + 1.5) * CacheShape.of(self.model.config).block_bytes(self.model.dtype) / GIB
            self.paged = PagedDecoder(self.model, CPU, self.recorder, 4, gib)

    def turns(self, num):
        said = [
            Trajectory.of_prompt(p, number, sample) for number, p in enumerate(PROMPTS) for sample in (0, 1)
        ]
        for turn in range(num):
            if turn:
                said = [t.extended(Segment((3 + t.group, 4 + turn), "environment")) for t in said]
            said = self.complete([Request(t, 10 * turn + 2 * t.group + t.sample, True) for t in said])
        return said

    @torch.no_grad()
    def complete(self, requests):
        if self.kept is not None:
            self.kept.begin_wave()
        if self.paged is not None:
            sampling = Sampling(self.num_tokens, stop_ids=SAMPLING.stop_ids)
            return self.paged(requests, sampling, 0, self.kept)
        forward = partial(last_logits, self.model)
        options = {"config": self.model.config, "device": CPU, "version": 0, "kept": self.kept}
        return decode(forward, requests, SAMPLING, recorder=self.recorder, **options)

    def own(self, tokens):
        """The routers' choice for a whole sequence at once, the experts of each token in order."""
        with torch.no_grad(), self.routers.noting() as noted:
            self.model(torch.tensor([tokens]), use_cache=False)
        return np.sort(torch.stack([experts for _, experts in noted], 1).numpy(), -1)


def assert_own(talk, said):
    """All tokens but the last of each have their routers' choice, up to near ties."""
    total = same = 0
    for trajectory in said:
        found = sequence_experts(trajectory, talk.shape)
        assert (found[-1] == -1).all() and (found[:-1] >= 0).all()
        equal = np.sort(found[:-1], -1) == talk.own(trajectory.tokens)[:-1]
        total, same = total + equal.size, same + int(equal.sum())
    assert total > 300 and same >= 0.995 * total


WAYS = {
    "growing cache": {},
    "kept turns": {"kept": True},
    "paged cache": {"blocks": 50},
    "paged cache, kept turns": {"blocks": 50, "kept": True},
    "paged cache in which rows are put back": {"blocks": 3, "num_tokens": 60},
}


# Windows are not kept between turns.
CASES = [
    *(("qwen3_moe", way) for way in WAYS),
    *(("deepseek_v3", way) for way in ("growing cache", "kept turns")),
    *(("gpt_oss", way) for way in ("growing cache", "paged cache")),
]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_records_are_what_the_routers_choose(family, way):
    options = dict(WAYS[way])
    store = KeptTurns(GIB) if options.pop("kept", False) else None
    talk = Talk(family, store, **options)
    assert talk.paged is None or why_not_paged(talk.model) is None
    said = talk.turns(3)
    assert_own(talk, said)
    assert store is None or len(store)
    assert "put back" not in way or talk.paged.stats["put_back"]


def test_a_conversation_that_finds_anothers_prefix_has_all_its_experts():
    """The second batch's prompt is kept by conversations of the first: nothing reads it again, but it was recorded."""
    talk = Talk("qwen3_moe", KeptTurns(GIB))
    first = [Request(Trajectory.of_prompt(PROMPTS[2], 0, 0), 1, True)]
    second = [Request(Trajectory.of_prompt((*PROMPTS[2], 8, 9), 1, 0), 2, True)]
    for trajectory in (*talk.complete(first), *talk.complete(second)):
        found = sequence_experts(trajectory, talk.shape)
        assert np.array_equal(np.sort(found[:-1], -1), talk.own(trajectory.tokens)[:-1])


def test_records_of_steps_that_are_graphs(monkeypatch):
    """CUDA graphs where there is no CUDA: a step is run when it is captured and when it is replayed."""

    def capture(warm, step, device, pool):
        warm()
        return step

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "host_waits", lambda step, device: False)
    kernels = SimpleNamespace(attend_rotated=attend_plain)
    monkeypatch.setitem(sys.modules, "shardproof.rollout.paged.attention_kernels", kernels)
    monkeypatch.setattr(steps, "WORTH_CAPTURING", 1)
    talk = Talk("qwen3_moe", blocks=50)
    talk.paged.ways.attention = talk.paged.ways.graphs = True
    assert_own(talk, talk.turns(3))
    assert talk.paged.ways.graphs


def test_recording_changes_no_token_and_no_log_prob():
    talk = Talk("qwen3_moe")
    recorded = talk.turns(2)
    talk.recorder = None
    plain = talk.turns(2)
    assert [t.tokens for t in recorded] == [t.tokens for t in plain]
    for one, other in zip(recorded, plain, strict=True):
        assert [s.logprobs for s in one.sampled] == [s.logprobs for s in other.sampled]
        assert all(s.experts is None for s in other.sampled)


# Engines, and what is trained on.


def engines(folder, kind, strategy):
    """What engines record on two ranks, of which one has less to do, is proved, and is the policy's own choice."""
    policy = sp.load(folder, strategy=strategy, compute_dtype=torch.float32, progress=False)
    shape = expert_shape(policy)
    engine = (
        EmbeddedEngine(policy, 4, experts=shape) if kind == "embedded" else ShardedEngine(policy, 4, shape)
    )
    engine.load_weights(sp.WeightStream(policy, torch.float32))
    mine = PROMPTS[: 2 - dist.get_rank()]
    ledger = TokenLedger()
    requests = [
        Request(Trajectory.of_prompt(prompt, k, s), s, True) for k, prompt in enumerate(mine) for s in (0, 1)
    ]
    said = generate(engine, requests, SAMPLING, ledger)
    going = [t.extended(Segment((3, 4), "environment")) for t in said]
    said = generate(engine, [Request(t, 9 + t.sample) for t in going], SAMPLING, ledger)
    batch = make_batch(said, shape)
    findings = [finding.message for finding in sp.attest_batch(batch, said, ledger)]
    own = sp.logprobs(policy, batch.sequences)
    replayed = sp.logprobs(policy, batch.sequences, experts=batch.experts)
    gap = max(float((a - b).abs().max()) for a, b in zip(own, replayed, strict=True))
    if dist.get_rank() == 0:
        batch.experts[1][4, 1, 0] += 1
    broken = [(finding.code, finding.message) for finding in sp.attest_batch(batch, said, ledger)]
    return findings, gap, broken


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "strategy"), [("embedded", "fsdp1"), ("sharded", "fsdp2"), ("sharded", "fsdp1")]
)
def test_engines_record_what_the_policy_would_choose(tmp_path, kind, strategy):
    folder = make_checkpoint(tmp_path, "deepseek_v3")
    (first, *others) = run_ranks(2, engines, folder, kind, strategy)
    for findings, gap, _ in (first, *others):
        assert findings == [] and gap < 1e-4
    ((code, message),) = first[2]
    assert code == "R511" and "trajectory 1 of prompt 0, turn 1, token 4 of the sequence, layer 2" in message


def without_experts(folder):
    policy = sp.load(folder, compute_dtype=torch.float32, progress=False)
    shape = expert_shape(policy)
    engine = ShardedEngine(policy, 4, shape if dist.get_rank() == 0 else None)
    said = generate(engine, [Request(Trajectory.of_prompt(PROMPTS[0]), 0)], SAMPLING)
    make_batch(said, shape)


@pytest.mark.distributed
def test_an_engine_that_returns_no_experts_fails_on_every_rank(tmp_path):
    for outcome in run_ranks_outcomes(2, without_experts, make_checkpoint(tmp_path, "qwen3_moe")):
        assert "R511" in outcome[2] and "the engine returned no experts" in outcome[2]
        assert "rank 1" in outcome[2]


def shifted_engine(folder):
    """An engine whose routers were moved a little, as rounding or an update moves them: how far the policy is from it."""
    policy = sp.load(folder, compute_dtype=torch.float32, progress=False)
    shape = expert_shape(policy)
    engine = EmbeddedEngine(policy, 64, experts=shape)
    engine.load_weights(sp.WeightStream(policy, torch.float32))
    generator = torch.Generator().manual_seed(0)
    for name, param in engine.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            param.add_(0.01 * torch.randn(param.shape, generator=generator))
    requests = [
        Request(Trajectory.of_prompt(prompt, k, s), s) for k, prompt in enumerate(PROMPTS) for s in range(16)
    ]
    said = generate(engine, requests, Sampling(12))
    batch = make_batch(said, shape)
    drawn, mask = batch.flat("rollout_logps"), batch.flat_mask().bool()
    gaps = []
    for experts in (None, batch.experts):
        logps = torch.cat(sp.logprobs(policy, batch.sequences, experts=experts))
        gaps.append((logps - drawn)[mask])
    return [(float(gap.abs().mean()), float((gap.exp() - 1 - gap).mean())) for gap in gaps]


@pytest.mark.distributed
def test_replay_takes_away_what_other_experts_do_to_log_probs(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_moe", num_experts=16, num_experts_per_tok=2)
    (((own, own_kl), (replayed, replayed_kl)),) = run_ranks(1, shifted_engine, folder)
    assert 0 < replayed < own / 2 and replayed_kl < own_kl / 10
