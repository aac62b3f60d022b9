"""The loader, the step and the export on a CUDA device: two gloo ranks on one GPU, and NCCL on one rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import shardproof as sp
from shardproof.digest import _kernel, digest, digest_tiles, lazy_digests
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.trajectory import Trajectory
from shardproof.shard.sleeping import SleepingMemory, can_sleep
from shardproof.train.state import training_state
from tests.models import make_checkpoint, tiny_config
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.gpu]

SEQUENCES = [
    [5, 6, 7, 8, 9, 10, 11],
    [1, 2, 3],
    [20] * 9 + [21, 22, 23],
    [40, 41],
    [9, 8, 7, 6, 5, 4, 3, 2, 1],
]
TWO_GLOO = {"num_ranks": 2, "backend": "gloo"}
ONE_NCCL = {"num_ranks": 1, "backend": "cpu:gloo,cuda:nccl"}
# Large enough for activations to be most of what a step holds.
LARGER = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
GROUPS = pytest.mark.parametrize("group", [TWO_GLOO, ONE_NCCL], ids=["two gloo ranks", "one nccl rank"])
STRATEGIES = pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])


def on_ranks(group: dict[str, Any], fn: Any, *args: Any) -> list[Any]:
    return run_ranks(group["num_ranks"], fn, *args, backend=group["backend"], timeout=300)


def load_and_score(folder: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], list[str], list[str]]:
    policy = sp.load(folder, device="cuda", **options)
    scores = sp.logprobs(policy, SEQUENCES)
    devices = {str(shard.flat.device) for shard in policy.local_shards()}
    return [score.cpu() for score in scores], [str(finding) for finding in sp.attest(policy)], sorted(devices)


def plain_scores(folder: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = []
    with torch.no_grad():
        for sequence in SEQUENCES:
            every = model(input_ids=torch.tensor([sequence])).logits[0].log_softmax(-1)
            rows.append(every[:-1].gather(1, torch.tensor(sequence[1:])[:, None]).squeeze(1))
    return torch.cat(rows)


@GROUPS
@STRATEGIES
@pytest.mark.parametrize(
    "family", ["llama", "qwen3_tied", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma3_text"]
)
def test_log_probs_equal_plain_transformers(tmp_path, group, strategy, family):
    folder = str(make_checkpoint(tmp_path, family))
    expected = plain_scores(folder)
    for scores, findings, devices in on_ranks(
        group, load_and_score, folder, {"strategy": strategy, "compute_dtype": torch.float32}
    ):
        assert findings == []
        assert devices == ["cuda:0"]
        torch.testing.assert_close(torch.cat(scores), expected, atol=2e-4, rtol=0)


@GROUPS
@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"sequence_parallel": 2}], ids=str)
def test_bf16_flash_attention_equals_fp32_within_bf16_noise(tmp_path, group, options):
    if options.get("sequence_parallel", 1) > group["num_ranks"]:
        pytest.skip("sequence parallelism needs two ranks")
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    expected = plain_scores(folder)
    for scores, findings, _ in on_ranks(group, load_and_score, folder, options):
        assert findings == []
        assert torch.isfinite(torch.cat(scores)).all()
        assert (torch.cat(scores) - expected).abs().max() < 0.15


def train(
    folder: str, device: str, options: dict[str, Any], steps: int = 2
) -> tuple[list[Any], torch.Tensor]:
    shard = options.pop("spread", True)
    policy = sp.load(folder, device=device, compute_dtype=torch.float32, **options)
    optimizer = sp.make_optimizer(policy, lr=1e-2, weight_decay=0.1)
    rank, world = (
        dist.get_rank() // policy.sequence_parallel,
        dist.get_world_size() // policy.sequence_parallel,
    )
    mine = SEQUENCES[rank::world] if shard else SEQUENCES
    results = [sp.train_step(policy, sp.Batch(mine), optimizer, micro_batch_tokens=12) for _ in range(steps)]
    return [(r.loss, r.grad_norm) for r in results], torch.cat(
        [row.cpu() for row in sp.logprobs(policy, SEQUENCES)]
    )


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize(
    ("group", "options"),
    [
        (TWO_GLOO, {"strategy": "fsdp2"}),
        (TWO_GLOO, {"strategy": "fsdp1", "checkpoint_activations": True}),
        (TWO_GLOO, {"strategy": "fsdp2", "sequence_parallel": 2, "checkpoint_activations": True}),
        (TWO_GLOO, {"strategy": "fsdp2", "cpu_offload": True, "reshard_after_forward": False}),
        (ONE_NCCL, {"strategy": "fsdp2", "checkpoint_activations": True, "reshard_after_forward": False}),
        (ONE_NCCL, {"strategy": "fsdp2", "checkpoint_activations": "auto"}),
        (ONE_NCCL, {"strategy": "fsdp2", "cpu_offload": True}),
        (ONE_NCCL, {"strategy": "fsdp1"}),
        (TWO_GLOO, {"strategy": "fsdp1", "checkpoint_activations": "auto"}),
    ],
    ids=str,
)
def test_trajectory_equals_the_cpu(tmp_path, family, group, options):
    folder = str(make_checkpoint(tmp_path, family))
    expected, expected_scores = run_ranks(1, train, folder, "cpu", {})[0]
    for results, scores in on_ranks(group, train, folder, "cuda", options):
        for (loss, norm), (want_loss, want_norm) in zip(results, expected, strict=True):
            assert loss == pytest.approx(want_loss, rel=2e-4)
            assert norm == pytest.approx(want_norm, rel=2e-3)
        torch.testing.assert_close(scores, expected_scores, atol=5e-3, rtol=0)


@contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step_without_sync(folder: str, options: dict[str, Any]) -> bool:
    from shardproof.train import passes

    policy = sp.load(folder, device="cuda", **options)
    optimizer = sp.make_optimizer(policy, lr=1e-3)
    batch = sp.Batch(SEQUENCES)
    sp.train_step(policy, batch, optimizer, micro_batch_tokens=12)  # lazy set-up may wait
    original = passes.backward

    def watched(*args: Any) -> Any:
        with no_host_sync():
            return original(*args)

    passes.backward = watched
    try:
        return sp.train_step(policy, batch, optimizer, micro_batch_tokens=12).stepped
    finally:
        passes.backward = original


@pytest.mark.parametrize(
    "options", [{}, {"checkpoint_activations": "auto"}, {"reshard_after_forward": False}], ids=str
)
def test_no_host_sync_in_the_micro_batch_loop(tmp_path, options):
    assert on_ranks(ONE_NCCL, step_without_sync, str(make_checkpoint(tmp_path, "qwen3")), options) == [True]


def train_within(checkpoint_activations: bool | str, limit: int | None) -> dict[str, Any]:
    """Three steps of two micro-batches of 12,000 tokens, in a process that may hold `limit` bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        config = AutoConfig.for_model("qwen3", **LARGER)
        policy = sp.load(
            sp.RandomInit(config),
            device="cuda",
            checkpoint_activations=checkpoint_activations,
            compile=False,  # blocks as written keep more, so that a limit tells
            progress=False,
        )
        optimizer = sp.make_optimizer(policy, lr=1e-4)
        batch = sp.Batch([[(7 * i + 3 * j) % 8000 for j in range(1025)] for i in range(24)])
        results = [sp.train_step(policy, batch, optimizer, micro_batch_tokens=16 * 1025) for _ in range(3)]
        recompute = training_state(policy).recompute
        return {
            "losses": [result.loss for result in results],
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "recomputed": list(recompute.counts) if recompute is not None else [],
            "gathered": sum(2 * info.numel for info in policy.inventory.parameters),
        }
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_auto_fits_into_what_there_is():
    (kept,) = on_ranks(ONE_NCCL, train_within, False, None)
    (frugal,) = on_ranks(ONE_NCCL, train_within, True, None)
    room = kept["allocated"] - frugal["allocated"]
    assert room > frugal["allocated"] / 2  # the model is large enough to tell
    (free,) = on_ranks(ONE_NCCL, train_within, "auto", None)
    assert set(free["recomputed"]) == {0}
    # Parameters may stay gathered, and then so do their gradients in float32.
    assert free["allocated"] < kept["allocated"] * 1.02 + 4 * kept["gathered"]
    limit = frugal["allocated"] + int(0.7 * room)
    (tight,) = on_ranks(ONE_NCCL, train_within, "auto", limit)
    assert tight["reserved"] <= limit
    assert 0 < max(tight["recomputed"]) < LARGER["num_hidden_layers"]
    for found in (frugal, free, tight):
        assert found["losses"] == pytest.approx(kept["losses"], rel=2e-3)


