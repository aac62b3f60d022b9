"""Decoding in fixed memory draws what decoding in a growing cache draws."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardproof.rollout import graphs, static
from shardproof.rollout.decode import decode
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.proof import CAPACITY
from shardproof.rollout.static import FixedDecoder, ModelStep, fits
from shardproof.rollout.trajectory import Trajectory
from tests.models import make_checkpoint, tiny_config

CPU = torch.device("cpu")
PROMPTS = [(5, 6, 7), (9,), (5, 6, 7), tuple(range(20, 37))]


def model_of(family, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp(family), family)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_of("qwen3_tied", tmp_path_factory)


def ask(prompts, first_seed=0):
    return [Request(Trajectory.of_prompt(p), first_seed + row) for row, p in enumerate(prompts)]


def grown(model, requests, sampling):
    def forward(ids, mask, positions, cache):
        return model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits[:, -1]

    with torch.no_grad():
        return decode(forward, requests, sampling, config=model.config, device=CPU, version=3)


def fixed(decoder, requests, sampling):
    with torch.no_grad():
        return decoder(requests, sampling, 3)


def assert_same(found, wanted):
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    assert [(c.finished, c.version) for c in found] == [(c.finished, c.version) for c in wanted]
    for one, other in zip(found, wanted, strict=True):
        said, expected = (torch.tensor(each.sampled[-1].logprobs) for each in (one, other))
        assert torch.allclose(said, expected, atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(40),
        Sampling(40, temperature=0.0),
        Sampling(40, temperature=1.3, top_p=0.8),
        Sampling(40, stop_ids=tuple(range(0, 64, 5))),
        Sampling(1),
        Sampling(17, stop_ids=tuple(range(64))),
    ],
    ids=["plain", "greedy", "nucleus", "stops", "one token", "stops at once"],
)
def test_the_same_tokens_and_log_probs(model, sampling):
    requests = ask(PROMPTS)
    decoder = FixedDecoder(model, CPU)
    assert_same(fixed(decoder, requests, sampling), grown(model, requests, sampling))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_mixtures_of_experts(family, tmp_path_factory):
    model = model_of(family, tmp_path_factory)
    assert fits(model)
    requests = ask(PROMPTS)
    assert_same(fixed(FixedDecoder(model, CPU), requests, Sampling(12)), grown(model, requests, Sampling(12)))


def test_memory_is_used_again_and_leaves_nothing_behind(model):
    """Another batch of the same size, after weights have changed; then the first again."""
    decoder = FixedDecoder(model, CPU)
    sampling = Sampling(12)
    first = ask(PROMPTS)
    second = ask([prompt[::-1] for prompt in PROMPTS], 7)
    for requests in (first, second, first):
        assert_same(fixed(decoder, requests, sampling), grown(model, requests, sampling))
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.01)
    assert len(decoder._loops) == 1


class Graphs:
    """CUDA graphs where there is no CUDA: a step is run when it is recorded and when it is replayed, and knows it."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.now = "eager"
        self.recorded = 0

    def capture(self, step, device, rewind=lambda: None):
        for _ in range(2):
            step()
            rewind()
        self._run("capture", step)
        self.recorded += 1
        return lambda: self._run("replay", step)

    def _run(self, now, step):
        if self.fails_at == now:
            raise RuntimeError(f"no {now} today")
        self.now = now
        try:
            step()
        finally:
            self.now = "eager"


@pytest.fixture
def recording(monkeypatch):
    """Makes graphs that fail where they are told to."""

    def make(fails_at=None):
        made = Graphs(fails_at)
        monkeypatch.setattr(graphs, "can_capture", lambda device, rows: rows > 1)
        monkeypatch.setattr(graphs, "capture", made.capture)
        return made

    return make


class OtherStep(ModelStep):
    """A fused step that is wrong, or fails, somewhere."""

    is_wrong = staticmethod(lambda rows, positions, now: False)  # which rows
    fails = staticmethod(lambda capacity, now: False)
    recorder = None

    def __init__(self, model, rows, capacity):
        super().__init__(model, rows, capacity, CPU)
        self._capacity = capacity

    def __call__(self, ids, positions):
        now = self.recorder.now if self.recorder is not None else "eager"
        if self.fails(self._capacity, now):
            raise RuntimeError("no such instruction")
        logits = super().__call__(ids, positions)
        wrong = self.is_wrong(len(ids), positions, now)
        return torch.where(torch.as_tensor(wrong).expand_as(positions), logits.roll(1, -1), logits)


def many(rows, length=3):
    return ask([tuple((7 * row + 3 * at) % 64 for at in range(length)) for row in range(rows)])


