"""Engines without a server: what is asked is answered in batches of all ranks, and what sleeps gives its memory up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.config.load import load_recipe
from shardproof.rl.preflight import Start, check_vllm
from shardproof.rollout.engine import Request, Sampling, answers, generate
from shardproof.rollout.local import EmbeddedEngine, ShardedEngine
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_server import Served, VllmSettings, arguments
from shardproof.rollout.vllm_versions import interface_of
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.rl.runs import run_recipe, small_recipe, trajectory

pytestmark = pytest.mark.distributed

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny-vllm.toml"
SAMPLING = Sampling(4, stop_ids=(7, 9))
ENGINES = {"embedded": EmbeddedEngine, "sharded": ShardedEngine}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_tied"))


def ask(num: int, first: int = 0) -> list[Request]:
    return [
        Request(Trajectory.of_prompt((3 + row, 4, 5), row), row + 100) for row in range(first, first + num)
    ]


def refusal(action: Any, *args: Any) -> str:
    with pytest.raises(sp.ShardproofError) as caught:
        action(*args)
    return str(caught.value)


def ready(kind: str, folder: str, batch_size: int) -> Any:
    policy = sp.load(folder)
    engine = ENGINES[kind](policy, batch_size)
    engine.load_weights(sp.WeightStream(policy, policy.settings.compute_dtype))
    return engine


def asked_twice(kind: str, folder: str) -> dict[str, Any]:
    """Rank 0 asks for 5 and 2, rank 1 for 1 and 4, in batches of 2."""
    engine, rank = ready(kind, folder, 2), dist.get_rank()
    first, second = (ask((5, 1)[rank]), SAMPLING), (ask((2, 4)[rank], 5), Sampling(2))
    tickets = [engine.submit(*first), engine.submit(*second)]
    polled = []
    while engine.busy:
        polled.append(engine.poll())
    idle = engine.poll()
    order = [ticket for batch in polled for ticket, _ in batch]
    alone = generate(engine, *first) + generate(engine, *second)
    same = [made for batch in polled for _, made in batch] == alone
    in_parts = [[index for index, _ in part] for part in answers(engine, *first)]
    limited = generate(engine, [replace(each, max_new_tokens=1) for each in first[0]], SAMPLING)
    made = alone[0]
    return {
        "sizes": [len(batch) for batch in polled],
        "in order": order == [*tickets[0], *tickets[1]] and len(set(order)) == len(order),
        "same": same and idle == [],
        "parts": in_parts,
        "made": (made.group, [s.author for s in made.segments], made.segments[1].trained, made.version),
        "whole": len(made.segments[1].logprobs) == made.num_sampled,
        "limited": [t.sampled[0].tokens for t in limited]
        == [t.sampled[0].tokens[:1] for t in alone[: len(limited)]],
    }


@pytest.mark.parametrize("kind", ENGINES)
def test_requests_are_answered_in_batches_first_in_first_out(folder, kind):
    found = run_ranks(2, asked_twice, kind, folder)
    assert [each["sizes"] for each in found] == [[2, 2, 1, 2, 0], [1, 0, 0, 2, 2]]
    assert [each["parts"] for each in found] == [[[0, 1], [2, 3], [4]], [[0], [], []]]
    for each in found:
        assert each["in order"] and each["same"] and each["whole"] and each["limited"]
        assert each["made"] == (0, ["prompt", "policy"], True, 0)


def fail_once(folder: str) -> dict[str, Any]:
    engine = ready("embedded", folder, 2)
    wanted = generate(engine, ask(4), SAMPLING)
    outside = Request(Trajectory.of_prompt((10**6,)), 0)  # of the vocabulary
    engine.submit([*ask(2), *([outside] if dist.get_rank() else ask(1)), *ask(3)], SAMPLING)
    found = {"first": len(engine.poll()), "message": refusal(engine.poll)}
    found |= {"busy": engine.busy, "rest": engine.poll()}
    return found | {"usable": generate(engine, ask(4), SAMPLING) == wanted}


def test_what_cannot_be_answered_raises_on_all_ranks_and_leaves_nothing_behind(folder):
    first, second = run_ranks(2, fail_once, folder)
    assert first == second
    assert first.pop("message").startswith("R500 generate: rank 1: IndexError")
    assert first == {"first": 2, "busy": False, "rest": [], "usable": True}


def sleep_and_wake(folder: str) -> dict[str, Any]:
    engine = ready("embedded", folder, 8)
    policy_stream = sp.WeightStream(sp.load(folder), torch.float32)
    before = generate(engine, ask(3), SAMPLING)
    engine.decoder = PagedDecoder(engine.model, engine.device)  # as on CUDA
    generate(engine, ask(3), SAMPLING)
    held = [ref(tensor) for tensor in tensors_of(engine.decoder)]
    storages = [param.untyped_storage() for param in engine.model.parameters()]
    found: dict[str, Any] = {"held": [bool(held), all(storage.nbytes() for storage in storages)]}
    engine.submit(ask(1), SAMPLING)
    found["busy"] = refusal(engine.sleep)
    engine.poll()
    engine.sleep()
    found["left"] = [sum(each() is not None for each in held), sum(s.nbytes() for s in storages)]
    found["version"] = engine.version
    found["asleep"] = refusal(generate, engine, ask(1), SAMPLING)
    found["load"] = refusal(engine.load_weights, policy_stream)
    engine.wake()
    found["unwritten"] = all(param.isnan().all() for param in engine.model.parameters())
    found["awake"] = refusal(generate, engine, ask(1), SAMPLING)
    engine.load_weights(policy_stream)
    paged = generate(engine, ask(3), SAMPLING)
    engine.decoder = None
    found["same"] = generate(engine, ask(3), SAMPLING) == before
    return found | {"paged": [each.tokens for each in paged] == [each.tokens for each in before]}


def without_a_paged_cache(folder: str) -> dict[str, Any]:
    """A decoder that fails for a reason of its own is given up, and what batches of rows draw is the same."""
    engine = ready("embedded", folder, 2)
    before = generate(engine, ask(5), SAMPLING)
    engine.decoder = PagedDecoder(engine.model, engine.device)

    def fail(*given: Any) -> None:
        raise ValueError("this attention has another shape")

    engine.decoder.__class__ = type("Failing", (PagedDecoder,), {"__call__": fail})
    engine.take_all_at_once()
    return {"same": generate(engine, ask(5), SAMPLING) == before, "gone": engine.decoder is None}


def test_an_engine_whose_paged_cache_fails_decodes_without(folder):
    (found,) = run_ranks(1, without_a_paged_cache, folder)
    assert found == {"same": True, "gone": True}


def only_a_paged_cache_is_exact(folder: str, latent: str) -> dict[str, Any]:
    """What engines on CUDA say that cannot be exact: their paged cache fails, or their model has none."""
    policy = sp.load(folder)
    engine = EmbeddedEngine(policy, exact=True)
    engine.load_weights(sp.WeightStream(policy, policy.settings.compute_dtype))

    def fail(*given: Any) -> None:
        raise ValueError("this attention has another shape")

    engine.decoder = PagedDecoder(engine.model, engine.device)
    engine.decoder.__class__ = type("Failing", (PagedDecoder,), {"__call__": fail})
    found = {"fails": refusal(generate, engine, ask(2), SAMPLING)}
    other = EmbeddedEngine(sp.load(latent), exact=True)
    other.device = torch.device("cuda")
    return found | {"none": refusal(other._make_decoder, 4, None)}


def test_an_exact_engine_on_cuda_never_decodes_without_a_paged_cache(folder, tmp_path):
    latent = str(make_checkpoint(tmp_path / "model", "deepseek_v3"))
    (found,) = run_ranks(1, only_a_paged_cache_is_exact, folder, latent)
    assert "R500 generate: decoding with a paged cache failed (ValueError: this attention" in found["fails"]
    assert "C001 rollout: rollout.exact=true does not work with 'deepseek_v3' on CUDA" in found["none"]
    assert all("rollout.exact=false" in said for said in found.values())


def tensors_of(decoder: PagedDecoder) -> list[torch.Tensor]:
    memory, *_ = decoder.parts
    return [memory.slots.tokens, memory.logits, memory.cache.keys[0]]


def test_an_engine_that_sleeps_gives_its_memory_up_and_gets_it_back(folder):
    for found in run_ranks(2, sleep_and_wake, folder):
        assert found["held"] == [True, True] and found["left"] == [0, 0]
        assert found["version"] == -1 and found["unwritten"]
        assert "R501 sleep: the engine still has requests to answer." in found["busy"]
        assert "R501 generate: the engine is asleep: its weights and memory were freed." in found["asleep"]
        assert "call wake, then load_weights" in found["asleep"]
        assert "R501 load_weights: the engine is asleep" in found["load"]
        assert "R501 generate: the engine has no weights yet." in found["awake"]
        assert found["same"] and found["paged"]


def run_and_count(recipe: str) -> int:
    """How often the engine of a run has slept."""
    slept, sleep = [], EmbeddedEngine.sleep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedEngine, "sleep", lambda self: (slept.append(self), sleep(self)))
        run_recipe(recipe)
    return len(slept)


def test_a_run_is_the_same_whether_its_engine_sleeps_or_not(tmp_path):
    for sleeps in ("true", "false"):
        recipe = small_recipe(tmp_path / sleeps, f"rollout.sleep={sleeps}", "output.save_model=false")
        assert run_ranks(2, run_and_count, recipe) == [2 if sleeps == "true" else 0] * 2
    assert trajectory(tmp_path / "true") == trajectory(tmp_path / "false") != []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["rollout.vllm.mode=server", "rollout.vllm.url=http://127.0.0.1:9"],
            "was not started by this run, so the run cannot put it to sleep",
        ),
        ([], "vLLM's sleep mode needs a GPU"),
    ],
)
def test_a_vllm_server_that_cannot_sleep_is_refused_before_a_start(settings, said):
    recipe = load_recipe(RECIPE, ["rollout.sleep=true", *settings])
    message = refusal(check_vllm, Start(recipe, 1))
    assert (
        message.startswith("C001 rollout: rollout.sleep:")
        and said in message
        and "rollout.sleep=false" in message
    )


def test_a_vllm_server_that_shall_sleep_is_started_so():
    for sleeps in (True, False):
        given = arguments(
            VllmSettings(), Served(Path("model"), "float32", "cuda", sleeps=sleeps), interface_of("0.32.0")
        )
        assert ("--enable-sleep-mode" in given) == sleeps
