"""Tokens are drawn from what transformers' own processors leave, in vLLM's order, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shardproof.rollout.decode import choose, uniform_numbers
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.sampling import OVERRIDES, check_overrides, overridden
from shardproof.rollout.shaping import Kind, Shaping, sorted_threshold
from shardproof.rollout.stop_strings import StopStrings
from shardproof.rollout.trajectory import Trajectory
from tests.rollout.paged.test_decoder import CPU, ask, assert_same, grown, make_model

SETTINGS = {
    "top_k": Sampling(24, top_k=5),
    "top_p": Sampling(24, 0.7, top_p=0.6),
    "min_p": Sampling(24, 1.3, min_p=0.25),
    "repetition": Sampling(24, 0.9, repetition_penalty=1.7),
    "presence and frequency": Sampling(24, presence_penalty=1.5, frequency_penalty=-0.5),
    "least": Sampling(24, stop_ids=(3, 50, 60), min_new_tokens=9),
    "all": Sampling(
        24, 0.8, 0.9, (7, 9), top_k=30, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.4,
        frequency_penalty=0.3, min_new_tokens=5,
    ),
    "greedy": Sampling(24, 0.0, 0.5, (7,), top_k=2, repetition_penalty=1.4, min_new_tokens=20),
}  # fmt: skip
_ROUNDING = 1e-5  # relative: more than float32 logits differ by from one processor to another
PROMPTS = [(5, 6, 7), (9,), (5, 6, 7), tuple(range(20, 97))]


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3_tied", initializer_range=0.3)


def processed(ids: torch.Tensor, scores: torch.Tensor, num_prompt: int, sampling: Sampling) -> torch.Tensor:
    """What transformers makes of logits after these tokens, in vLLM's order of its processors; then the log-probs."""
    steps = LogitsProcessorList()
    if sampling.min_new_tokens and sampling.stop_ids:
        least = sampling.min_new_tokens
        steps.append(MinNewTokensLengthLogitsProcessor(num_prompt, least, list(sampling.stop_ids)))
    if sampling.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    scores = steps(ids, scores)
    counts = torch.bincount(ids[0, num_prompt:], minlength=scores.shape[1])
    scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if not sampling.temperature:
        return torch.log_softmax(scores, -1)
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    steps += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1.0 else []
    return torch.log_softmax(steps(ids, scores), -1)


@torch.no_grad()
def expected(model, request: Request, sampling: Sampling) -> tuple[list[int], list[float]]:
    """One request alone, with the whole sequence read for each token, drawn by its number from transformers' log-probs."""
    ids, said = list(request.tokens), []
    while len(said) < request.limit(sampling):
        given = torch.tensor([ids])
        logits = model(given).logits[:, -1].double()
        number = float(uniform_numbers([request.seed], len(said))[0])
        drawn = set()
        for nudge in (-_ROUNDING, _ROUNDING, 0.0):
            logps = processed(given, logits * (1.0 + nudge), len(request.tokens), sampling)
            place = torch.searchsorted(logps.exp().cumsum(-1), torch.tensor([[number]]), right=True)
            token = int(logps.argmax()) if not sampling.temperature else int(place)
            drawn.add(token)
        assert len(drawn) == 1, (
            "too near a border: another processor draws another token, choose other settings"
        )
        ids.append(token)
        said.append(float(logps[0, token]))
        if token in sampling.stop_ids:
            break
    return ids, said


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_log_probs_are_those_of_transformers_processors(model, name):
    sampling, requests = SETTINGS[name], ask(PROMPTS)
    assert not sampling.is_whole
    for request, found in zip(requests, grown(model, requests, sampling), strict=True):
        ids, logprobs = expected(model, request, sampling)
        assert list(found.tokens) == ids
        assert torch.allclose(torch.tensor(found.sampled[-1].logprobs), torch.tensor(logprobs), atol=2e-5)


def test_rows_of_other_settings_change_nothing(model):
    """One batch of all settings, with rows that have none: each row as it is alone, bit for bit what it draws from."""
    several = [each for each in SETTINGS.values() if each.temperature == 1.0]
    plain = Sampling(24, stop_ids=(3,))
    requests = [
        replace(request, sampling=own)
        for request, own in zip(ask(PROMPTS * 2), [*several, None, None, *several[:2]], strict=False)
    ]
    alone = [grown(model, [replace(r, sampling=None)], r.settings(plain))[0] for r in requests]
    assert_same(grown(model, requests, plain), alone)
    logits = torch.randn(2, 64)
    mixed = [replace(requests[k], sampling=own) for k, own in ((0, several[0]), (1, None))]
    shaping = Shaping.of(mixed, plain, 64, CPU)
    kind = Kind.of([r.settings(plain) for r in mixed])
    steps = torch.zeros(2, dtype=torch.int64)
    shaped = shaping.apply(logits, torch.arange(2), steps, 1.0, kind)
    assert torch.equal(shaped[1], logits[1]) and int(shaped[0].isfinite().sum()) == 5


