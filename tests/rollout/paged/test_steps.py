"""Steps of our own kernels, and graphs, are used where a comparison shows them right, and given up where one fails."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from weakref import ref

import pytest
import torch

from shardproof.rollout.decode import uniform_numbers
from shardproof.rollout.engine import Sampling
from shardproof.rollout.paged import decoder as decoder_module
from shardproof.rollout.paged import graphs, steps
from shardproof.rollout.paged import memory as memory_module
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.paged.memory import SIZES
from shardproof.rollout.paged.model_step import ModelStep, attend_plain
from shardproof.rollout.paged.progress import record, uniform_lines
from tests.rollout.paged.test_decoder import CPU, ask, assert_same, grown, make_model


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3_tied", max_position_embeddings=512)


class Graphs:
    """CUDA graphs where there is no CUDA: a step that is captured is run later, and knows it."""

    def __init__(self):
        self.fails_at: str | None = None
        self.now = "eager"
        self.captured = 0

    def capture(self, warm, step, device, pool):
        warm()
        if self.fails_at == "capture":
            raise RuntimeError("no capture today")
        self.captured += 1
        return lambda: self._replay(step)

    def _replay(self, step):
        if self.fails_at == "replay":
            raise RuntimeError("no replay today")
        self.now = "replay"
        try:
            step()
        finally:
            self.now = "eager"


@pytest.fixture
def capturing(monkeypatch):
    made = Graphs()
    monkeypatch.setattr(graphs, "capture", made.capture)
    monkeypatch.setattr(graphs, "host_waits", lambda step, device: False)
    kernels = SimpleNamespace(attend_rotated=attend_plain)
    monkeypatch.setitem(sys.modules, "shardproof.rollout.paged.attention_kernels", kernels)
    monkeypatch.setattr(steps, "WORTH_CAPTURING", 4)
    return made


class OtherStep(ModelStep):
    """A fused step that is wrong, or fails, somewhere."""

    is_wrong = staticmethod(lambda rows, positions, now: False)  # which rows
    fails = staticmethod(lambda positions, now: False)
    graphs = Graphs()

    def __init__(self, model, cache, most_blocks):
        super().__init__(model, cache, attend_plain)

    def keep_one_of_each_kind(self):
        """All of them are run."""

    def __call__(self, slots, out):
        if self.fails(slots.positions, self.graphs.now):
            raise RuntimeError("no such instruction")
        super().__call__(slots, out)
        wrong = torch.as_tensor(self.is_wrong(slots.rows, slots.positions, self.graphs.now))
        out.copy_(torch.where(wrong.expand(slots.rows, 1), out.roll(1, -1), out))


def many(rows, length=3):
    return ask([tuple((7 * row + 3 * at) % 64 for at in range(length)) for row in range(rows)])


def decoder_with(model, monkeypatch, capturing, **fault) -> PagedDecoder:
    given = {name: staticmethod(value) for name, value in fault.items()}
    monkeypatch.setattr(steps, "FusedStep", type("Step", (OtherStep,), {"graphs": capturing, **given}))
    decoder = PagedDecoder(model, CPU)
    decoder.ways.fused = decoder.ways.attention = decoder.ways.graphs = True
    return decoder


def decode_with(model, monkeypatch, capturing, requests, sampling, **fault) -> PagedDecoder:
    decoder = decoder_with(model, monkeypatch, capturing, **fault)
    assert_same(decoder(requests, sampling, 3), grown(model, requests, sampling))
    return decoder


@pytest.mark.parametrize("rows", [1, 20])
def test_a_fused_step_that_is_right_is_used(model, monkeypatch, caplog, capturing, rows):
    requests = many(rows)
    decoder = decode_with(model, monkeypatch, capturing, requests, Sampling(9))
    assert decoder.ways.fused and decoder.ways.graphs
    assert caplog.text == ""
    assert capturing.captured == 1
    for again in (requests, ask([r.tokens[::-1] for r in requests], 5)):
        assert_same(decoder(again, Sampling(9), 3), grown(model, again, Sampling(9)))
    assert capturing.captured == 1


WRONG = {
    "everywhere": lambda rows, positions, now: True,
    "in blocks of more than 16 rows": lambda rows, positions, now: rows > 16,
    "in the last row": lambda rows, positions, now: torch.arange(rows)[:, None] == rows - 1,
    "beyond the second cached block": lambda rows, positions, now: positions > 128,
    "when it is replayed": lambda rows, positions, now: now == "replay",
}
FAILS = {
    "everywhere": lambda positions, now: True,
    "when it is replayed": lambda positions, now: now == "replay",
    "in contexts that are longer than those of comparisons": lambda positions, now: bool(
        positions.max() > 220
    ),
}


@pytest.mark.parametrize("where", WRONG)
def test_a_fused_step_that_is_wrong_somewhere_is_not_used(model, monkeypatch, caplog, capturing, where):
    decoder = decode_with(model, monkeypatch, capturing, many(20), Sampling(9), is_wrong=WRONG[where])
    assert not decoder.ways.fused and decoder.ways.graphs
    assert "without fused kernels: their log-probs differ" in caplog.text


def test_a_fused_step_is_compared_with_every_number_of_rows(model, monkeypatch, capturing):
    wrong = WRONG["in blocks of more than 16 rows"]
    decoder = decode_with(model, monkeypatch, capturing, many(16), Sampling(9), is_wrong=wrong)
    assert decoder.ways.fused
    assert_same(decoder(many(17), Sampling(9), 3), grown(model, many(17), Sampling(9)))
    assert not decoder.ways.fused


@pytest.mark.parametrize("where", FAILS)
def test_a_fused_step_that_fails_somewhere_is_given_up(model, monkeypatch, caplog, capturing, where):
    requests, sampling = many(6, 230), Sampling(9)
    decoder = decode_with(model, monkeypatch, capturing, requests, sampling, fails=FAILS[where])
    assert not decoder.ways.fused
    assert "no such instruction" in caplog.text
    assert capturing.captured > 0 and decoder.ways.graphs  # the model as it is written is still captured


@pytest.mark.parametrize("fails_at", ["capture", "replay"])
def test_graphs_that_fail_are_given_up_last(model, monkeypatch, caplog, capturing, fails_at):
    capturing.fails_at = fails_at
    decoder = decode_with(model, monkeypatch, capturing, many(6), Sampling(9))
    assert not decoder.ways.fused and not decoder.ways.graphs
    assert "without CUDA graphs" in caplog.text
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 3


@pytest.mark.parametrize("tokens", [9, 90])
def test_graphs_without_kernels_of_our_own(model, monkeypatch, caplog, capturing, tokens):
    """In float32, or without Triton: contexts that grow need graphs for wider tables."""
    monkeypatch.setitem(sys.modules, "shardproof.rollout.paged.attention_kernels", None)
    decoder = PagedDecoder(model, CPU)
    decoder.ways.graphs = True
    requests = many(6, 100)
    for _ in range(2):
        assert_same(decoder(requests, Sampling(tokens), 3), grown(model, requests, Sampling(tokens)))
    assert decoder.ways.graphs and caplog.text == "" and capturing.captured == 1


def test_a_model_that_fails_is_not_hidden_and_memory_that_runs_out_is_no_kernels_fault(
    model, monkeypatch, capturing
):
    for error in (RuntimeError("a mistake in the model"), torch.OutOfMemoryError("CUDA out of memory.")):

        def fail(self, slots, out, error=error):
            raise error

        decoder = decoder_with(model, monkeypatch, capturing)
        monkeypatch.setattr(ModelStep, "__call__", fail)
        with pytest.raises(type(error), match=str(error)):
            decoder(many(3), Sampling(9), 3)
        assert decoder.ways.graphs == isinstance(error, torch.OutOfMemoryError)


def draw_with(fault, calls):
    def changed(slots, temperature, logits):
        if fault == "fails":
            raise RuntimeError("no such instruction")
        calls.append(temperature)
        wrong = {
            "differs": True,
            "differs at other temperatures": temperature != 1.0,
            "differs in the last rows": torch.arange(len(logits))[:, None] >= 4,
        }.get(fault, False)
        done = slots.done.clone()
        record(
            slots, Sampling(9, temperature), torch.where(torch.as_tensor(wrong), logits.roll(1, -1), logits)
        )
        if fault == "forgets the end":
            slots.done.copy_(done)
        if fault == "moves rows that are done":
            slots.positions.add_(done[slots.outputs][:, None])

    return changed


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (None, None),
        ("differs", "sample different tokens"),
        ("differs at other temperatures", "sample different tokens"),
        ("differs in the last rows", "sample different tokens"),
        ("forgets the end", "miscount"),
        ("moves rows that are done", "miscount"),
        ("fails", "no such instruction"),
    ],
)
def test_kernels_that_draw_are_used_if_they_draw_what_was_asked_for(model, monkeypatch, caplog, fault, said):
    calls: list[float] = []
    kernels = SimpleNamespace(record=draw_with(fault, calls))
    monkeypatch.setitem(sys.modules, "shardproof.rollout.paged.draw_kernels", kernels)
    decoder = PagedDecoder(model, CPU)
    decoder.ways.draws = True
    stops = {"stop_ids": (1, 2)}
    for sampling in (
        Sampling(9, **stops),
        Sampling(9, 0.7, **stops),
        Sampling(9, 0.0),
        Sampling(9, top_p=0.5),
    ):
        assert_same(decoder(many(6), sampling, 3), grown(model, many(6), sampling))
    assert decoder.ways.draws == (fault is None)
    assert said is None or said in caplog.text
    if fault is None:
        assert caplog.text == "" and set(calls) == {1.0, 0.7}


@pytest.mark.parametrize("initializer_range", [0.1, 0.02])
def test_what_a_step_may_be_off_by_follows_the_model(monkeypatch, capturing, initializer_range):
    """A model of which the context says little: a step that forgets part of it is found all the same."""
    model = make_model("llama", initializer_range=initializer_range, max_position_embeddings=512)

    class Forgetful(OtherStep):
        """It does not see the first cached block."""

        def __call__(self, slots, out):
            for states in (*self._cache.keys, *self._cache.values):
                states[slots.tables[:, 0].long().unique()] *= 1.0 - float(slots.positions.max() > 100)
            super().__call__(slots, out)

    for step, used in ((OtherStep, True), (Forgetful, False)):
        monkeypatch.setattr(steps, "FusedStep", step)
        decoder = PagedDecoder(model, CPU)
        decoder.ways.fused = decoder.ways.attention = decoder.ways.graphs = True
        assert_same(decoder(many(4), Sampling(6), 3), grown(model, many(4), Sampling(6)))
        assert decoder.ways.fused is used


def test_numbers_that_decide_draws_are_the_same_on_the_device():
    seeds = [0, 1, 2**63 + 5, 2**64 - 1, 123456789]
    for number, line in enumerate(uniform_lines(seeds, 50, CPU).T):
        assert line.tolist() == uniform_numbers(seeds, number).tolist()[0 if line.dim() > 1 else slice(None)]


def test_a_few_tokens_are_not_worth_a_graph_unless_every_call_asks_for_them(model, monkeypatch, capturing):
    monkeypatch.setattr(steps, "WORTH_CAPTURING", 30)
    decoder = decoder_with(model, monkeypatch, capturing)
    counts = []
    for requests, sampling in (
        (many(1), Sampling(20)),
        (many(4), Sampling(20)),
        (many(1), Sampling(20, 0.5)),
        (many(1), Sampling(20, 0.5)),
    ):
        assert_same(decoder(requests, sampling, 3), grown(model, requests, sampling))
        counts.append(capturing.captured)
    assert counts == [0, 1, 1, 2]


def test_kernels_of_all_sizes_are_compiled_before_the_first_call_and_once(model, monkeypatch, capturing):
    rehearsed = []

    class Compiling:
        """Launches everything, as where all kernels are compiled already."""

        def __init__(self, launches, device):
            rehearsed.append(len(launches))
            for launch in launches:
                launch()

        def wait(self):
            return 0

    monkeypatch.setattr(decoder_module, "Compiling", Compiling)
    decoder = decoder_with(model, monkeypatch, capturing)
    decoder.start_compiling()
    sizes = len([size for size in SIZES if size <= 256])
    assert rehearsed == [sizes]
    assert_same(decoder(many(20), Sampling(9), 3), grown(model, many(20), Sampling(9)))
    assert rehearsed == [sizes]
    other = decoder_with(model, monkeypatch, capturing)
    for _ in range(2):  # a canary has too few tokens; then the sizes up to that of 20 rows, once
        assert_same(other(many(1), Sampling(3), 3), grown(model, many(1), Sampling(3)))
        assert_same(other(many(20), Sampling(9), 3), grown(model, many(20), Sampling(9)))
        assert rehearsed[1:] == [6]


def test_memory_that_grows_is_freed_first_and_survives_running_out(model, monkeypatch, capturing):
    """A cache and logits that do not fit leave nothing behind: neither half of new memory, nor graphs over the old."""
    decoder = PagedDecoder(model, CPU)
    decoder.ways.graphs = True
    assert_same(decoder(many(2), Sampling(9), 3), grown(model, many(2), Sampling(9)))
    old, make, alive = ref(decoder.parts[0].cache), memory_module.PagedCache, []

    def making(*given):
        alive.append(old() is not None)
        return make(*given)

    def no_logits(*shape, **how):
        raise torch.OutOfMemoryError("no room for logits")

    requests = many(40, length=70)
    with monkeypatch.context() as patched:
        patched.setattr(memory_module, "PagedCache", making)
        patched.setattr(memory_module, "torch", SimpleNamespace(**vars(torch) | {"zeros": no_logits}))
        with pytest.raises(torch.OutOfMemoryError):
            decoder(requests, Sampling(9), 3)
    assert alive == [False]
    assert_same(decoder(requests, Sampling(9), 3), grown(model, requests, Sampling(9)))
