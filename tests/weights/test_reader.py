"""Safetensors headers and views, against the safetensors package and against damaged files."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardproof.errors import LoadFault
from shardproof.weights.reader import DTYPES, INDEX_NAME, open_checkpoint, read_header


def raw_bytes(tensor):
    return (
        tensor.contiguous().view(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8)
    )


def random_tensor(dtype, shape, seed=0):
    """Bytes that are valid in every dtype: small integers, converted."""
    values = torch.randint(
        0, 2 if dtype == torch.bool else 50, shape, generator=torch.Generator().manual_seed(seed)
    )
    return values.to(dtype)


def write_file(path, described, payload, *, header_size=None, metadata=None):
    """A safetensors file written by hand, without the padding that today's writers put after the header."""
    header = json.dumps({**({"__metadata__": metadata} if metadata else {}), **described}).encode()
    length = len(header) if header_size is None else header_size
    path.write_bytes(struct.pack("<Q", length) + header + payload)
    return path


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_the_header_lists_what_was_written(tmp_path):
    tensors = {
        "a": random_tensor(torch.float32, (3, 5)),
        "b": random_tensor(torch.bfloat16, (7,)),
        "c": random_tensor(torch.int64, (2, 1, 2)),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        described = checkpoint.tensors[name]
        assert (described.file, described.dtype, described.shape) == (
            "model.safetensors",
            tensor.dtype,
            tuple(tensor.shape),
        )
        assert described.stop - described.start == tensor.numel() * tensor.element_size()
        assert torch.equal(checkpoint.whole(name), tensor)


def test_files_of_an_index_are_read_together(tmp_path):
    first, second = {"a": torch.randn(2, 3)}, {"b": torch.randn(4)}
    save_file(first, tmp_path / "one.safetensors")
    save_file(second, tmp_path / "two.safetensors")
    save_file({"c": torch.randn(1)}, tmp_path / "not_in_the_index.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    checkpoint = open_checkpoint(tmp_path)
    assert {name: described.file for name, described in checkpoint.tensors.items()} == weight_map
    assert torch.equal(checkpoint.whole("b"), second["b"])


def test_without_an_index_every_safetensors_file_counts(tmp_path):
    save_file({"a": torch.randn(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.randn(2)}, tmp_path / "y.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}


def folder_with(root, name, tensors, file="model.safetensors"):
    folder = root / name
    folder.mkdir()
    save_file(tensors, folder / file)
    return folder


def test_the_digest_of_headers_tells_checkpoints_apart(tmp_path):
    tensors = {"a": torch.randn(4), "b": torch.randn(2, 2)}
    digest = open_checkpoint(folder_with(tmp_path, "one", tensors)).header_digest
    assert open_checkpoint(folder_with(tmp_path, "copy", tensors)).header_digest == digest
    others = {
        "another shape": folder_with(tmp_path, "shape", {**tensors, "b": torch.randn(4)}),
        "another dtype": folder_with(tmp_path, "dtype", {**tensors, "a": torch.zeros(4, dtype=torch.int32)}),
        "another name": folder_with(tmp_path, "name", {"a": tensors["a"], "c": tensors["b"]}),
        "another file": folder_with(tmp_path, "file", tensors, file="other.safetensors"),
    }
    digests = {why: open_checkpoint(folder).header_digest for why, folder in others.items()}
    assert digest not in digests.values()
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_views_of_boxes(tmp_path, dtype):
    tensor = random_tensor(dtype, (5, 4, 3))
    save_file({"pad": torch.zeros(3, dtype=torch.uint8), "t": tensor}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["t"]
    for box in [
        ((0, 5), (0, 4), (0, 3)),
        ((1, 3), (0, 4), (0, 3)),
        ((4, 5), (1, 3), (2, 3)),
        ((0, 5), (3, 4), (0, 1)),
    ]:
        view = checkpoint.view("t", box)
        assert view.dtype == dtype
        assert torch.equal(raw_bytes(view), raw_bytes(stored[tuple(slice(a, b) for a, b in box)]))


def test_views_share_the_file_s_pages(tmp_path):
    save_file({"t": torch.randn(64, 64)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    whole, part = checkpoint.whole("t"), checkpoint.view("t", ((8, 16), (0, 64)))
    assert part.data_ptr() == whole.data_ptr() + 8 * 64 * 4
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("shift", range(8))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_misaligned_header_of_an_old_writer(tmp_path, dtype, shift):
    tensor = random_tensor(dtype, (3, 5)) / 7
    code = next(code for code, known in DTYPES.items() if known == dtype)
    payload = bytes(raw_bytes(tensor).numpy())
    write_file(
        tmp_path / "model.safetensors",
        {"t": entry(code, [3, 5], 0, len(payload))},
        payload,
        metadata={"pad": "x" * shift},
    )
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.whole("t"), tensor)
    assert torch.equal(checkpoint.view("t", ((1, 3), (2, 4))), tensor[1:3, 2:4])


def test_tensors_without_dims_and_without_elements(tmp_path):
    tensors = {
        "scalar": torch.tensor(3.5),
        "no_rows": torch.empty(0, 4),
        "no_columns": torch.empty(3, 0, dtype=torch.bfloat16),
        "last": torch.randn(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        whole = checkpoint.whole(name)
        assert whole.shape == tensor.shape
        assert whole.dtype == tensor.dtype
        assert torch.equal(whole, tensor)
    assert checkpoint.view("scalar", ()).item() == 3.5


def test_a_file_with_an_empty_header_is_an_empty_checkpoint(tmp_path):
    write_file(tmp_path / "model.safetensors", {}, b"")
    assert open_checkpoint(tmp_path).tensors == {}


FLOATS = b"\0" * 16
DAMAGED = {
    "truncated": ({"t": entry("F32", [4], 0, 16)}, FLOATS[:-1], {}),
    "bytes at the end": ({"t": entry("F32", [4], 0, 16)}, FLOATS + b"\0", {}),
    "a gap": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [2], 8, 16)}, FLOATS, {}),
    "an overlap": ({"a": entry("F32", [3], 0, 12), "b": entry("F32", [2], 8, 16)}, FLOATS, {}),
    "a negative offset": ({"t": entry("F32", [4], -8, 8)}, FLOATS, {}),
    "too few bytes for the shape": ({"t": entry("F32", [5], 0, 16)}, FLOATS, {}),
    "a negative shape": ({"t": entry("F32", [-2, -2], 0, 16)}, FLOATS, {}),
    "a shape that is not of integers": ({"t": entry("F32", [2.0, 2.0], 0, 16)}, FLOATS, {}),
    "offsets that are text": ({"t": entry("F32", [4], "0", "16")}, FLOATS, {}),
    "an unknown dtype": ({"t": entry("F31", [4], 0, 16)}, FLOATS, {}),
    "no dtype": ({"t": {"shape": [4], "data_offsets": [0, 16]}}, FLOATS, {}),
    "three offsets": ({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}}, FLOATS, {}),
    "a header that is cut": ({"t": entry("F32", [4], 0, 16)}, FLOATS, {"header_size": 20}),
    "a header longer than the file": ({"t": entry("F32", [4], 0, 16)}, FLOATS, {"header_size": 10_000}),
    "a header longer than any": ({"t": entry("F32", [4], 0, 16)}, FLOATS, {"header_size": 2**63}),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, damage):
    described, payload, options = DAMAGED[damage]
    write_file(tmp_path / "model.safetensors", described, payload, **options)
    with pytest.raises(LoadFault) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "L103"
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\x05", b"version https://git-lfs.github.com/spec/v1\n", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadFault) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "L103"


def test_one_tensor_in_two_files_is_refused(tmp_path):
    for file in ("one.safetensors", "two.safetensors"):
        save_file({"t": torch.zeros(2)}, tmp_path / file)
    with pytest.raises(LoadFault, match=r"two files, one\.safetensors and two\.safetensors") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "L103"


INDEXES = {
    "not JSON": ("{", "L103"),
    "no weight map": ("{}", "L103"),
    "a list": ("[]", "L103"),
    "a weight map that is a list": ('{"weight_map": ["t"]}', "L103"),
    "a file name that is a number": ('{"weight_map": {"t": 5}}', "L103"),
    "a missing file": ('{"weight_map": {"t": "gone.safetensors"}}', "L102"),
    "a file above the folder": ('{"weight_map": {"t": "../model.safetensors"}}', "L110"),
    "an absolute path": ('{"weight_map": {"t": "/etc/passwd"}}', "L110"),
    "the folder above": ('{"weight_map": {"t": ".."}}', "L110"),
    "the folder itself": ('{"weight_map": {"t": "."}}', "L110"),
    "no name": ('{"weight_map": {"t": ""}}', "L110"),
}  # fmt: skip


@pytest.mark.parametrize("index", INDEXES)
def test_a_bad_index_is_refused(tmp_path, index):
    content, code = INDEXES[index]
    folder = folder_with(tmp_path, "inner", {"t": torch.zeros(2)})
    save_file({"t": torch.zeros(2)}, tmp_path / "model.safetensors")
    (folder / INDEX_NAME).write_text(content)
    with pytest.raises(LoadFault) as caught:
        open_checkpoint(folder)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("file", "code"), [("pytorch_model.bin", "L107"), ("weights.pth", "L107"), ("notes.txt", "L101")]
)
def test_a_folder_without_safetensors_is_refused(tmp_path, file, code):
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(LoadFault) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == code


def test_a_header_is_read_as_bytes(tmp_path):
    path = write_file(tmp_path / "model.safetensors", {"t": entry("U8", [2], 0, 2)}, b"ab")
    with path.open("rb") as file:
        assert json.loads(read_header(file, path.name)) == {"t": entry("U8", [2], 0, 2)}
