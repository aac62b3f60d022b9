"""DCP over flat ranges: any split reads what any other wrote, and an index in JSON says where it lies."""

import json
import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from shardproof.errors import ExportFault
from shardproof.export import dcp_private
from shardproof.export.dcp_private import (
    INDEX_NAME,
    FlatLoadPlanner,
    FlatRange,
    FlatReader,
    FlatSavePlanner,
    FlatWriter,
    metadata_from,
)
from tests.ranks import run_ranks

DCP_FILE = f"torch {torch.__version__}: mend src/shardproof/export/dcp_private.py"
SIZES = {"a": 1, "b": 7, "c": 64, "d": 1000, "e": 3}
DTYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32, "d": torch.float32, "e": torch.int64}


def whole(name):
    generator = torch.Generator().manual_seed(len(name) + SIZES[name])
    return torch.randint(-1000, 1000, (SIZES[name],), generator=generator).to(DTYPES[name])


def splits(num_ranks, seed):
    """{name: where each rank's range begins and ends}: any cuts, empty ranges among them."""
    draw = random.Random(seed)
    found = {}
    for name, size in SIZES.items():
        cuts = sorted(draw.randint(0, size) for _ in range(num_ranks - 1))
        if seed % 3 == 0:  # everything on one rank
            cuts = [0] * (num_ranks - 1)
        found[name] = list(zip([0, *cuts], [*cuts, size], strict=True))
    return found


def save(folder, parts):
    rank = dist.get_rank()
    state = {}
    for name, ranges in parts.items():
        start, stop = ranges[rank]
        state[name] = FlatRange(whole(name)[start:stop].clone(), start, SIZES[name])
    dcp.save(state, storage_writer=FlatWriter(folder), planner=FlatSavePlanner())


def load(folder, parts):
    """{name: (start, stop, elements)} as this rank reads them."""
    rank = dist.get_rank()
    state = {}
    for name, ranges in parts.items():
        start, stop = ranges[rank]
        state[name] = FlatRange(torch.full((stop - start,), -7, dtype=DTYPES[name]), start, SIZES[name])
    dcp.load(state, storage_reader=FlatReader(folder, read(folder)), planner=FlatLoadPlanner())
    return {name: (item.start, item.start + item.local.numel(), item.local) for name, item in state.items()}


@pytest.mark.parametrize("seed", range(8))
def test_any_split_reads_what_any_other_wrote(tmp_path, seed):
    draw = random.Random(seed)
    writers, readers = draw.randint(1, 3), draw.randint(1, 3)
    run_ranks(writers, save, tmp_path, splits(writers, seed))
    for reply in run_ranks(readers, load, tmp_path, splits(readers, seed + 1)):
        for name, (start, stop, found) in reply.items():
            assert found.dtype == DTYPES[name]
            assert torch.equal(found, whole(name)[start:stop]), name


def test_a_replica_writes_nothing_and_reads_everything(tmp_path):
    run_ranks(2, save_replicas, tmp_path)
    both = {name: [(0, size), (0, size)] for name, size in SIZES.items()}
    for reply in run_ranks(2, load, tmp_path, both):
        assert all(torch.equal(found, whole(name)) for name, (_, _, found) in reply.items())
    written = read(tmp_path).storage_data
    assert {info.relative_path for info in written.values()} == {"__0_0.distcp"}


def save_replicas(folder):
    state = {name: FlatRange(whole(name), 0, SIZES[name]) for name in SIZES}
    if dist.get_rank() == 1:
        state = {name: item.empty() for name, item in state.items()}
    dcp.save(state, storage_writer=FlatWriter(folder), planner=FlatSavePlanner())


def test_a_saved_tensor_is_a_copy_free_view(tmp_path):
    """The planner hands DCP the range's own memory, not a clone."""
    run_ranks(1, look_up, tmp_path)


def look_up(folder):
    state = {"a": FlatRange(torch.arange(4.0), 0, 4)}
    planner = FlatSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    (item,) = planner.create_local_plan().items
    assert planner.resolve_data(item).data_ptr() == state["a"].local.data_ptr()
    reader = FlatLoadPlanner()
    reader.set_up_planner(state)
    assert reader.lookup_tensor(item.index).data_ptr() == state["a"].local.data_ptr()


