"""A checkpoint that cannot be loaded: every rank raises one error, which names the culprit and the fix."""

import json
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import shardproof as sp
from shardproof.model.buffers import compute_buffers
from shardproof.model.inventory import take_inventory
from shardproof.model.skeleton import build_skeleton
from shardproof.shard import copies
from shardproof.shard.plan import plan_shards
from shardproof.weights.reader import open_checkpoint
from shardproof.weights.source import find_folder, read_config, resolve_folder
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.several_hosts import pretend_hosts

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

INDEX = "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj.weight"
EXPERT_UP = "model.layers.1.mlp.experts.3.up_proj.weight"


def load_from(*folders):
    """Load the folder of this rank; with one folder, all ranks load that."""
    sp.load(folders[dist.get_rank() % len(folders)], compute_dtype=torch.float32)


def assert_all_raise(outcomes, code, *words, kind="LoadFault"):
    """Every rank raised the same error of this code and kind; its message has all the words. Returns the message."""
    assert [outcome[0] for outcome in outcomes] == ["error"] * len(outcomes), outcomes
    assert len(set(outcomes)) == 1, "\n".join(map(str, outcomes))
    _, raised, message = outcomes[0]
    assert raised == kind, message
    assert message.startswith(f"{code} "), message
    assert "Fix: " in message
    assert f"docs/faults.md#{code.lower()}" in message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    return message


def files_of(folder):
    return sorted(folder.glob("*.safetensors"))


def edit_json(path, edit):
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def edit_config(folder, **fields):
    edit_json(folder / "config.json", lambda config: config.update(fields))


