"""Keys and values that are kept between the turns of a conversation change what is read, and nothing that is drawn."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.rollout.decode import decode, last_logits
from shardproof.rollout.engine import Request, Sampling, forget, generate
from shardproof.rollout.kept import GIB, KeptTurns, why_not
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.paged.model_step import why_not_paged
from shardproof.rollout.trajectory import Segment, Trajectory
from tests.models import make_checkpoint, make_model
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SAMPLING = Sampling(7, stop_ids=(5, 17))
FULL = {"layer_types": ["full_attention"] * 2}
PROMPTS = [tuple((7 * row + 3 * at + at * at) % 101 for at in range(17 + 5 * row)) for row in range(4)]


def answer_to(trajectory: Trajectory, turn: int) -> Segment:
    """What an environment says: more or less, by row and turn."""
    row = trajectory.sample
    size = 1 + (5 * row + 3 * turn) % 9
    return Segment(tuple((11 * at + 13 * row + turn) % 101 for at in range(size)), "environment")


def openings(prompts: list[tuple[int, ...]] = PROMPTS, group: int = 2) -> list[Trajectory]:
    return [
        Trajectory.of_prompt(prompt, number, group * number + sample)
        for number, prompt in enumerate(prompts)
        for sample in range(group)
    ]


class Talk:
    """A conversation loop: `complete` answers requests; counts the tokens that the model computes."""

    def __init__(self, model: Any, kept: KeptTurns | None, paged: bool = False):
        self.model, self.kept, self.computed = model, kept, 0
        self.decoder = PagedDecoder(model, CPU, most_rows=5) if paged else None
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, args: Any, kwargs: Any) -> None:
        self.computed += kwargs["input_ids"].numel()

    @torch.no_grad()
    def complete(self, requests: list[Request], sampling: Sampling = SAMPLING) -> list[Trajectory]:
        if self.kept is not None:
            self.kept.begin_wave()
        if self.decoder is not None:
            return self.decoder(requests, sampling, 0, self.kept)
        return decode(
            partial(last_logits, self.model),
            requests,
            sampling,
            config=self.model.config,
            device=CPU,
            version=0,
            kept=self.kept,
        )

    def turns(self, going: list[Trajectory], num: int) -> list[Trajectory]:
        for turn in range(num):
            requests = [Request(t, 100 * t.sample + turn, turn < num - 1) for t in going]
            going = self.complete(requests)
            if turn < num - 1:
                going = [t.extended(answer_to(t, turn)) for t in going]
        return going


def assert_same(found: list[Trajectory], wanted: list[Trajectory]) -> None:
    assert [t.tokens for t in found] == [t.tokens for t in wanted]
    assert [t.finished for t in found] == [t.finished for t in wanted]
    for one, other in zip(found, wanted, strict=True):
        for mine, theirs in zip(one.sampled, other.sampled, strict=True):
            assert torch.allclose(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-5)


FAMILIES = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3_tied", {}),
    "experts": ("qwen3_moe", {}),
    "latent attention": ("deepseek_v3", {}),
    "soft caps": ("gemma2", FULL),
    "learned positions": ("gpt2", {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_log_probs_are_those_of_reading_everything(name):
    family, options = FAMILIES[name]
    assert why_not(make_model(family, **options).config) is None
    kept, plain = (
        Talk(make_model(family, **options), KeptTurns(GIB)),
        Talk(make_model(family, **options), None),
    )
    wanted = plain.turns(openings(), 4)
    assert_same(kept.turns(openings(), 4), wanted)
    assert kept.computed < 0.6 * plain.computed
    assert len(kept.kept) == 0  # each was used by its conversation, and the last turn left nothing


@pytest.mark.parametrize("name", ["qwen3", "experts"])
def test_the_same_with_a_paged_cache(name):
    """More conversations than are decoded at a time."""
    family, _ = FAMILIES[name]
    kept, plain = Talk(make_model(family), KeptTurns(GIB), True), Talk(make_model(family), None)
    assert why_not_paged(kept.model) is None
    assert_same(kept.turns(openings(), 4), plain.turns(openings(), 4))
    assert kept.computed < 0.6 * plain.computed
    assert len(kept.kept) == 0


def test_single_turns_keep_nothing_and_compute_the_same_bits():
    kept, plain = Talk(make_model("qwen3"), KeptTurns(GIB)), Talk(make_model("qwen3"), None)
    assert kept.turns(openings(), 1) == plain.turns(openings(), 1)
    assert (len(kept.kept), kept.kept.nbytes) == (0, 0) and kept.computed == plain.computed


@pytest.mark.parametrize(
    ("family", "options"),
    [("mistral", {}), ("gemma2", {}), ("gemma3_text", {}), ("gpt_oss", {}), ("phi3", {})],
)
def test_families_whose_caches_cannot_be_cut_are_known(family, options):
    assert why_not(make_model(family, **options).config) is not None


def test_rows_with_and_without_an_entry_in_one_batch():
    """Half of the conversations were forgotten; others join later with a prompt of their own."""
    kept, plain = Talk(make_model("qwen3"), KeptTurns(GIB)), Talk(make_model("qwen3"), None)
    first = kept.complete([Request(t, t.sample, t.sample % 2 == 0) for t in openings()])
    going = [t.extended(answer_to(t, 0)) for t in first]
    long = Trajectory.of_prompt(tuple((5 * at * at + at) % 101 for at in range(90)), 9, 99)
    requests = [Request(t, t.sample + 50, True) for t in [*going[:3], long, *going[3:]]]
    before = kept.computed
    assert_same(kept.complete(requests), plain.complete(requests))
    assert kept.computed - before < 0.7 * plain.computed  # the long one was read apart
    assert len(kept.kept) == len(requests)


def test_what_a_template_rewrote_is_read_again_and_what_came_before_is_not():
    """The beginning that two turns share is used, also where the second goes on with other tokens than were drawn."""
    kept, plain = Talk(make_model("qwen3"), KeptTurns(GIB)), Talk(make_model("qwen3"), None)
    opening = openings([tuple((3 * at * at + 1) % 101 for at in range(60))], 1)[0]
    (said,) = kept.complete([Request(opening, 3, True)])
    rewritten = opening.extended(Segment(tuple((t + 1) % 101 for t in said.sampled[0].tokens), "template"))
    request = Request(rewritten.extended(Segment((8, 9, 10), "environment")), 4)
    before = kept.computed
    found = kept.complete([request], replace(SAMPLING, max_new_tokens=1))
    assert kept.computed - before == len(request.tokens) - len(opening.tokens)
    assert_same(found, plain.complete([request], replace(SAMPLING, max_new_tokens=1)))


def test_an_entry_that_another_conversation_shares_in_part_is_there_for_both():
    """In a game, conversations of one prompt part ways: one goes on with an entry, the other shares its beginning."""
    kept, plain = Talk(make_model("qwen3"), KeptTurns(GIB)), Talk(make_model("qwen3"), None)
    opening = openings([tuple((3 * at * at + 1) % 101 for at in range(60))], 1)[0]
    (said,) = kept.complete([Request(opening, 3, True)])
    other = Trajectory.of_prompt((*opening.tokens[:40], *((7 * at) % 101 for at in range(25))), 1, 1)
    requests = [Request(other, 5, True), Request(said.extended(answer_to(said, 0)), 4, True)]
    assert_same(kept.complete(requests), plain.complete(requests))


def states(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 1, num, 2), torch.zeros(1, 1, num, 2)


def test_an_entry_is_found_by_its_tokens_alone():
    store = KeptTurns(GIB)
    tokens = tuple(range(40))
    store.keep(tokens, 30, states(40))
    assert store.take((*range(15), 99, *range(16, 60))) is None  # less than a chunk is the same
    found = store.take((*range(37), 99, 98))
    assert found is not None and found.length == 37
    assert store.take((*tokens, 1)) is None and store.nbytes == 0
    store.keep(tokens, 30, states(40))
    shared = store.take((*range(20), 99, 98))  # another conversation, which shares a prompt with it
    assert shared is not None and (shared.length, len(store)) == (20, 1)
    whole = store.take(tokens)  # a token is left to read: its logits are asked for
    assert whole is not None and whole.length == 39


def test_hashes_that_collide_are_not_trusted(monkeypatch):
    monkeypatch.setattr("shardproof.rollout.kept.hash", lambda given: 1, raising=False)
    store = KeptTurns(GIB)
    store.keep(tuple(range(40)), 30, states(40))
    assert store.take(tuple(range(100, 160))) is None
    assert store.take((*range(40), 7)).length == 40


def test_memory_is_bounded_and_what_is_in_use_is_not_given_up_for_what_is_new():
    one = 2 * states(32)[0].nbytes
    store = KeptTurns(3 * one)
    sequence = lambda first: tuple(range(first, first + 32))  # noqa: E731
    store.begin_wave()
    assert [store.keep(sequence(40 * k), 20, states(32)) for k in range(4)] == [True, True, True, False]
    assert (len(store), store.nbytes) == (3, 3 * one)
    store.begin_wave()
    assert store.take((*sequence(0), 1)) is not None
    assert store.keep((*sequence(0)[:31], 5), 32, states(32))
    assert not store.keep(sequence(400), 20, states(32))  # the others may still ask in this wave
    store.begin_wave()
    assert store.keep(sequence(500), 20, states(32))  # two of them did not: they are over
    assert store.keep(sequence(600), 20, states(32))
    assert store.take((*sequence(40), 1)) is None and store.take((*sequence(80), 1)) is None
    assert store.take((*sequence(500), 1)) is not None
    assert not KeptTurns(one - 1).keep(sequence(0), 20, states(32))


def test_entries_of_other_weights_are_dropped():
    store = KeptTurns(GIB).at(3)
    store.keep(tuple(range(40)), 30, states(40))
    assert len(store.at(3)) == 1 and len(store.at(4)) == 0
    assert store.nbytes == 0 and store.take(tuple(range(60))) is None


def talk(engine: EmbeddedEngine, first: list[Trajectory] | None = None) -> list[Trajectory]:
    """The second turn of conversations, whose first one was taken now or before."""
    first = first or generate(engine, [Request(t, t.sample, True) for t in openings()], SAMPLING)
    second = [Request(t.extended(answer_to(t, 0)), t.sample + 50, True) for t in first]
    return generate(engine, second, SAMPLING)


def weights_that_change(folder: str) -> dict[str, Any]:
    policy = sp.load(folder)
    engine, fresh = EmbeddedEngine(policy, 5), EmbeddedEngine(policy, 5, cache_gib=0)

    def sync(*engines: EmbeddedEngine) -> None:
        for each in engines:
            each.load_weights(sp.WeightStream(policy, torch.float32))

    sync(engine, fresh)
    first = generate(engine, [Request(t, t.sample, True) for t in openings()], SAMPLING)
    found: dict[str, Any] = {"kept": len(engine.kept), "off": len(fresh.kept)}
    with torch.no_grad():
        for _, param in policy.named_parameters():
            param.mul_(1.2)
    # The same version number, other bytes: what a restored checkpoint may bring.
    sync(engine, fresh)
    found["after load"] = len(engine.kept)
    found["same"] = [t.tokens for t in talk(engine, first)] == [t.tokens for t in talk(fresh, first)]
    # Weights that arrive in any other way count as well, by their version.
    talk(engine)
    assert len(engine.kept)
    with torch.no_grad():
        for each in (engine, fresh):
            each.version += 1
            for param in each.model.parameters():
                param.mul_(0.8)
    found["other version"] = [t.tokens for t in talk(engine, first)] == [t.tokens for t in talk(fresh, first)]
    found["held"] = engine.kept.nbytes
    forget(engine)
    found["forgotten"] = (len(engine.kept), engine.kept.nbytes)
    talk(engine)
    engine.sleep()
    found["asleep"] = len(engine.kept)
    return found


def keys_of_older_weights_matter(folder: str) -> float:
    """How far log-probs are off where a cache is read that older weights have written: what the rules prevent."""
    policy = sp.load(folder)
    engine, fresh = EmbeddedEngine(policy, 8), EmbeddedEngine(policy, 8, cache_gib=0)
    for each in (engine, fresh):
        each.load_weights(sp.WeightStream(policy, torch.float32))
    first = generate(engine, [Request(t, t.sample, True) for t in openings()], SAMPLING)
    with torch.no_grad():
        for each in (engine, fresh):
            for param in each.model.parameters():
                param.mul_(1.2)
    pairs = zip(talk(engine, first), talk(fresh, first), strict=True)
    return max(abs(a.sampled[-1].logprobs[0] - b.sampled[-1].logprobs[0]) for a, b in pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_tied"))


@pytest.mark.distributed
def test_keys_of_older_weights_are_never_read(folder):
    (found,) = run_ranks(1, weights_that_change, folder)
    assert (found["kept"], found["off"]) == (8, 0)
    assert found["after load"] == 0 and found["same"] and found["other version"]
    assert found["held"] > 0 and found["forgotten"] == (0, 0) and found["asleep"] == 0
    (distance,) = run_ranks(1, keys_of_older_weights_matter, folder)
    assert distance > 0.01


def without_keeping(folder: str) -> dict[str, Any]:
    """A family with sliding windows: said once, and right."""
    policy = sp.load(folder)
    engine = EmbeddedEngine(policy, 8)
    engine.load_weights(sp.WeightStream(policy, torch.float32))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardproof.rollout.local")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        talk(engine)
        talk(engine)
    finally:
        logger.removeHandler(handler)
    return {"said": records, "kept": len(engine.kept)}


@pytest.mark.distributed
def test_a_family_that_cannot_be_kept_says_so_once(tmp_path):
    (found,) = run_ranks(1, without_keeping, str(make_checkpoint(tmp_path / "model", "mistral")))
    assert found["kept"] == 0 and len(found["said"]) == 1
    assert "not all of its layers attend to every earlier token" in found["said"][0]


def run_out_of_memory(folder: str) -> dict[str, Any]:
    policy = sp.load(folder)
    engine = EmbeddedEngine(policy, 8)
    engine.load_weights(sp.WeightStream(policy, torch.float32))
    first = generate(engine, [Request(t, t.sample, True) for t in openings()], SAMPLING)
    wanted = talk(engine, first)
    generate(engine, [Request(t, t.sample, True) for t in openings()], SAMPLING)
    plain, failed = engine._decode, []

    def fail_once(*given: Any) -> list[Trajectory]:
        if not failed:
            failed.append(len(engine.kept))
            raise torch.OutOfMemoryError("no memory")
        return plain(*given)

    engine._decode = fail_once  # type: ignore[method-assign]
    return {"same": [t.tokens for t in talk(engine, first)] == [t.tokens for t in wanted], "failed": failed}


@pytest.mark.distributed
def test_memory_that_runs_out_costs_what_was_kept_and_not_the_run(folder):
    (found,) = run_ranks(1, run_out_of_memory, folder)
    assert found["same"] and found["failed"][0] > 0