WRONG = {
    "everywhere": lambda rows, positions, now: True,
    "in blocks of more than 16 rows": lambda rows, positions, now: rows > 16,
    "in the last row": lambda rows, positions, now: torch.arange(rows)[:, None] == rows - 1,
    "beyond the first cached block": lambda rows, positions, now: positions > 64,
    "beyond the second cached block": lambda rows, positions, now: positions > 128,
    "when it is replayed": lambda rows, positions, now: now == "replay",
}
FAILS = {
    "everywhere": lambda capacity, now: True,
    "when it is recorded": lambda capacity, now: now == "capture",
    "when it is replayed": lambda capacity, now: now == "replay",
    "in longer caches": lambda capacity, now: capacity > CAPACITY,
    "when it is recorded with a longer cache": lambda capacity, now: capacity > CAPACITY and now == "capture",
    "when it is replayed with a longer cache": lambda capacity, now: capacity > CAPACITY and now == "replay",
}


def decode_with(model, monkeypatch, recorder, requests, sampling, **fault):
    step = type(
        "Step", (OtherStep,), {"recorder": recorder, **{k: staticmethod(v) for k, v in fault.items()}}
    )
    monkeypatch.setattr(static, "FusedStep", step)
    decoder = FixedDecoder(model, CPU)
    decoder._fuses = True  # the model can be fused
    assert_same(fixed(decoder, requests, sampling), grown(model, requests, sampling))
    return decoder


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_a_fused_step_that_is_right_is_used(model, monkeypatch, caplog, recording, rows):
    recorder = recording()
    requests = many(rows)
    decoder = decode_with(model, monkeypatch, recorder, requests, Sampling(9))
    assert decoder._fuses
    assert caplog.text == ""
    recorded = recorder.recorded
    assert recorded == (0 if rows == 1 else 2)  # one to compare, one to decode
    for again in (requests, ask([r.tokens[::-1] for r in requests], 5)):
        assert_same(fixed(decoder, again, Sampling(9)), grown(model, again, Sampling(9)))
    assert recorder.recorded == recorded
    assert decoder._proved == {("fused kernels", rows)}


@pytest.mark.parametrize("where", WRONG)
def test_a_fused_step_that_is_wrong_somewhere_is_not_used(model, monkeypatch, caplog, recording, where):
    decoder = decode_with(model, monkeypatch, recording(), many(20), Sampling(9), is_wrong=WRONG[where])
    assert not decoder._fuses
    assert "without fused kernels: their log-probs differ" in caplog.text
    assert len(decoder._loops) == 1


def test_a_fused_step_is_compared_with_every_number_of_rows(model, monkeypatch, caplog, recording):
    wrong = WRONG["in blocks of more than 16 rows"]
    decoder = decode_with(model, monkeypatch, recording(), many(16), Sampling(9), is_wrong=wrong)
    assert decoder._fuses
    assert_same(fixed(decoder, many(17), Sampling(9)), grown(model, many(17), Sampling(9)))
    assert not decoder._fuses
    assert "differ" in caplog.text


@pytest.mark.parametrize("where", FAILS)
def test_a_fused_step_that_fails_somewhere_is_given_up(model, monkeypatch, caplog, recording, where):
    requests, sampling = many(6, 250), Sampling(9)  # longer than what steps are compared with
    recorder = recording()
    decoder = decode_with(model, monkeypatch, recorder, requests, sampling, fails=FAILS[where])
    assert not decoder._fuses
    assert "no such instruction" in caplog.text
    # The model as it is written is still recorded.
    before = recorder.recorded
    assert before > 0 and decoder._records
    assert_same(fixed(decoder, requests, sampling), grown(model, requests, sampling))
    assert recorder.recorded == before


@pytest.mark.parametrize("fails_at", ["capture", "replay"])
def test_graphs_that_fail_are_given_up_last(model, monkeypatch, caplog, recording, fails_at):
    decoder = decode_with(model, monkeypatch, recording(fails_at), many(6), Sampling(9))
    assert not decoder._fuses and not decoder._records
    assert "without CUDA graphs" in caplog.text
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 2


@pytest.mark.parametrize(("num_tokens", "recorded"), [(1, 0), (2, 0), (3, 1)])
def test_a_cache_that_is_full_at_once_has_room_for_recording(model, caplog, recording, num_tokens, recorded):
    """Two steps are run to record one; a cache that ends after the first new token has no place for them."""
    recorder, requests = recording(), many(2, 128 - num_tokens)
    decoder = FixedDecoder(model, CPU)
    assert_same(fixed(decoder, requests, Sampling(num_tokens)), grown(model, requests, Sampling(num_tokens)))
    assert caplog.text == ""
    assert recorder.recorded == recorded


