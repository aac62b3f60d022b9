"""`save_pretrained`: folders that plain transformers and peft load, and that compute what the policy computes."""

import errno
import json
import os
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

import shardproof as sp
from shardproof.folder_lock import FolderLock
from shardproof.weights.writer import FileWriter
from tests.export.test_stream import collect, differences, load, lora_config, read_folder, train
from tests.models import make_checkpoint, tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise
from tests.shard.test_families import ALL_FAMILIES, TOKENS
from tests.shard.test_load import full_state

pytestmark = pytest.mark.distributed

INDEX = "model.safetensors.index.json"
COMPANIONS = {
    "tokenizer.json": b'{"version": "1.0",  "truncation": null}\n',
    "tokenizer_config.json": b'{ "model_max_length": 128 }',
    "special_tokens_map.json": b"{}",
    "tokenizer.model": bytes(range(256)),
    "chat_template.jinja": "{{ messages }} é\r\n".encode(),
    "generation_config.json": b'{"max_length":   77, "temperature": 0.5, "do_sample": true}',
    "merges.txt": b"a b\r\n",
}


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def plain(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


# Families.


def save_families(folders, target, options, how):
    receipts = {}
    for family, folder in folders.items():
        receipts[family] = sp.save_pretrained(load(folder, **options), target / family, **how)
    return receipts


@pytest.mark.parametrize(
    ("num_ranks", "options", "how"),
    [
        (2, {"strategy": "fsdp1"}, {"max_file_bytes": 40_000}),
        (1, {"strategy": "fsdp2", "cpu_offload": True}, {"dtype": torch.bfloat16}),
    ],
    ids=["fsdp1 on 2, many files", "offloaded on 1, bfloat16"],
)
def test_every_family_loads_in_transformers(checkpoint, tmp_path, num_ranks, options, how):
    folders = {family: checkpoint(family) for family in ALL_FAMILIES}
    dtype = how.get("dtype", torch.float32)
    replies = run_ranks(num_ranks, save_families, folders, tmp_path, options, how)
    for family, folder in folders.items():
        saved, stored = tmp_path / family, read_folder(folder)
        written = read_folder(saved)
        assert written.keys() == stored.keys(), family
        assert not [name for name in files_of(saved) if name.startswith(".")], family
        expected, found = plain(folder, dtype=dtype), plain(saved, dtype=dtype)
        assert torch.equal(logits_of(found), logits_of(expected)), family
        config = AutoConfig.from_pretrained(saved)
        assert (config.model_type, config.architectures) == (
            expected.config.model_type,
            [type(expected).__name__],
        )
        for reply in replies:
            assert reply[family].manifest.compare(written.items()) == [], family


# Files.


def save_with(source, target, options, how):
    return sp.save_pretrained(load(source, **options), target, **how)


def note_writers(source, target, limit):
    """The files that this rank opened."""
    opened = []
    real = FileWriter.write

    def write(self, name, tensor):
        before = set(self._open)
        real(self, name, tensor)
        opened.extend(set(self._open) - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileWriter, "write", write)
        sp.save_pretrained(load(source), target, max_file_bytes=limit)
    return opened


def test_several_files_by_several_ranks_with_an_index(checkpoint, tmp_path):
    source = checkpoint("qwen3_moe")
    stored = read_folder(source)
    opened = run_ranks(3, note_writers, source, tmp_path, 50_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) >= 5
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert sorted(file for mine in opened for file in mine) == files
    assert all(len(mine) in (len(files) // 3, len(files) // 3 + 1) for mine in opened)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    assert index["weight_map"].keys() == stored.keys()
    for file in files:
        with safe_open(tmp_path / file, "pt") as opened_file:
            assert opened_file.metadata() == {"format": "pt", "writer": "shardproof"}
            names = set(opened_file.keys())
        assert names == {name for name, where in index["weight_map"].items() if where == file}
        size = sum(stored[name].nbytes for name in names)
        assert size <= 50_000 or len(names) == 1
    assert differences(read_folder(tmp_path), stored) == []


def test_one_file_has_no_index(checkpoint, tmp_path):
    run_ranks(2, save_with, checkpoint("llama"), tmp_path, {}, {})
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def save_twice(source, target, limits):
    policy = load(source)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    for limit in limits:
        train(policy, optimizer)
        sp.save_pretrained(policy, target, max_file_bytes=limit)
    return dict(collect(policy)[1])


@pytest.mark.parametrize("limits", [(40_000, 10**9), (10**9, 40_000), (20_000, 90_000)], ids=str)
def test_a_folder_that_is_written_again_holds_the_new_weights_alone(checkpoint, tmp_path, limits):
    """Files and an index of the first save that stayed would be loaded with those of the second, or before them."""
    source = checkpoint("llama")
    expected = run_ranks(2, save_twice, source, tmp_path, limits)[0]
    assert differences(read_folder(tmp_path), expected) == []
    assert differences(dict(plain(tmp_path).state_dict()), expected) == []
    (again,) = run_ranks(1, export_again, tmp_path)
    assert differences(again, expected) == []


def export_again(folder):
    return dict(collect(load(folder))[1])


# What travels along.


def test_companions_are_copied_byte_for_byte(tmp_path):
    source = make_checkpoint(tmp_path / "source", "llama")
    for name, content in COMPANIONS.items():
        (source / name).write_bytes(content)
    (source / "pytorch_model.bin").write_bytes(b"not this")
    (source / "optimizer.pt").write_bytes(b"nor this")
    (source / "checkpoint-5").mkdir()
    run_ranks(2, save_with, source, tmp_path / "saved", {}, {})
    assert files_of(tmp_path / "saved") == sorted([*COMPANIONS, "config.json", "model.safetensors"])
    for name, content in COMPANIONS.items():
        assert (tmp_path / "saved" / name).read_bytes() == content
    assert GenerationConfig.from_pretrained(tmp_path / "saved").max_length == 77


def snapshot(folder):
    """{file: bytes} of everything below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", ["itself", "a link to it"])
def test_the_source_is_not_saved_over(tmp_path, how):
    """Its files are mapped into the memory of the process that saves."""
    source = make_checkpoint(tmp_path / "source", "llama")
    target = source
    if how != "itself":
        target = tmp_path / "link"
        target.symlink_to(source)
    before = snapshot(source)
    outcomes = run_ranks_outcomes(2, save_with, source, target, {}, {})
    assert_all_raise(outcomes, "E408", str(source), "was loaded from", kind="ExportFault")
    assert snapshot(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"source", target.name})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "holds model.safetensors, which shardproof did not write"),
        ("model-00001-of-00002.safetensors", "which shardproof did not write"),
        ("pytorch_model.bin", "holds pytorch_model.bin, which shardproof did not write"),
        ("adapter_model.safetensors", "which shardproof did not write"),
        ("config.json", "holds config.json, which shardproof did not write"),
        ("original/params.json", "holds the folder original"),
    ],
)
def test_what_no_save_wrote_is_not_replaced(checkpoint, tmp_path, name, words):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"something")
    outcomes = run_ranks_outcomes(2, save_with, checkpoint("llama"), tmp_path, {}, {})
    assert_all_raise(outcomes, "E408", str(tmp_path), words, kind="ExportFault")
    assert snapshot(tmp_path) == {name: b"something"}


def test_other_files_beside_a_model_stay(checkpoint, tmp_path):
    (tmp_path / "README.md").write_bytes(b"notes")
    (tmp_path / "latest").symlink_to("README.md")
    for limit in (40_000, 10**9):
        run_ranks(2, save_with, checkpoint("llama"), tmp_path, {}, {"max_file_bytes": limit})
    assert files_of(tmp_path) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "latest",
        "model.safetensors",
    ]
    assert (tmp_path / "latest").is_symlink() and (tmp_path / "latest").read_bytes() == b"notes"


def save_from_within(source, target, limits):
    os.chdir(target)
    for limit in limits:
        sp.save_pretrained(load(source), ".", max_file_bytes=limit)
    return sorted(os.listdir(".")), os.getcwd()


def test_saving_into_the_working_directory(checkpoint, tmp_path):
    """The folder is not exchanged under the process's feet."""
    tmp_path = tmp_path.resolve()
    expected = ["config.json", "generation_config.json", "model.safetensors"]
    assert run_ranks(1, save_from_within, checkpoint("llama"), tmp_path, (40_000, 10**9)) == [
        (expected, str(tmp_path))
    ]
    assert differences(read_folder(tmp_path), read_folder(checkpoint("llama"))) == []


def test_a_companion_that_leads_out_of_the_source(tmp_path):
    source = make_checkpoint(tmp_path / "source", "llama")
    (tmp_path / "secret").write_text("{}")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    outcomes = run_ranks_outcomes(2, save_with, source, tmp_path / "saved", {}, {})
    assert_all_raise(outcomes, "L110", "tokenizer.json links to a place outside", kind="LoadFault")
    assert not (tmp_path / "saved").exists()


def save_adapter_into(source, target, times):
    policy = load(source, lora=lora_config())
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    for _ in range(times):
        assert train(policy, optimizer).stepped
        sp.save_pretrained(policy, target, merge_lora=False)
    with torch.no_grad():
        return policy.module(input_ids=TOKENS).logits


@pytest.mark.parametrize("times", [1, 2])
def test_an_adapter_beside_its_base_leaves_the_base(tmp_path, times):
    """It used to delete the base's weights, as files that it had not written."""
    source = make_checkpoint(tmp_path / "base", "llama")
    (source / "original").mkdir()
    (source / "original" / "weights.pth").write_bytes(b"x")
    before = snapshot(source)
    replies = run_ranks(2, save_adapter_into, source, source, times)
    after = snapshot(source)
    assert set(after) - set(before) == {"adapter_config.json", "adapter_model.safetensors"}
    assert {name: after[name] for name in before} == before
    (source / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    base = plain(source)
    (tmp_path / "adapter_config.json").rename(source / "adapter_config.json")
    adapted = logits_of(peft.PeftModel.from_pretrained(base, source))
    for logits in replies:
        torch.testing.assert_close(logits, adapted, rtol=0, atol=1e-5)


def test_an_adapter_that_another_wrote_is_not_replaced(checkpoint, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    outcomes = run_ranks_outcomes(2, save_adapter_into, checkpoint("llama"), tmp_path, 1)
    assert_all_raise(
        outcomes,
        "E408",
        "holds adapter_model.safetensors, which shardproof did not write",
        kind="ExportFault",
    )


def test_what_dead_saves_left_is_removed(checkpoint, tmp_path):
    target = tmp_path / "model"
    dead, alive = tmp_path / ".partial-model-0000dead", tmp_path / ".partial-model-0000a11e"
    for folder in (dead, alive, tmp_path / ".partial-other-0000dead"):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x")
    lock = FolderLock(alive)
    lock.acquire("test")
    run_ranks(2, save_with, checkpoint("llama"), target, {}, {})
    lock.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".partial-model-0000a11e",
        ".partial-other-0000dead",
        "model",
    ]


@pytest.mark.parametrize("how", [{}, {"dtype": torch.float32}], ids=["checkpoint", "float32"])
def test_the_config_has_the_dtype_of_the_files(checkpoint, tmp_path, how):
    """transformers loads in the config's dtype, so a float32 there doubles what a bfloat16 folder needs."""
    source = checkpoint("llama", dtype=torch.bfloat16)
    run_ranks(2, save_with, source, tmp_path, {}, how)
    dtype = how.get("dtype", torch.bfloat16)
    assert {tensor.dtype for tensor in read_folder(tmp_path).values()} == {dtype}
    assert AutoConfig.from_pretrained(tmp_path).dtype == dtype
    assert plain(tmp_path).dtype == dtype


def save_random(target, family):
    policy = load(sp.RandomInit(tiny_config(family), seed=5))
    with torch.no_grad():
        logits = policy.module(input_ids=TOKENS).logits
    sp.save_pretrained(policy, target)
    return logits


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_a_policy_without_a_source(tmp_path, family):
    for logits in run_ranks(2, save_random, tmp_path, family):
        torch.testing.assert_close(logits_of(plain(tmp_path)), logits, rtol=0, atol=1e-5)


def settings_after_saving(source, target):
    policy = load(source)
    before = policy.model.config.to_dict()
    sp.save_pretrained(policy, target)
    return before == policy.model.config.to_dict()


def test_saving_leaves_the_policys_config(checkpoint, tmp_path):
    assert run_ranks(2, settings_after_saving, checkpoint("llama"), tmp_path) == [True, True]


# Adapters.


def save_adapted(source, target, strategy, fields):
    """Logits of a trained policy with adapters; saved merged and as an adapter."""
    policy = load(source, strategy=strategy, lora=lora_config(**fields))
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    assert train(policy, optimizer).stepped
    sp.save_pretrained(policy, target / "merged")
    sp.save_pretrained(policy, target / "adapter", merge_lora=False)
    with torch.no_grad():
        return policy.module(input_ids=TOKENS).logits


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("qwen3_moe", {"use_rslora": True}),
        ("qwen3_tied", {}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_merged_and_adapter_folders(checkpoint, tmp_path, strategy, family, fields):
    source = checkpoint(family)
    replies = run_ranks(2, save_adapted, source, tmp_path, strategy, fields)
    assert files_of(tmp_path / "adapter") == ["adapter_config.json", "adapter_model.safetensors"]
    adapted = logits_of(peft.PeftModel.from_pretrained(plain(source), tmp_path / "adapter"))
    merged = logits_of(plain(tmp_path / "merged"))
    base = logits_of(plain(source))
    for logits in replies:
        torch.testing.assert_close(logits, adapted, rtol=0, atol=1e-5)
        torch.testing.assert_close(logits, merged, rtol=0, atol=2e-5)
        assert (logits - base).abs().max() > 1e-2


def test_an_adapter_folder_names_its_base(checkpoint, tmp_path):
    source = checkpoint("llama")
    run_ranks(2, save_adapted, source, tmp_path, "fsdp2", {})
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(source)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    expected = peft.PeftModel.from_pretrained(plain(source), tmp_path / "adapter")
    assert torch.equal(logits_of(model), logits_of(expected))


# Critics, and the way back.


def save_critic(source, target):
    critic = load(source, role="critic")
    train_critic(critic)
    sp.save_pretrained(critic, target)
    again = load(target, role="critic")
    same = differences(full_state(again), full_state(critic))
    with torch.no_grad():
        return same, critic.module(input_ids=TOKENS), again.module(input_ids=TOKENS)


def train_critic(critic):
    sequences = [row.tolist() for row in TOKENS]
    optimizer = sp.make_optimizer(critic, lr=1e-2)
    returns = [[1.0] * (len(row) - 1) for row in sequences]
    assert sp.train_step(critic, sp.Batch(sequences, returns=returns), optimizer, loss="value").stepped


@pytest.mark.parametrize("family", ["llama", "qwen3_tied"])
def test_a_critics_folder_is_a_classifier_of_one_label(checkpoint, tmp_path, family):
    replies = run_ranks(2, save_critic, checkpoint(family), tmp_path)
    stored = read_folder(tmp_path)
    assert stored["score.weight"].shape == (1, 32)
    assert "lm_head.weight" not in stored
    model, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=1, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    last = logits_of(model).squeeze(-1)
    for same, values, again in replies:
        assert same == []
        torch.testing.assert_close(values[:, -1], last, rtol=0, atol=1e-5)
        assert torch.equal(values, again)


def round_trip(source, target, options, again):
    policy = load(source, **options)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    train(policy, optimizer)
    sp.save_pretrained(policy, target, max_file_bytes=30_000)
    copy = load(target, **again)
    return differences(full_state(copy), full_state(policy)), sp.attest(copy)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_tied", "gpt_oss"])
@pytest.mark.parametrize(("first", "second"), [("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")])
def test_what_is_saved_loads_again(checkpoint, tmp_path, family, first, second):
    options = {"strategy": first}, {"strategy": second}
    for odd, findings in run_ranks(2, round_trip, checkpoint(family), tmp_path, *options):
        assert odd == []
        assert findings == []


# A disk that is full.


def save_on_a_full_disk(source, target, where):
    """Rank 1 cannot write: its third tensor, or the end of its file."""
    policy = load(source)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if dist.get_rank() == 1:
        real_open = Path.open

        def open_full(self, *args, **kwargs):
            return FullFile(real_open(self, *args, **kwargs), full, where)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "open", open_full)
            sp.save_pretrained(policy, target, max_file_bytes=60_000)
    else:
        sp.save_pretrained(policy, target, max_file_bytes=60_000)


class FullFile:
    """A file that takes some writes and then says that the disk is full, there or when it is closed."""

    def __init__(self, file, error, where):
        self.file, self.error, self.where, self.count = file, error, where, 0

    def write(self, data):
        self.count += 1
        if self.where == "write" and self.count > 2:
            raise self.error
        return self.file.write(data)

    def seek(self, position):
        return self.file.seek(position)

    def flush(self):
        self.file.flush()

    def fileno(self):
        return self.file.fileno()

    def close(self):
        self.file.close()
        if self.where == "close":
            raise self.error


@pytest.mark.parametrize("where", ["write", "close"])
def test_a_full_disk_is_every_ranks_error_and_leaves_no_file_half_written(checkpoint, tmp_path, where):
    outcomes = run_ranks_outcomes(2, save_on_a_full_disk, checkpoint("llama"), tmp_path, where, timeout=30)
    assert_all_raise(outcomes, "E408", "rank 1", "No space left", kind="ExportFault")
    assert files_of(tmp_path) == []
    assert not list(tmp_path.parent.glob(f".*{tmp_path.name}*"))


def save_into(source, target):
    sp.save_pretrained(load(source), target)


def test_a_folder_that_is_a_file(checkpoint, tmp_path):
    (tmp_path / "taken").write_text("x")
    outcomes = run_ranks_outcomes(2, save_into, checkpoint("llama"), tmp_path / "taken")
    assert {outcome[0] for outcome in outcomes} == {"error"}
    assert len(set(outcomes)) == 1
    assert outcomes[0][1].endswith(("Fault", "ConfigError"))
    assert str(tmp_path / "taken") in outcomes[0][2]