def export_twice(folder: str, lora: bool, move: bool) -> Any:
    options: dict[str, Any] = {}
    if lora:
        from peft import LoraConfig

        options["lora"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    policy = sp.load(folder, device="cuda", cpu_offload=True, compute_dtype=torch.float32, **options)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    digests = []
    for _ in range(2):
        assert sp.train_step(policy, sp.Batch(SEQUENCES), optimizer, micro_batch_tokens=12).stepped
        stream = sp.WeightStream(policy)
        assert all(tensor.device.type == "cuda" for _, tensor in stream)
        assert stream.receipt.findings == []
        digests.append(stream.receipt.digest)
    if not move:
        return len(set(digests)), policy.offload().note
    policy.module.to("cuda")
    try:
        list(sp.WeightStream(policy))
    except sp.ExportFault as fault:
        return fault.code
    return None


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora merged"])
def test_verl_6188_stream_under_cpu_offload(tmp_path, lora):
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    for group in (ONE_NCCL, TWO_GLOO):
        for different, note in on_ranks(group, export_twice, folder, lora, False):
            assert different == 2
            assert "host memory already" in note


def test_verl_6188_a_moved_module_is_named(tmp_path):
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    assert on_ranks(ONE_NCCL, export_twice, folder, False, True) == ["E401"]


def offload_and_back(folder: str, strategy: str) -> Any:
    policy = sp.load(folder, device="cuda", strategy=strategy, compute_dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    sp.train_step(policy, sp.Batch(SEQUENCES), optimizer)
    before = sp.WeightStream(policy)
    list(before)
    held = torch.cuda.memory_allocated()
    moved = policy.offload(optimizer)
    free = torch.cuda.memory_allocated()
    while_away = sp.WeightStream(policy)
    list(while_away)
    for ask in (
        lambda: sp.logprobs(policy, SEQUENCES),
        lambda: sp.train_step(policy, sp.Batch(SEQUENCES), optimizer),
        lambda: policy(input_ids=torch.ones(1, 2, dtype=torch.int64, device="cuda")),
    ):
        with pytest.raises(sp.ShardFault, match="S215"):
            ask()
    assert {finding.code for finding in sp.attest(policy)} == {"S215"}
    policy.onload()
    after = sp.WeightStream(policy)
    list(after)
    result = sp.train_step(policy, sp.Batch(SEQUENCES), optimizer)
    same = before.receipt.digest == while_away.receipt.digest == after.receipt.digest
    return same, moved.num_bytes > 0, free < held, result.loss


@GROUPS
def test_offload_and_onload_are_bit_identical(tmp_path, group):
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    losses = set()
    for strategy in ("fsdp2", "fsdp1"):
        for same, moved, freed, loss in on_ranks(group, offload_and_back, folder, strategy):
            assert same and moved and freed
            losses.add(round(loss, 4))
    assert len(losses) == 1


def save_while_offloading(folder: str, run: str, strategy: str) -> Any:
    """Each checkpoint in the background, without its optimizer; then the weights go, or change, at once."""
    policy = sp.load(folder, device="cuda", strategy=strategy, compute_dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, lr=1e-1)
    expected = torch.cat([row.cpu() for row in sp.logprobs(policy, SEQUENCES)])
    for step, change in enumerate(
        (policy.offload, lambda: sp.train_step(policy, sp.Batch(SEQUENCES), optimizer)), start=1
    ):
        pending = sp.save_checkpoint(run, policy, step=step, background=True)
        change()
        policy.onload()
        pending.wait()
    errors = []
    for name in ("step-00000001", "step-00000002"):
        again = sp.load(folder, device="cuda", strategy=strategy, compute_dtype=torch.float32)
        sp.resume(run, again, which=name)
        errors.append(
            float((torch.cat([row.cpu() for row in sp.logprobs(again, SEQUENCES)]) - expected).abs().max())
        )
    return errors


@STRATEGIES
def test_what_is_saved_is_what_there_was_at_the_call(tmp_path, strategy):
    folder = str(make_checkpoint(tmp_path / "model", "qwen3"))
    assert on_ranks(ONE_NCCL, save_while_offloading, folder, str(tmp_path / "run"), strategy) == [[0.0, 0.0]]


def score_without_borders(family: str, initializer_range: float, broken: bool) -> tuple[bool, float]:
    """(whether sequences are packed, how far the scores are from the model's own forward's)."""
    from shardproof.model import attention
    from shardproof.model.packing import Packing
    from shardproof.train.forward import Scoring

    flash = attention._flash

    def across_borders(query: Any, key: Any, value: Any, packing: Packing, *args: Any) -> torch.Tensor:
        return flash(query, key, value, Packing([sum(packing.lengths)], query.device), *args)

    config = tiny_config(family, initializer_range=initializer_range, head_dim=16)
    with pytest.MonkeyPatch.context() as patch:
        if broken:
            patch.setattr(attention, "_flash", across_borders)
        policy = sp.load(sp.RandomInit(config), device="cuda", compile=False, progress=False)
        found = torch.cat(sp.logprobs(policy, SEQUENCES))
        is_packed = training_state(policy).scoring.packed
        training_state(policy).scoring = Scoring("eager", False, "")
        return is_packed, float((torch.cat(sp.logprobs(policy, SEQUENCES)) - found).abs().mean())


@pytest.mark.parametrize("broken", [False, True], ids=["right", "without borders"])
@pytest.mark.parametrize("initializer_range", [0.1, 0.02])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "olmo2"])
def test_flash_attention_across_borders_is_not_used(family, initializer_range, broken):
    ((is_packed, error),) = on_ranks(ONE_NCCL, score_without_borders, family, initializer_range, broken)
    assert is_packed is not broken
    assert error < 0.02