def edit_header(path, edit):
    """Change the header of a safetensors file and nothing else in it."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + raw[8 + length :])


def edit_tensors(folder, name, edit):
    """Change the tensors of the file that holds `name`, leaving a valid file."""
    (path,) = [path for path in files_of(folder) if name in load_file(path)]
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def edit_first_entry(folder, **fields):
    def edit(header):
        first = next(name for name in header if name != "__metadata__")
        header[first].update(fields)

    edit_header(files_of(folder)[0], edit)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.fixture
def copy(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture
def moe_copy(moe_checkpoint, tmp_path):
    return Path(shutil.copytree(moe_checkpoint, tmp_path / "copy"))


def test_the_checkpoint_that_these_tests_break_is_good(checkpoint, moe_checkpoint):
    run_ranks(2, load_from, checkpoint)
    run_ranks(2, load_from, moe_checkpoint)


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "./no-such-folder", "nobody/no-such-model", "no-such-model", "a/b/c"]
)
def test_source_that_no_rank_finds(source):
    assert_all_raise(run_ranks_outcomes(2, load_from, source), "L101", source)


def test_sources_that_differ_and_that_no_rank_finds():
    outcomes = run_ranks_outcomes(2, load_from, "/no/such/folder", "/nor/this/one")
    assert_all_raise(outcomes, "L101", "/no/such/folder")


def test_source_that_is_a_file(checkpoint):
    path = files_of(checkpoint)[0]
    assert_all_raise(run_ranks_outcomes(2, load_from, path), "L101", str(path))


@pytest.mark.parametrize("kept", ["weights", "config"])
def test_folder_with_one_half_of_a_checkpoint(copy, kept):
    for path in [copy / "config.json"] if kept == "weights" else [copy / INDEX, *files_of(copy)]:
        path.unlink()
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L101", str(copy))


def test_missing_shard_file(copy):
    missing = files_of(copy)[1]
    missing.unlink()
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L102", missing.name)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def truncate_inside_header(path):
    path.write_bytes(path.read_bytes()[:40])


def empty(path):
    path.write_bytes(b"")


def append_bytes(path):
    path.write_bytes(path.read_bytes() + b"more")


def garble_header(path):
    raw = bytearray(path.read_bytes())
    raw[8:24] = b"\xff" * 16
    path.write_bytes(raw)


def claim_absurd_header_length(path):
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def replace_header_with_list(path):
    path.write_bytes(struct.pack("<Q", 2) + b"[]")


def replace_with_error_page(path):
    path.write_bytes(b"<!DOCTYPE html><html>404: not found</html>" * 10)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        truncate_inside_header,
        empty,
        append_bytes,
        garble_header,
        claim_absurd_header_length,
        replace_header_with_list,
        replace_with_error_page,
    ],
)
def test_damaged_file(copy, damage):
    path = files_of(copy)[1]
    damage(path)
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L103", path.name)


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [7]},
        {"shape": [-1, 32]},
        {"dtype": "F4"},
        {"data_offsets": [8, 12936]},
        {"data_offsets": [-8, 12920]},
        {"data_offsets": [0, 12928, 12928]},
        {"data_offsets": ["0", "12928"]},
        {"data_offsets": [0.0, 12928.0]},
        {"shape": "32"},
        {"shape": None},
        {"dtype": ["F32"]},
    ],
    ids=str,
)
def test_header_that_contradicts_itself(copy, fields):
    edit_first_entry(copy, **fields)
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L103", files_of(copy)[0].name)


def test_tensors_that_share_bytes(copy):
    def overlap(header):
        one, other = [name for name in header if name.endswith("layernorm.weight")][:2]
        header[one]["data_offsets"] = header[other]["data_offsets"]

    path = files_of(copy)[1]
    edit_header(path, overlap)
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L103", path.name)


def test_tensor_in_two_files(copy):
    first, second = files_of(copy)[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file({**load_file(second), name: tensors[name]}, second, {"format": "pt"})
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L103", name, first.name, second.name)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(copy, text):
    (copy / INDEX).write_text(text)
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L103", INDEX)


@pytest.mark.parametrize("text", ["", "{", "[]", '"llama"'])
def test_damaged_config(copy, text):
    (copy / "config.json").write_text(text)
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L103", "config.json")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..", ".", ""]
)
def test_index_that_leaves_its_folder(copy, name):
    edit_json(copy / INDEX, lambda index: index["weight_map"].update({UP: name}))
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L110", INDEX, repr(name))


def test_missing_tensor(copy):
    edit_tensors(copy, UP, lambda tensors: tensors.pop(UP))
    message = assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L104", "1 missing", UP)
    assert "L105" not in message


def test_unexpected_tensor(copy):
    extra = "model.layers.0.mlp.side_proj.weight"
    edit_tensors(copy, UP, lambda tensors: tensors.update({extra: torch.ones(2)}))
    message = assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L105", "1 unexpected", extra)
    assert "L104" not in message


def test_renamed_tensor_is_listed_with_the_nearest_name(copy):
    renamed = UP.replace("up_proj", "upp_proj")
    edit_tensors(copy, UP, lambda tensors: tensors.update({renamed: tensors.pop(UP)}))
    message = assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L104")
    assert f"'{UP}' (nearest: '{renamed}')" in message
    assert f"L105 map: 1 unexpected tensor: '{renamed}' (nearest: '{UP}')" in message


def test_long_list_of_missing_tensors_is_cut(copy):
    edit_config(copy, num_hidden_layers=4)
    message = assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L104", "18 missing", "and 10 more")
    assert message.count("model.layers.") == 8


def test_tensor_of_another_shape(copy):
    edit_tensors(copy, UP, lambda tensors: tensors.update({UP: tensors[UP][:-1].clone()}))
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L106", UP, "(47, 32)", "(48, 32)")


def test_expert_of_another_shape(moe_copy):
    edit_tensors(moe_copy, EXPERT_UP, lambda tensors: tensors.update({EXPERT_UP: torch.ones(23, 32)}))
    assert_all_raise(run_ranks_outcomes(2, load_from, moe_copy), "L106", "layers.1.mlp.experts")


def test_missing_part_of_an_expert(moe_copy):
    edit_tensors(moe_copy, EXPERT_UP, lambda tensors: tensors.pop(EXPERT_UP))
    assert_all_raise(run_ranks_outcomes(2, load_from, moe_copy), "L106", "layers.1.mlp.experts")


def test_config_with_more_experts_than_the_checkpoint(moe_copy):
    edit_config(moe_copy, num_local_experts=9)
    assert_all_raise(
        run_ranks_outcomes(2, load_from, moe_copy), "L106", "layers.0.mlp.experts", "(8, ", "(9, "
    )


def test_pickled_checkpoint(copy):
    tensors = {name: tensor for path in files_of(copy) for name, tensor in load_file(path).items()}
    for path in [copy / INDEX, *files_of(copy)]:
        path.unlink()
    torch.save(tensors, copy / "pytorch_model.bin")
    message = assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L107", "pytorch_model.bin")
    assert "from_pretrained(src).save_pretrained(dst)" in message


def test_model_whose_code_is_in_its_repository(copy):
    code = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}
    edit_config(copy, model_type="mine", auto_map=code)
    (copy / "configuration_mine.py").write_text("raise SystemExit('this code must not run')")
    message = assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L108", "'mine'", "modeling_mine.Mine")
    assert "trust_remote_code=True" in message


def test_quantized_checkpoint(copy):
    edit_config(copy, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L109", "quantization_config", "fp8")


@pytest.mark.parametrize("part", [5, "fp8", ["fp8"], True], ids=str)
@pytest.mark.parametrize("key", ["quantization_config", "auto_map", "text_config", "model_type"])
def test_part_of_a_config_of_another_type(copy, key, part):
    if key == "model_type" and isinstance(part, str):
        part = {"fp8": 1}
    edit_config(copy, **{key: part})
    with pytest.raises(sp.LoadFault) as caught:
        read_config(copy, trust_remote_code=False)
    assert caught.value.code == "L103"
    assert "config.json" in str(caught.value) and key in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [{"num_hidden_layers": 10**9}, {"hidden_size": 10**12}, {"vocab_size": 10**30}, {"head_dim": -(10**18)}]
    + [{"num_attention_heads": 0}, {"num_hidden_layers": -1}, {"rope_parameters": {"rope_type": 5}}]
    + [{"pad_token_id": 10**6}, {"layer_types": [[]]}],
    ids=str,
)
def test_config_whose_numbers_no_model_has(copy, fields):
    edit_config(copy, **fields)
    with pytest.raises(sp.LoadFault) as caught:
        plan_folder(copy)
    assert caught.value.code in ("L103", "L104", "L105", "L106", "L114")


def test_buffers_that_no_machine_holds():
    module = torch.nn.Module()
    module.register_buffer("mask", torch.empty(2**20, 2**20, device="meta"), persistent=False)
    with pytest.raises(sp.LoadFault, match="4096 GiB") as caught:
        compute_buffers(module)
    assert caught.value.code == "L114"


def plan_folder(folder):
    """Everything that a load does before it allocates."""
    resolved = resolve_folder("model", folder, trust_remote_code=False)
    skeleton = build_skeleton(resolved.config, role="policy")
    return plan_shards(skeleton, take_inventory(skeleton.model), resolved.checkpoint, 0)


RELABELLED = {torch.bfloat16: ("I16", "U8"), torch.float32: ("I32",)}


@pytest.mark.parametrize("dtype", RELABELLED, ids=str)
def test_numbers_of_another_kind(tmp_path, dtype):
    folder = make_checkpoint(tmp_path, "llama", dtype=dtype)
    name = "model.norm.weight"
    (path,) = [path for path in files_of(folder) if name in load_file(path)]

    def relabel(header):
        header[name]["dtype"] = RELABELLED[dtype][0]

    edit_header(path, relabel)
    assert_all_raise(run_ranks_outcomes(2, load_from, folder), "L106", name, RELABELLED[dtype][0][1:])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64], ids=str)
def test_whole_numbers_where_the_model_has_others(moe_copy, dtype):
    edit_tensors(moe_copy, EXPERT_UP, lambda t: t.update({EXPERT_UP: torch.ones(24, 32, dtype=dtype)}))
    with pytest.raises(sp.LoadFault, match=re.escape(EXPERT_UP)) as caught:
        plan_folder(moe_copy)
    assert caught.value.code == "L106"


def expert_weights(folder):
    policy = sp.load(folder, compute_dtype=torch.float32)
    return {
        name: param.full_tensor() for name, param in policy.module.named_parameters() if "experts" in name
    }


def test_experts_of_different_precision_load_with_their_values(moe_checkpoint, moe_copy):
    half = torch.linspace(-1, 1, 24 * 32).view(24, 32).bfloat16()
    edit_tensors(moe_copy, EXPERT_UP, lambda tensors: tensors.update({EXPERT_UP: half}))
    before, after = (run_ranks(1, expert_weights, folder)[0] for folder in (moe_checkpoint, moe_copy))
    changed = {
        name: before[name] != after[name] for name in before if not torch.equal(before[name], after[name])
    }
    ((name, where),) = changed.items()
    assert where.any(dim=(1, 2)).nonzero().tolist() == [[3]]  # the other experts are what they were
    assert half.float().sort().values.equal(after[name][3].reshape(2, 24, 32)[1].sort().values)


def test_million_of_tensors_is_refused_in_words(tmp_path):
    path = tmp_path / "model.safetensors"
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(entry % index for index in range(600_000)) + b"}"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(sp.LoadFault, match="600000 tensors") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "L103"


@pytest.mark.parametrize("kind", ["pipe", "link out", "device", "folder", "link to itself"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "index", "weights"])
def test_file_that_is_no_plain_file_of_the_folder(copy, tmp_path, name, kind):
    path = {"index": copy / INDEX, "weights": files_of(copy)[0]}.get(name, copy / name)
    content = path.read_bytes() if path.exists() else b"{}"
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link out":
        (tmp_path / "outside").write_bytes(content)
        path.symlink_to(tmp_path / "outside")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    if (name, kind) == ("tokenizer_config.json", "folder"):
        return  # a folder of that name is in nobody's way
    with pytest.raises(sp.LoadFault) as caught:
        plan_folder(copy)
    assert caught.value.code in ("L101", "L102", "L103", "L110")
    assert path.name in str(caught.value)


def test_links_inside_of_a_hub_cache_are_fine(copy, tmp_path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(copy.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    plan_folder(snapshot)


def test_file_that_is_replaced_after_the_check_is_not_read(copy):
    resolved = resolve_folder("model", copy, trust_remote_code=False)
    wanted = resolved.checkpoint.whole(UP).clone()
    for path in files_of(copy):
        path.rename(path.with_suffix(".old"))
        path.write_bytes(b"\0" * path.with_suffix(".old").stat().st_size)
    assert torch.equal(resolved.checkpoint.whole(UP), wanted)
    assert resolved.checkpoint.sample_digest()


@pytest.mark.parametrize("source", ["\0", "x" * 10_000, "~nobody-here/model", "a\nb", "\ud800"], ids=ascii)
def test_source_that_can_be_no_path(source):
    assert find_folder(source, None) is None


def test_unknown_family(copy):
    edit_config(copy, model_type="lllama")
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L114", "'lllama'")


def test_family_that_is_no_language_model(copy):
    edit_config(copy, model_type="vit")
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L114", "'vit'")


def test_config_value_of_another_type(copy):
    edit_config(copy, hidden_size="thirty-two")
    assert_all_raise(run_ranks_outcomes(2, load_from, copy), "L114", "hidden_size", "thirty-two")


@pytest.mark.parametrize("row", [0, 100], ids=["on_the_first_rank", "on_the_last_rank"])
def test_tied_tensors_with_different_values(tmp_path, row):
    folder = make_checkpoint(tmp_path, "llama_tied")
    embedding = "model.embed_tokens.weight"

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors[embedding].clone()
        tensors["lm_head.weight"][row, 3] += 1

    edit_tensors(folder, embedding, add_head)
    assert_all_raise(run_ranks_outcomes(2, load_from, folder), "L112", embedding, "lm_head.weight")


def test_tied_tensors_with_equal_values_are_fine(tmp_path):
    folder = make_checkpoint(tmp_path, "llama_tied")
    embedding = "model.embed_tokens.weight"
    edit_tensors(folder, embedding, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    run_ranks(2, load_from, folder)


# One rank sees something else than the others.


def test_rank_with_other_headers(checkpoint, tmp_path):
    other = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    assert_all_raise(run_ranks_outcomes(2, load_from, checkpoint, other), "L111", "rank 1", "checkpoints")


def test_rank_with_other_content_under_the_same_headers(checkpoint, tmp_path):
    other = make_checkpoint(tmp_path, "llama", seed=1)
    assert_all_raise(run_ranks_outcomes(2, load_from, checkpoint, other), "L111", "rank 1", "checkpoints")


def load_on_hosts(*folders):
    with pretend_hosts("aab"):
        sp.load(folders[dist.get_rank()], compute_dtype=torch.float32)


def test_one_changed_byte_in_one_hosts_copy_is_found_and_named(checkpoint, tmp_path):
    other = shutil.copytree(checkpoint, tmp_path / "other")
    file = next(other.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    for at in (len(content) // 3, len(content) - 1):
        content[at] ^= 1
        file.write_bytes(content)
        content[at] ^= 1
        said = f"checkpoints differ in their bytes: {file.name} of host host-b (rank 2), compared with host host-a (ranks 0, 1)."
        assert_all_raise(run_ranks_outcomes(3, load_on_hosts, checkpoint, checkpoint, other), "L111", said)


def load_counting(*folders):
    """How many blocks this rank took the digest of."""
    counts, real = [], copies._sums

    def counted(checkpoint, blocks):
        counts.append(len(blocks))
        return real(checkpoint, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_sums", counted)
        patch.setattr(copies, "_BLOCK", 2**12)
        patch.setattr(copies, "_RANK_BYTES", 5 * 2**12)
        load_from(*folders)
    return counts


def test_copies_are_compared_by_the_ranks_that_read_them_within_a_bound(checkpoint, copy):
    assert run_ranks(3, load_counting, checkpoint, checkpoint, copy) == [[3], [2], [5]]
    # One file that several ranks read, wherever its folder seems to lie, has nothing to be compared with.
    link = copy.parent / "link"
    link.symlink_to(copy)
    assert run_ranks(2, load_counting, copy, link) == [[], []]


def load_with_version(checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(sys.modules["transformers"], "__version__", "5.0.0")
        load_from(checkpoint)


def test_another_transformers_is_not_taken_for_another_checkpoint(checkpoint):
    outcomes = run_ranks_outcomes(2, load_with_version, checkpoint)
    assert_all_raise(
        outcomes, "C003", "the same versions: transformers is 5.0.0 on rank 1, ", kind="ConfigError"
    )


def test_rank_with_another_config(checkpoint, copy):
    edit_config(copy, rope_theta=500000.0, rms_norm_eps=1e-3)
    assert_all_raise(run_ranks_outcomes(2, load_from, checkpoint, copy), "L111", "rank 1")


def test_rank_with_the_same_checkpoint_elsewhere_is_fine(checkpoint, copy):
    run_ranks(2, load_from, checkpoint, copy)


def test_rank_with_a_truncated_file(checkpoint, copy):
    path = files_of(copy)[1]
    truncate(path)
    assert_all_raise(run_ranks_outcomes(2, load_from, checkpoint, copy), "L103", path.name, "rank 1")


def test_rank_with_a_missing_file(checkpoint, copy):
    path = files_of(copy)[1]
    path.unlink()
    assert_all_raise(run_ranks_outcomes(2, load_from, checkpoint, copy), "L102", path.name, "rank 1")


def test_rank_whose_file_cannot_be_opened(checkpoint, copy):
    path = files_of(copy)[1]
    path.unlink()
    path.mkdir()
    outcomes = run_ranks_outcomes(2, load_from, checkpoint, copy)
    message = assert_all_raise(outcomes, "L103", path.name, "rank 1", "not a regular file")
    assert "rank 0" not in message


def load_from_a_file_that_shrinks(folder, name):
    """Rank 1 loses the file of one tensor after its header was read."""
    from shardproof.weights.reader import Checkpoint

    raw = Checkpoint.raw

    def fail_for_one(self, wanted):
        if wanted == self.tensors[name].file and dist.get_rank() == 1:
            raise OSError(f"cannot map {wanted}")
        return raw(self, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "raw", fail_for_one)
        sp.load(folder, compute_dtype=torch.float32)


def test_rank_whose_read_fails_late(checkpoint):
    outcomes = run_ranks_outcomes(2, load_from_a_file_that_shrinks, checkpoint, UP)
    message = assert_all_raise(outcomes, "L100", "rank 1", "OSError: cannot map model-")
    assert "rank 0" not in message