# What DCP offers, by name.


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (DefaultSavePlanner, ["lookup_object", "set_up_planner", "create_local_plan", "resolve_data"]),
        (DefaultLoadPlanner, ["lookup_tensor", "set_up_planner", "load_bytes", "create_local_plan"]),
        (filesystem.FileSystemReader, ["read_metadata", "read_data", "set_up_storage_reader"]),
        (filesystem.FileSystemWriter, ["write_data", "finish", "prepare_local_plan"]),
        (filesystem, ["_StorageInfo", "_StoragePrefix"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_used_of_dcp(owner, names):
    assert [name for name in names if not hasattr(owner, name)] == [], DCP_FILE


def test_dcp_asks_objects_for_their_chunks():
    """`__create_write_items__` and `__create_chunk_list__` are how a range stands in for a sharded tensor."""
    item = FlatRange(torch.zeros(3), 5, 20)
    (written,) = item.__create_write_items__("x", item)
    assert written.index.offset == torch.Size([5])
    assert written.tensor_data.size == torch.Size([20])
    (chunk,) = item.__create_chunk_list__()
    assert (chunk.offsets, chunk.sizes) == (torch.Size([5]), torch.Size([3]))
    assert item.empty().__create_write_items__("x", item) == []
    assert item.empty().__create_chunk_list__() == []
    assert item.empty().numel == 20


# The index.


def save_as_torch_does(folder, parts):
    state = {
        name: FlatRange(whole(name)[start:stop].clone(), start, SIZES[name])
        for name, ranges in parts.items()
        for start, stop in [ranges[dist.get_rank()]]
    }
    writer = filesystem.FileSystemWriter(folder, single_file_per_rank=True)
    dcp.save(state, storage_writer=writer, planner=FlatSavePlanner())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_index_says_what_the_pickle_of_torch_says(tmp_path, seed):
    run_ranks(2, save, tmp_path / "ours", splits(2, seed))
    run_ranks(2, save_as_torch_does, tmp_path / "torch", splits(2, seed))
    found = read(tmp_path / "ours")
    expected = pickle.loads((tmp_path / "torch" / ".metadata").read_bytes())
    assert found.state_dict_metadata.keys() == SIZES.keys()
    for name, described in expected.state_dict_metadata.items():
        described.chunks.sort(key=lambda chunk: chunk.offsets)
        assert found.state_dict_metadata[name] == described
    assert found.storage_data.keys() == expected.storage_data.keys()
    for index, place in expected.storage_data.items():
        assert found.storage_data[index].relative_path == place.relative_path
    assert not (tmp_path / "ours" / ".metadata").exists()


def read(folder):
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return metadata_from(json.loads((folder / INDEX_NAME).read_text()), "step-1", sizes)


def entry(dtype="float32", numel=4, chunks=((0, 4, "__0_0.distcp", 0, 16),)):
    return {"dtype": dtype, "numel": numel, "chunks": [list(chunk) for chunk in chunks]}


def test_an_entry_that_is_right():
    metadata = metadata_from({"a": entry()}, "step-1", {"__0_0.distcp": 100})
    assert metadata.state_dict_metadata["a"].size == torch.Size([4])


FILE = "__0_0.distcp"
WRONG = {
    "no entry": 3,
    "no chunks": {"dtype": "float32", "numel": 0},
    "chunks of another type": {"dtype": "float32", "numel": 0, "chunks": 4},
    "an unknown dtype": entry(dtype="nn"),
    "a dtype that is a function": entry(dtype="load"),
    "a dtype that is a list": {**entry(), "dtype": ["float32"]},
    "a size that is text": entry(numel="4"),
    "a size that is true": entry(numel=True),
    "a size below zero": entry(numel=-1),
    "a huge size": entry(numel=2**70),
    "a gap": entry(numel=8, chunks=[(0, 2, FILE, 0, 8), (3, 5, FILE, 8, 20)]),
    "an overlap": entry(numel=8, chunks=[(0, 4, FILE, 0, 16), (3, 5, FILE, 16, 20)]),
    "too few bytes": entry(chunks=[(0, 4, FILE, 0, 15)]),
    "another dtype's bytes": entry(dtype="float64"),
    "too few elements": entry(numel=5),
    "too many elements": entry(numel=3),
    "a chunk that begins late": entry(chunks=[(1, 3, FILE, 0, 12)]),
    "a chunk of four": entry(chunks=[(0, 4, FILE, 0)]),
    "an offset below zero": entry(chunks=[(0, 4, FILE, -1, 16)]),
    "beyond the file": entry(chunks=[(0, 4, FILE, 95, 16)]),
    "a file that is not there": entry(chunks=[(0, 4, "__5_0.distcp", 0, 16)]),
    "a file elsewhere": entry(chunks=[(0, 4, "../__0_0.distcp", 0, 16)]),
    "a file that holds no tensors": entry(chunks=[(0, 4, "state.json", 0, 16)]),
    "a file that is a number": entry(chunks=[(0, 4, 0, 0, 16)]),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_index_that_is_wrong(what):
    sizes = {FILE: 100, "state.json": 100, "../__0_0.distcp": 100}
    with pytest.raises(ExportFault, match=r"E407 resume: step-1: index.json cannot be used: .*'a'"):
        metadata_from({"b": entry(), "a": WRONG[what]}, "step-1", sizes)


@pytest.mark.parametrize("index", [None, 3, "text", [], {}], ids=repr)
def test_something_else_than_an_index(index):
    with pytest.raises(ExportFault, match="E407 resume:"):
        metadata_from(index, "step-1", {FILE: 100})


def test_a_writer_never_overwrites(tmp_path):
    writer = FlatWriter(tmp_path)
    assert writer.overwrite is False, DCP_FILE
    assert writer.single_file_per_rank is True, DCP_FILE
    assert writer.sync_files is True, DCP_FILE


def test_no_file_of_a_checkpoint_is_unpickled(tmp_path):
    """What ranks write are the elements and nothing else."""
    run_ranks(1, save, tmp_path, {name: [(0, size)] for name, size in SIZES.items()})
    raw = (tmp_path / FILE).read_bytes()
    for name, rows in json.loads((tmp_path / INDEX_NAME).read_text()).items():
        ((_, _, file, offset, length),) = rows["chunks"]
        assert (file, raw[offset : offset + length]) == (
            FILE,
            whole(name).view(torch.uint8).numpy().tobytes(),
        )
    assert len(raw) == sum(whole(name).nbytes for name in SIZES)
    package = Path(dcp_private.__file__).parent
    texts = {path.name: path.read_text() for path in package.rglob("*.py")}
    assert [name for name, text in texts.items() if "import pickle" in text or "torch.load(" in text] == []
