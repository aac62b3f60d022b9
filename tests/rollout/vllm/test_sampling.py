"""A real vLLM draws from what we draw from: its log-probs are those of an independent computation, and it ends alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.sampling import Ends
from shardproof.rollout.stop_strings import StopStrings
from shardproof.rollout.trajectory import Trajectory
from tests.ranks import run_ranks
from tests.rollout.test_shaping import processed
from tests.rollout.vllm.conftest import tokenizer
from tests.rollout.vllm.support import PROMPTS, connect, load_policy, sync

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

PLAIN = Sampling(40, stop_ids=(7,))
SETTINGS = {
    "top_k": replace(PLAIN, top_k=5),
    "min_p": replace(PLAIN, min_p=0.3),
    "nucleus": replace(PLAIN, top_p=0.6, top_k=40, min_p=0.05),
    "penalties": replace(PLAIN, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4),
    # vLLM also holds back the model's own end of sequence, 2.
    "least": replace(PLAIN, stop_ids=(2, *range(0, 128, 4)), min_new_tokens=9),
}


def strings() -> StopStrings:
    text = tokenizer()
    return StopStrings([text.decode([40]), text.decode([9, 50]), "<end>", text.decode([20]) + "<end>"], text)


def drawn(folder: str, url: str) -> dict[str, Any]:
    policy = load_policy(folder)
    engine = connect(policy, url=url)
    sync(engine)
    requests = [Request(Trajectory.of_prompt(PROMPTS[k % 3]), seed=k) for k in range(6)]
    own = [replace(r, sampling=s) for s in SETTINGS.values() for r in requests]
    found: dict[str, Any] = {"shaped": generate(engine, own, PLAIN)}
    greedy = [replace(r, sampling=replace(SETTINGS["penalties"], temperature=0.0)) for r in requests[:3]]
    found["greedy"] = generate(engine, greedy, PLAIN)
    text = strings()
    found["plain"] = generate(engine, requests, Sampling(40, stop_ids=(7,)))
    found["ended"] = generate(engine, requests, Sampling(40, stop_ids=(7,), stop=text))
    found["least"] = generate(engine, requests, Sampling(40, stop_ids=(7,), stop=text, min_new_tokens=30))
    engine.close()
    return found | {"own": own, "only": greedy}


@torch.no_grad()
def _gap(model: Any, request: Request, answer: Trajectory) -> float:
    """How far the log-probs are from those that transformers' processors make of the model's logits."""
    sampling, said = request.settings(PLAIN), answer.sampled[-1]
    ids = torch.tensor([answer.tokens])
    logits = model(ids).logits[0].double()
    start, gaps = len(request.tokens), []
    for step, (token, logprob) in enumerate(zip(said.tokens, said.logprobs, strict=True)):
        logps = processed(ids[:, : start + step], logits[start + step - 1][None], start, sampling)
        gaps.append(abs(float(logps[0, token]) - logprob))
    return max(gaps)


def test_vllm_draws_from_what_transformers_processors_leave_and_ends_at_stop_strings(models, shared_server):
    (found,) = run_ranks(1, drawn, models["tied"], shared_server.client.url)
    model = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32)
    asked, answered = [*found["own"], *found["only"]], [*found["shaped"], *found["greedy"]]
    names = [*(name for name in SETTINGS for _ in range(6)), *["greedy"] * 3]
    gaps: dict[str, float] = {}
    for name, *both in zip(names, asked, answered, strict=True):
        gaps[name] = max(gaps.get(name, 0.0), _gap(model, *both))
    assert {name: gap for name, gap in gaps.items() if gap > 1e-4} == {}
    least = found["shaped"][-6:]
    assert all(len(each.sampled[-1].tokens) > 9 for each in least) and any(each.finished for each in least)
    for name, after in (("ended", 0), ("least", 30)):
        assert any(each.stop_string for each in found[name])
        for each, whole in zip(found[name], found["plain"], strict=True):
            said, ends = (
                list(each.sampled[-1].tokens),
                Ends(Sampling(40, stop_ids=(7,), stop=strings(), min_new_tokens=after)),
            )
            assert ends.look(said) == each.finished and ends.stop_string == each.stop_string
            assert (ends.num or 40) == len(said) and len(each.sampled[-1].logprobs) == len(said)
            if not after:  # the same seed draws the same tokens up to there
                assert whole.sampled[-1].tokens[: len(said)] == tuple(said)