def test_ties_at_the_border_are_kept_and_settings_that_keep_all_change_nothing():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0]])
    request = Request(Trajectory.of_prompt((0,)), 0)

    def left(**how):
        sampling = Sampling(4, **how)
        kind, steps = Kind.of([sampling]), torch.zeros(1, dtype=torch.int64)
        if kind is None:
            return "whole"
        shaped = Shaping.of([request], sampling, 5, CPU).apply(logits, steps, steps, 1.0, kind)
        return shaped.isfinite()[0].nonzero()[:, 0].tolist()

    assert left(top_k=2) == [0, 1, 2] and left(top_p=0.6) == [0, 1, 2]
    assert left(top_k=1) == [0] == left(top_p=1e-6) == left(min_p=1.0)
    assert left(top_k=5) == [0, 1, 2, 3, 4] == left(top_k=99) == left(min_p=1e-9)
    assert left() == "whole" == left(temperature=0.5)
    # top_p is of all that top_k has kept: equal ones at its border count.
    assert left(top_k=2, top_p=0.65) == [0, 1, 2] and left(top_k=2, top_p=0.57) == [0]


@pytest.mark.parametrize("top_k", [1, 4, 20, 99])
def test_top_p_after_top_k_is_top_p_of_what_transformers_top_k_keeps(top_k):
    """Logits of 16 bits are often equal: of those at the border of top_k, top_p counted some and left the others out."""
    torch.manual_seed(0)
    scores = (2 * torch.randn(200, 64)).round() / 2
    every, left = torch.full((200,), 2**30), TopKLogitsWarper(min(top_k, 64))(None, scores)
    top_p = torch.rand(200)
    found = sorted_threshold(scores, torch.full((200,), top_k), top_p, 0.8)
    assert torch.equal(found, sorted_threshold(left, every, top_p, 0.8))


def test_drawn_tokens_are_as_likely_as_their_log_probs_say():
    """4096 draws at evenly spread numbers from one truncated, penalised distribution."""
    torch.manual_seed(0)
    sampling = Sampling(4, 0.8, 0.9, top_k=12, repetition_penalty=1.5, presence_penalty=0.5)
    logits = torch.randn(1, 40) * 2
    shaping = Shaping(1, 40, 1, True, CPU)
    shaping.begin([0], [sampling], [(1, 2)], [(3, 3)])
    zeros = torch.zeros(1, dtype=torch.int64)
    shaped = shaping.apply(logits, zeros, zeros + 2, 0.8, Kind.of([sampling]))
    numbers = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    tokens, logprobs = choose(shaped.expand(4096, -1), numbers, sampling)
    counts = torch.bincount(tokens, minlength=40) / 4096
    said = torch.zeros(40).scatter(0, tokens, logprobs.exp())
    assert (counts - said).abs().max() < 1e-3 and abs(float(said.sum()) - 1) < 1e-5


class Characters:
    """A tokenizer of one character per token."""

    def decode(self, tokens, **how):
        return "".join(map(chr, tokens))


def test_what_a_row_may_set():
    base = Sampling(20, 0.7, stop_ids=(1, 2), stop=StopStrings([], Characters()), min_new_tokens=8)
    own = overridden(base, {"stop": "ab", "stop_ids": [2, 5], "top_k": 4, "max_new_tokens": 6})
    assert own == replace(
        base, stop=StopStrings(["ab"], None), stop_ids=(1, 2, 5), top_k=4, max_new_tokens=6, min_new_tokens=6
    )
    assert overridden(base, None) is base is overridden(base, {})
    # Tables give each row the keys of all rows.
    assert overridden(base, {"stop": None, "temperature": None, "top_k": 4}) == replace(base, top_k=4)
    said = {
        "temperature": ({"temperature": 0.5}, "trainer scores all tokens with rollout.temperature"),
        "unknown": ({"top_q": 1}, "'top_q' is not one of max_new_tokens"),
        "not allowed": ({"top_k": 1}, "'top_k' is not in rollout.row_overrides"),
        "kind": ({"stop": 5}, "stop=5 is not a list of strings"),
        "empty": ({"stop": ["a", ""]}, "not empty"),
        "ids": ({"stop_ids": [True]}, "stop_ids=[True] is not a list of token ids"),
        "text": ({"stop_ids": ""}, "stop_ids='' is not a list of token ids"),
        "whole": ({"max_new_tokens": 2.0}, "max_new_tokens=2.0 is not a whole number"),
        "longer": ({"max_new_tokens": 21}, "is above the 20 that the recipe allows"),
        "bounds": ({"min_p": 2}, "min_p=2 must be a finite number at least 0 and at most 1"),
        "no object": ([], "it is a list"),
    }
    allowed = [key for key in OVERRIDES if key != "top_k"]
    for given, words in said.values():
        assert words in (check_overrides(given, allowed, 20) or "nothing")
    assert check_overrides({"stop": [], "max_new_tokens": 3, "top_k": None}, allowed, 20) is None
    assert check_overrides({"stop_ids": [7]}, allowed, 20, vocabulary=8) is None
    assert "8 is no token, the model's vocabulary has 8 tokens" in (
        check_overrides({"stop_ids": [3, 8]}, allowed, 20, vocabulary=8) or "nothing"
    )