def test_a_model_that_fails_is_not_hidden(model, monkeypatch, recording):
    recording()

    def fail(self, ids, positions):
        raise RuntimeError("a mistake in the model")

    monkeypatch.setattr(ModelStep, "__call__", fail)
    decoder = FixedDecoder(model, CPU)
    with pytest.raises(RuntimeError, match="a mistake in the model"):
        fixed(decoder, many(3), Sampling(9))


def test_memory_that_runs_out_is_not_taken_for_a_kernel_that_fails(model, monkeypatch, recording):
    recording()

    def fail(self, started):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ModelStep, "fill", fail)
    decoder = FixedDecoder(model, CPU)
    with pytest.raises(torch.OutOfMemoryError):
        fixed(decoder, many(3), Sampling(9))
    assert decoder._records


@pytest.mark.parametrize("initializer_range", [0.1, 0.02])
def test_what_a_step_may_be_off_by_follows_the_model(monkeypatch, recording, initializer_range):
    """A model of which the context says little: a step that forgets part of it is found all the same."""
    torch.manual_seed(0)
    config = tiny_config("llama", initializer_range=initializer_range)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()

    class Forgetful(OtherStep):
        """It does not see the first cached block."""

        def fill(self, started):
            super().fill(started)
            if started.length > 100:
                self._mask[..., :64] = False

    for step, used in ((OtherStep, True), (Forgetful, False)):
        monkeypatch.setattr(static, "FusedStep", step)
        decoder = FixedDecoder(model, CPU)
        decoder._fuses = True
        assert_same(fixed(decoder, many(4), Sampling(3)), grown(model, many(4), Sampling(3)))
        assert decoder._fuses is used


def draw_with(fault, calls, recorder):
    def record(progress, temperature, logits):
        if fault == "fails" or (fault == "fails when it is recorded" and recorder.now == "capture"):
            raise RuntimeError("no such instruction")
        calls.append(temperature)
        wrong = {
            "differs": True,
            "differs at other temperatures": temperature != 1.0,
            "differs when it is replayed": recorder.now == "replay",
            "differs in the last rows": torch.arange(len(logits))[:, None] >= 4,
        }.get(fault, False)
        progress.record(torch.where(torch.as_tensor(wrong), logits.roll(1, -1), logits))
        if fault == "forgets the end":
            progress.done.zero_()

    return record


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("differs", "sample different tokens"),
        ("differs at other temperatures", "sample different tokens"),
        ("differs when it is replayed", "sample different tokens"),
        ("differs in the last rows", "sample different tokens"),
        ("forgets the end", "miscount"),
        ("fails", "no such instruction"),
        ("fails when it is recorded", "no such instruction"),
    ],
)
def test_kernels_that_draw_something_else_are_not_used(model, monkeypatch, caplog, recording, fault, said):
    monkeypatch.setattr(static, "fused_record", draw_with(fault, [], recording()))
    decoder = FixedDecoder(model, CPU)
    decoder._draws = True
    for sampling in (Sampling(9, stop_ids=(1, 2)), Sampling(9, temperature=0.7, stop_ids=(1, 2))):
        assert_same(fixed(decoder, many(6), sampling), grown(model, many(6), sampling))
    assert not decoder._draws
    assert said in caplog.text


def test_kernels_that_draw_what_was_asked_for_are_used(model, monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(static, "fused_record", draw_with(None, calls, Graphs()))
    decoder = FixedDecoder(model, CPU)
    decoder._draws = True
    requests = ask(PROMPTS)
    for sampling in (
        Sampling(9),
        Sampling(9, temperature=0.7),
        Sampling(9, temperature=0.0),
        Sampling(9, top_p=0.5),
    ):
        assert_same(fixed(decoder, requests, sampling), grown(model, requests, sampling))
    assert decoder._draws
    assert caplog.text == ""
    # Three to compare; then all draws of the two that they are for.
    assert calls == [1.0] * 12 + [0.7] * 12


def test_no_requests(model):
    assert fixed(FixedDecoder(model, CPU), [], Sampling(4)) == []


@pytest.mark.parametrize(
    ("family", "wanted"),
    [("llama", True), ("qwen3_tied", True), ("qwen3_moe", True), ("gpt_oss", False), ("gemma3_text", False)],
)
def test_which_models_fit(family, wanted, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp(family), family)
    assert fits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)) == wanted
