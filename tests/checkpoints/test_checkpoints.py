"""Checkpoints: the resumed run is the uninterrupted one, and any layout reads what another wrote."""

import functools
import json
import random
import threading
import time

import peft
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardproof as sp
from shardproof.checkpoints import folders
from shardproof.checkpoints import save as checkpoint_save
from shardproof.checkpoints.run_state import optimizer_ranges
from shardproof.digest import digest
from tests.export.test_stream import collect, load, lora_config
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

SEQUENCES = [[(11 * i + 5 * j * j + 3) % 101 for j in range(5 + i)] for i in range(6)]
KINDS = {
    "dense": ("qwen3_tied", {}),
    "experts": ("qwen3_moe", {}),
    "buffers": ("deepseek_v3", {}),
    "adapters": ("llama", {"lora": lora_config()}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(family, seed=0):
        return make_checkpoint(tmp_path_factory.mktemp(family), family, seed=seed)

    return make


@pytest.fixture(scope="module")
def sources(checkpoint):
    return {kind: (checkpoint(family), fields) for kind, (family, fields) in KINDS.items()}


class Run:
    """A policy with everything that a run has besides."""

    def __init__(self, source, replicas=1, schedule="cosine", **options):
        self.policy = load(source, replicas, **options)
        self.optimizer = sp.make_optimizer(self.policy, lr=1e-2, weight_decay=0.1)
        self.scheduler = make_schedule(self.optimizer, schedule)

    def step(self):
        """One update from a batch that the random state chooses; what it did."""
        index = random.randrange(len(SEQUENCES)) + int(torch.randint(3, ()))
        chosen = [SEQUENCES[(index + i) % len(SEQUENCES)] for i in range(2)]
        result = sp.train_step(self.policy, sp.Batch(chosen), self.optimizer, self.scheduler)
        assert result.stepped
        return result.loss, result.grad_norm, result.lr, result.version, index

    def save(self, folder, **options):
        return sp.save_checkpoint(folder, self.policy, self.optimizer, self.scheduler, **options)

    def resume(self, folder, **options):
        return sp.resume(folder, self.policy, self.optimizer, self.scheduler, **options)

    def held(self):
        """Digests of what this rank holds, and everything else that a step depends on."""
        ranges = optimizer_ranges(self.policy, self.optimizer)
        return {
            "weights": {shard.name: digest(shard.flat) for shard in self.policy.local_shards()},
            "moments": {name: digest(item.flat) for name, item in ranges.items() if item.flat.numel()},
            "steps": [float(row["step"]) for row in self.optimizer.state.values()],
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "schedule": self.scheduler.get_last_lr() if self.scheduler is not None else None,
            "version": (self.policy.version, self.policy.num_updates),
            "draws": (torch.rand(2).tolist(), random.random()),
        }


def make_schedule(optimizer, kind):
    if kind is None:
        return None
    if kind == "cosine":
        return sp.make_schedule(optimizer, "cosine", warmup_steps=2, total_steps=9, final_ratio=0.1)
    rates = torch.optim.lr_scheduler
    warm = rates.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    rest = rates.ExponentialLR(optimizer, gamma=0.5)
    return rates.SequentialLR(optimizer, [warm, rest], milestones=[4])


# The same world size.


def seed_rank():
    torch.manual_seed(100 + dist.get_rank())
    random.seed(200 + dist.get_rank())


def uninterrupted(sources, replicas, options, num_steps):
    """{kind: (what each step did, what is held at the end)}."""
    found = {}
    for kind, (source, fields) in sources.items():
        seed_rank()
        run = Run(source, replicas, **options, **fields)
        found[kind] = [run.step() for _ in range(num_steps)], run.held()
    return found


def first_half(sources, replicas, options, root, num_steps, background):
    for kind, (source, fields) in sources.items():
        seed_rank()
        run = Run(source, replicas, **options, **fields)
        for _ in range(num_steps):
            run.step()
        pending = run.save(root / kind, extra={"epoch": 2, "rows": [1, 2]}, background=background)
        assert pending.wait() == root / kind / f"step-{num_steps:08d}"
        assert pending.blocked_seconds > 0
        assert pending.write_seconds > 0


def second_half(sources, replicas, options, root, num_steps):
    found = {}
    for kind, (source, fields) in sources.items():
        run = Run(source, replicas, **options, **fields)
        assert run.resume(root / kind) == {"epoch": 2, "rows": [1, 2]}
        found[kind] = [run.step() for _ in range(num_steps)], run.held()
    return found


def assert_same_run(num_ranks, sources, replicas, options, root, background, expected=None):
    expected = expected or run_ranks(num_ranks, uninterrupted, sources, replicas, options, 4)
    run_ranks(num_ranks, first_half, sources, replicas, options, root, 2, background)
    resumed = run_ranks(num_ranks, second_half, sources, replicas, options, root, 2)
    for wanted, found in zip(expected, resumed, strict=True):
        for kind in sources:
            assert found[kind][0] == wanted[kind][0][2:], kind
            assert found[kind][1] == wanted[kind][1], kind


@pytest.fixture(scope="module")
def main_sources(sources):
    return {kind: sources[kind] for kind in ("dense", "experts", "adapters")}


@pytest.fixture(scope="module")
def whole_runs(main_sources):
    """A function from a strategy to what two ranks do without an interruption."""

    @functools.cache
    def run(strategy):
        return run_ranks(2, uninterrupted, main_sources, 1, {"strategy": strategy}, 4)

    return run


@pytest.mark.parametrize(("strategy", "background"), [("fsdp1", True), ("fsdp2", False)])
def test_the_resumed_run_is_the_uninterrupted_one_to_the_bit(
    main_sources, whole_runs, tmp_path, strategy, background
):
    options = {"strategy": strategy}
    assert_same_run(2, main_sources, 1, options, tmp_path, background, whole_runs(strategy))


@pytest.mark.parametrize(
    ("num_ranks", "replicas", "options", "kind"),
    [
        (1, 1, {"strategy": "fsdp2"}, "buffers"),
        (3, 1, {"strategy": "fsdp2"}, "adapters"),
        (4, 2, {"strategy": "fsdp1"}, "buffers"),
        (4, 2, {"strategy": "fsdp2"}, "buffers"),
        (2, 1, {"strategy": "fsdp2", "cpu_offload": True}, "adapters"),
        (2, 1, {"strategy": "fsdp2", "param_dtype": torch.bfloat16}, "buffers"),
    ],
    ids=["1", "3", "fsdp1 2x2", "fsdp2 2x2", "offloaded", "bfloat16"],
)
def test_other_layouts_resume_to_the_bit(sources, tmp_path, num_ranks, replicas, options, kind):
    assert_same_run(num_ranks, {kind: sources[kind]}, replicas, options, tmp_path, background=True)


@pytest.mark.parametrize("schedule", [None, "cosine", "sequential"])
def test_schedules_resume(sources, tmp_path, schedule):
    chosen = {"dense": sources["dense"]}
    assert_same_run(2, chosen, 1, {"schedule": schedule}, tmp_path, False)


# Any world size, either strategy.

CHAINS = {
    "fsdp2 first": [(2, 1, "fsdp2"), (4, 1, "fsdp1"), (1, 1, "fsdp2"), (3, 1, "fsdp1")],
    "fsdp1 first": [(2, 1, "fsdp1"), (4, 2, "fsdp2"), (1, 1, "fsdp1"), (3, 1, "fsdp2")],
    # Adapters of three rows on four ranks leave one without any.
    "fsdp2 alone": [(2, 1, "fsdp2"), (4, 1, "fsdp2"), (1, 1, "fsdp2")],
}


def hand_over(sources, replicas, strategy, root, is_first):
    """{kind: (state found in the last checkpoint, loss, state saved)}; a state is this rank's part of everything."""
    found = {}
    for kind, (source, fields) in sources.items():
        run = Run(source, replicas, strategy=strategy, **fields)
        extra = {"link": 0}
        if not is_first:
            extra = run.resume(root / kind)
        before = parts(run)
        batch = sp.Batch(SEQUENCES[dist.get_rank() :: dist.get_world_size()])
        loss = sp.train_step(run.policy, batch, run.optimizer, run.scheduler).loss
        run.save(root / kind, extra={"link": extra["link"] + 1}, background=True).wait()
        found[kind] = before, loss, parts(run), extra
    return found


def parts(run):
    """This rank's [(name, start, elements)] of weights and moments; the steps of what it holds; the rest."""
    ranges = optimizer_ranges(run.policy, run.optimizer)
    rows = [(shard.name, shard.flat_range[0], shard.flat.clone()) for shard in run.policy.local_shards()]
    rows += [(name, item.flat_range[0], item.flat.clone()) for name, item in ranges.items()]
    steps = {float(row["step"]) for param, row in run.optimizer.state.items() if num_held(param)}
    return rows, steps, run.policy.version, run.scheduler.get_last_lr()


def num_held(param):
    return (param.to_local() if isinstance(param, DTensor) else param).numel()


def assembled(replies):
    """{name: whole flat tensor} of all ranks' parts; replicas must agree."""
    pieces = {}
    for rows, _, _, _ in replies:
        for name, start, flat in rows:
            if flat.numel():
                known = pieces.setdefault(name, {}).setdefault(start, flat)
                assert torch.equal(known, flat), name
    whole = {}
    for name, by_start in pieces.items():
        ends = 0
        for start, flat in sorted(by_start.items()):
            assert start == ends, name
            ends = start + flat.numel()
        whole[name] = torch.cat([flat for _, flat in sorted(by_start.items())])
    return whole


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_moves_over_world_sizes_and_strategies(main_sources, tmp_path, chain):
    chosen = {kind: main_sources[kind] for kind in (["adapters"] if chain == "fsdp2 alone" else main_sources)}
    saved, losses = {}, {kind: [] for kind in chosen}
    for link, (num_ranks, replicas, strategy) in enumerate(CHAINS[chain]):
        replies = run_ranks(num_ranks, hand_over, chosen, replicas, strategy, tmp_path, link == 0)
        for kind in chosen:
            before, loss, after, extra = zip(*(reply[kind] for reply in replies), strict=True)
            assert {row["link"] for row in extra} == {link}
            losses[kind].append(loss[0])
            if link:
                found, wanted = assembled(before), saved[kind][0]
                assert found.keys() == wanted.keys()
                assert [name for name in found if not torch.equal(found[name], wanted[name])] == [], kind
                assert {part[2:] for part in map(hashable, before)} == {saved[kind][1]}, kind
                assert set().union(*(part[1] for part in before)) == {float(link)}, kind
            saved[kind] = assembled(after), hashable(after[0])[2:]
            assert set().union(*(part[1] for part in after)) == {float(link + 1)}, kind
            moments = [name for name in saved[kind][0] if name.endswith((".exp_avg", ".exp_avg_sq"))]
            assert moments and all(saved[kind][0][name].abs().sum() > 0 for name in moments)
    alone = run_ranks(1, train_alone, chosen, len(CHAINS[chain]))[0]
    for kind in chosen:
        assert losses[kind] == pytest.approx(alone[kind], abs=1e-4), kind


def hashable(part):
    rows, steps, version, rates = part
    return rows, steps, version, tuple(rates)


def train_alone(sources, num_steps):
    found = {}
    for kind, (source, fields) in sources.items():
        run = Run(source, **fields)
        batch = sp.Batch(SEQUENCES)
        found[kind] = [
            sp.train_step(run.policy, batch, run.optimizer, run.scheduler).loss for _ in range(num_steps)
        ]
    return found


# Which one, and how many.


def save_several(source, root, keep):
    run = Run(source)
    listed, digests = [], {}
    for index in range(5):
        run.step()
        run.save(root, extra={"index": index}, keep=keep, background=bool(index % 2)).wait()
        listed.append([path.name for path in folders.list_checkpoints(root)])
        digests[f"step-{index + 1:08d}"] = collect(run.policy)[2].digest
    return listed, digests


@pytest.mark.parametrize("keep", [1, 2, None])
def test_the_newest_are_kept(sources, tmp_path, keep):
    names = [f"step-{index:08d}" for index in range(1, 6)]
    for listed, _ in run_ranks(2, save_several, sources["dense"][0], tmp_path, keep):
        assert listed == [names[: i + 1][-(keep or 9) :] for i in range(5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", *names[-(keep or 9) :]]


def resume_each(source, root, names):
    found = {}
    for name in names:
        run = Run(source)
        which = {} if name is None else {"which": name}
        extra = run.resume(root, **which)
        by_path = run.resume(root / name) if name not in (None, "latest") else extra
        found[name] = extra, collect(run.policy)[2].digest, run.policy.version, by_path == extra
    return found


def test_by_name_and_latest(sources, tmp_path):
    source = sources["dense"][0]
    (_, digests), *_ = run_ranks(2, save_several, source, tmp_path, None)
    (tmp_path / ".partial-00000099-beef").mkdir()
    (tmp_path / "notes").mkdir()
    names = [None, "latest", "step-00000002", "step-00000005"]
    for reply in run_ranks(2, resume_each, source, tmp_path, names):
        assert reply[None] == reply["latest"] == reply["step-00000005"]
        for name, version in (("step-00000002", 2), ("step-00000005", 5)):
            assert reply[name] == ({"index": version - 1}, digests[name], version, True)


def save_numbered(source, root):
    run = Run(source)
    for step in (9, 10, 100_000_000, 10):
        run.step()
        run.save(root, step=step, keep=None, extra={"at": run.policy.version})
    again = Run(source)
    return [path.name for path in folders.list_checkpoints(root)], again.resume(root, which="step-00000010")


def test_numbers_of_ones_own_and_a_step_saved_again(sources, tmp_path):
    for listed, extra in run_ranks(2, save_numbered, sources["dense"][0], tmp_path):
        assert listed == ["step-00000009", "step-00000010", "step-100000000"]
        assert extra == {"at": 4}


def save_model_only(source, root):
    run = Run(source)
    run.step()
    sp.save_checkpoint(root / "bare", run.policy)
    run.save(root / "full")
    expected = collect(run.policy)[2].digest
    found = []
    for name in ("bare", "full"):
        policy = load(source, role="reference")
        assert sp.resume(root / name, policy) == {}
        found.append((collect(policy)[2].digest, policy.version))
    return [(expected, 1)] * 2 == found


def test_weights_without_an_optimizer(sources, tmp_path):
    assert run_ranks(2, save_model_only, sources["dense"][0], tmp_path) == [True, True]


def test_what_a_checkpoint_holds_beside_tensors_is_json(sources, tmp_path):
    run_ranks(2, first_half, {"dense": sources["dense"]}, 1, {}, tmp_path, 2, False)
    (folder,) = folders.list_checkpoints(tmp_path / "dense")
    assert sorted(path.name for path in folder.iterdir()) == [
        "checksums.txt",
        "index.json",
        "rank-0.bin",
        "rank-1.bin",
        "state.json",
    ]
    state = json.loads((folder / "state.json").read_text())
    assert (state["version"], state["world_size"], len(state["rng"])) == (2, 2, 2)
    assert state["model"]["model.embed_tokens.weight"] == [101, 32]
    assert state["extra"] == {"epoch": 2, "rows": [1, 2]}


# Beside training.


def save_beside_a_step(source, fields, root, slow):
    """A save that is slow to copy, or slow to write, and a training step right after the call."""
    run = Run(source, **fields)
    run.step()
    expected = run.held()["weights"], collect(run.policy)[2].digest
    asked, copied, written = threading.Event(), threading.Event(), threading.Event()
    real_staged, real_write = checkpoint_save.copy_to_host, checkpoint_save._Save.write
    real_wait = checkpoint_save.PendingSave.wait_until_staged

    def wait_until_staged(*args):
        asked.set()
        real_wait(*args)

    def staged(*args):
        if slow == "copy":
            asked.wait(20)  # as slow as the step is
        ranges = real_staged(*args)
        copied.set()
        return ranges

    def write(*args):
        if slow == "write":
            written.wait(20)
        return real_write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_save, "copy_to_host", staged)
        patch.setattr(checkpoint_save._Save, "write", write)
        patch.setattr(checkpoint_save.PendingSave, "wait_until_staged", wait_until_staged)
        pending = run.save(root, background=True)
        called_after_copy = copied.is_set()
        run.step()
        copied_after_step = copied.is_set()
        published_after_step = pending.folder is not None
        blocked = pending.blocked_seconds
        written.set()
        pending.wait()
    changed = collect(run.policy)[2].digest != expected[1]
    again = Run(source, **fields)
    again.resume(root)
    return {
        "saved": (again.held()["weights"], collect(again.policy)[2].digest) == expected,
        "version": again.policy.version,
        "changed": changed,
        "order": (called_after_copy, copied_after_step, published_after_step),
        "blocked": blocked,
        "write": pending.write_seconds,
    }


@pytest.mark.parametrize("kind", ["dense", "adapters"])
@pytest.mark.parametrize("slow", ["copy", "write"])
def test_a_step_beside_a_save_is_not_in_it(sources, tmp_path, kind, slow):
    source, fields = sources[kind]
    for reply in run_ranks(2, save_beside_a_step, source, fields, tmp_path, slow):
        assert reply["saved"]
        assert reply["version"] == 1
        assert reply["changed"]
        if slow == "copy":
            # The step waited for the copy.
            assert reply["order"][:2] == (False, True)
            assert reply["blocked"] > 0
        else:
            # It did not wait for the write.
            assert reply["order"][2] is False
            assert reply["blocked"] < reply["write"]


def save_in_a_row(source, root):
    """Saves and steps without a wait in between; the last state of each save."""
    run = Run(source)
    digests = []
    for _ in range(3):
        run.step()
        digests.append(collect(run.policy)[2].digest)
        last = run.save(root, background=True, keep=None)
    last.wait()
    found = []
    for version in (1, 2, 3):
        again = Run(source)
        again.resume(root, which=f"step-{version:08d}")
        found.append(collect(again.policy)[2].digest)
    return digests == found, len(run.optimizer._optimizer_step_pre_hooks)


def test_saves_in_a_row_wait_for_each_other(sources, tmp_path):
    assert run_ranks(2, save_in_a_row, sources["dense"][0], tmp_path) == [(True, 0), (True, 0)]


def resume_during_a_save(source, root):
    """Going back to the first checkpoint while the second is still being copied."""
    run = Run(source)
    run.step()
    run.save(root)
    run.step()
    second = collect(run.policy)[2].digest
    real = checkpoint_save.copy_to_host

    def staged(*args):
        time.sleep(0.5)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_save, "copy_to_host", staged)
        pending = run.save(root, background=True)
        run.resume(root, which="step-00000001")
        pending.wait()
    again = Run(source)
    again.resume(root, which="step-00000002")
    return collect(again.policy)[2].digest == second


def test_going_back_during_a_save_does_not_change_what_is_saved(sources, tmp_path):
    assert run_ranks(2, resume_during_a_save, sources["dense"][0], tmp_path) == [True, True]


# Other optimizers.


def resume_other(source, root, kind):
    """Losses of two steps after a resume and of the run that went on."""
    makers = {
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
        "adamw, for each": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False, fused=False),
        "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
        "fresh": lambda params: torch.optim.AdamW(params, lr=1e-2),
    }
    runs = []
    for is_resumed in (False, True):
        policy = load(source)
        optimizer = makers[kind](policy.trainable_parameters())
        batch = sp.Batch(SEQUENCES[dist.get_rank() :: dist.get_world_size()])
        if is_resumed:
            sp.resume(root, policy, optimizer)
        else:
            for _ in range(0 if kind == "fresh" else 2):
                sp.train_step(policy, batch, optimizer)
            sp.save_checkpoint(root, policy, optimizer)
        runs.append([sp.train_step(policy, batch, optimizer).loss for _ in range(2)])
    return runs[0] == runs[1]


@pytest.mark.parametrize("kind", ["sgd", "adamw, for each", "amsgrad", "fresh"])
def test_other_optimizers_resume(sources, tmp_path, kind):
    assert run_ranks(2, resume_other, sources["dense"][0], tmp_path, kind) == [True, True]


def resume_after_export(source, root):
    """Whether an export after going back is mistaken for one that should have changed."""
    run = Run(source)
    run.step()
    run.save(root)
    run.step()
    collect(run.policy)
    run.resume(root)
    back = collect(run.policy)[2].findings
    run.step()
    return back, collect(run.policy)[2].findings


def test_an_export_after_a_resume_is_no_finding(sources, tmp_path):
    assert run_ranks(2, resume_after_export, sources["dense"][0], tmp_path) == [([], [])] * 2


def test_lora_configs_travel_to_ranks():
    """The kinds above carry them through pickle."""
    assert isinstance(KINDS["adapters"][1]["lora"], peft.LoraConfig)