def save_and_resume(folder: str, run: str, strategy: str) -> Any:
    policy = sp.load(folder, device="cuda", strategy=strategy, compute_dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    sp.train_step(policy, sp.Batch(SEQUENCES), optimizer)
    pending = sp.save_checkpoint(run, policy, optimizer, extra={"position": 3}, background=True)
    expected = sp.train_step(policy, sp.Batch(SEQUENCES), optimizer).loss
    pending.wait()
    again = sp.load(folder, device="cuda", strategy=strategy, compute_dtype=torch.float32)
    other = sp.make_optimizer(again, lr=1e-2)
    extra = sp.resume(run, again, other)
    return extra, sp.train_step(again, sp.Batch(SEQUENCES), other).loss - expected


@GROUPS
@STRATEGIES
def test_resume_is_bit_identical(tmp_path, group, strategy):
    folder = str(make_checkpoint(tmp_path / "model", "qwen3"))
    for extra, difference in on_ranks(group, save_and_resume, folder, str(tmp_path / "run"), strategy):
        assert extra == {"position": 3}
        assert difference == 0.0


def decode_both_ways(folder: str, options: dict[str, Any]) -> list[tuple[bool, list[Any], list[Any]]]:
    """(whether steps are graphs, completions through graphs, completions without), before and after an update."""
    policy = sp.load(folder, device="cuda", **options)
    optimizer = sp.make_optimizer(policy, 1e-2)
    engine = EmbeddedEngine(policy)
    requests = [Request(Trajectory.of_prompt(tuple(s)), seed) for seed, s in enumerate(SEQUENCES * 2)]
    sampling = Sampling(40, temperature=0.9, stop_ids=(3, 4))
    found = []
    for _ in range(2):
        engine.load_weights(sp.WeightStream(policy, policy.settings.compute_dtype))
        decoder, through_graphs = engine.decoder, generate(engine, requests, sampling)
        engine.decoder = None
        without = generate(engine, requests, sampling)
        engine.decoder = decoder
        found.append((decoder is not None, through_graphs, without))
        # Asleep it has neither its weights nor its graphs and caches.
        held, weights = torch.cuda.memory_allocated(), sum(p.nbytes for p in engine.model.parameters())
        engine.sleep()
        assert held - torch.cuda.memory_allocated() > weights
        engine.wake()
        sp.train_step(policy, sp.Batch(SEQUENCES), optimizer)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3_tied", "qwen3_moe"])
def test_graphs_draw_what_a_growing_cache_draws(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    options = {"compute_dtype": torch.float32}
    (rounds,) = on_ranks(ONE_NCCL, decode_both_ways, str(folder), options)
    for captured, through_graphs, without in rounds:
        assert captured
        assert [c.tokens for c in through_graphs] == [c.tokens for c in without]
        for one, other in zip(through_graphs, without, strict=True):
            said, expected = (torch.tensor(each.sampled[-1].logprobs) for each in (one, other))
            assert torch.allclose(said, expected, atol=1e-4)
    assert rounds[0][1] != rounds[1][1]


@pytest.mark.parametrize("numel", [3, 2048, 5001, 3_000_003])
def test_a_gpu_takes_the_digests_of_a_cpu(numel: int) -> None:
    values = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel)).to(torch.bfloat16)
    assert _kernel(torch.device("cuda", torch.cuda.current_device())) is not None
    assert digest_tiles(values.cuda()) == digest_tiles(values)
    assert digest(values.cuda()) == digest(values)
    mixed = [values[0], values[1, 1:], values[2, : numel // 4 * 4]]
    assert lazy_digests([each.cuda() for each in mixed]).tolist() == [digest(each) for each in mixed]


def test_memory_sleeps_and_comes_back_at_the_same_address_for_graphs() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert can_sleep(device)
    memory = SleepingMemory(device)
    weight, large = memory.empty((64, 64), torch.float32), memory.empty((2**28,), torch.uint8)
    x, out = torch.randn(8, 64, device=device), torch.empty(8, 64, device=device)
    torch.mm(x, weight.zero_(), out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(x, weight, out=out)
    address = weight.data_ptr()
    for _ in range(2):
        awake = torch.cuda.mem_get_info(device)[0]
        memory.sleep()
        assert memory.nbytes == 0 and torch.cuda.mem_get_info(device)[0] - awake >= 2**28
        memory.wake()
        weight.normal_()
        graph.replay()
        assert weight.data_ptr() == address and torch.allclose(out, x @ weight, atol=1e-4)
    held = torch.cuda.mem_get_info(device)[0]
    del large
    assert torch.cuda.mem_get_info(device)[0] - held >= 2**28
