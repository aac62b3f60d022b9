"""DCP over flat ranges: any split reads what any other wrote, and its metadata cannot do anything but describe."""

import io
import pickle
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from shardproof.errors import ExportFault
from shardproof.export import dcp_private
from shardproof.export.dcp_private import (
    FlatLoadPlanner,
    FlatRange,
    FlatSavePlanner,
    SafeReader,
    make_writer,
    read_metadata,
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
    dcp.save(state, storage_writer=make_writer(folder), planner=FlatSavePlanner())


def load(folder, parts):
    """{name: (start, stop, elements)} as this rank reads them."""
    rank = dist.get_rank()
    state = {}
    for name, ranges in parts.items():
        start, stop = ranges[rank]
        state[name] = FlatRange(torch.full((stop - start,), -7, dtype=DTYPES[name]), start, SIZES[name])
    dcp.load(state, storage_reader=SafeReader(folder), planner=FlatLoadPlanner())
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
    written = read_metadata(tmp_path).storage_data
    assert {info.relative_path for info in written.values()} == {"__0_0.distcp"}


def save_replicas(folder):
    state = {name: FlatRange(whole(name), 0, SIZES[name]) for name in SIZES}
    if dist.get_rank() == 1:
        state = {name: item.empty() for name, item in state.items()}
    dcp.save(state, storage_writer=make_writer(folder), planner=FlatSavePlanner())


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


def test_every_allowed_name_is_there():
    """A name that moved would make every checkpoint unreadable, or stand for something else one day."""
    missing = []
    for module, name in sorted(dcp_private._ALLOWED):
        if module == "pathlib._local":  # Python 3.13's home of PosixPath
            continue
        try:
            owner = __import__(module, fromlist=[name])
        except ImportError:
            missing.append((module, name))
            continue
        # Not every version of torch pickles all of these; none of them may be a function that acts.
        found = getattr(owner, name, None)
        if found is not None and not isinstance(found, type):
            assert name == "_get_layout", (module, name)
    assert missing == [], DCP_FILE


# The unpickler.


@pytest.fixture(scope="module")
def real_metadata(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metadata")
    run_ranks(2, save, folder, splits(2, 1))
    return (folder / ".metadata").read_bytes()


def read(folder, raw):
    (folder / ".metadata").write_bytes(raw)
    return read_metadata(folder)


def test_real_metadata_reads_as_pickle_reads_it(tmp_path, real_metadata):
    found, expected = read(tmp_path, real_metadata), pickle.loads(real_metadata)
    assert found.state_dict_metadata.keys() == SIZES.keys()
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_that_torch_may_use_reads(tmp_path, real_metadata, protocol):
    raw = pickle.dumps(pickle.loads(real_metadata), protocol=protocol)
    assert read(tmp_path, raw).state_dict_metadata.keys() == SIZES.keys()


FORBIDDEN = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("subprocess", "Popen"),
    ("torch", "load"),
    ("torch", "ops"),
    ("torch", "hub.load"),
    ("torch.serialization", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("torch.utils.data", "DataLoader"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("functools", "partial"),
    ("operator", "attrgetter"),
    ("pathlib", "Path.unlink"),
    ("pathlib", "os.system"),
    ("collections", "OrderedDict.__init__"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "FileSystem"),
]


@pytest.mark.parametrize(("module", "name"), FORBIDDEN, ids=".".join)
@pytest.mark.parametrize("opcode", ["GLOBAL", "STACK_GLOBAL"])
def test_a_forbidden_name_is_refused_before_it_is_looked_up(tmp_path, module, name, opcode):
    if opcode == "GLOBAL":
        raw = b"\x80\x02c" + f"{module}\n{name}\n".encode() + b")R."
    else:
        raw = b"\x80\x04" + text(module) + text(name) + b"\x93)R."
    with pytest.raises(ExportFault, match=f"E409 resume: its metadata asks for {module}.{name}"):
        read(tmp_path, raw)


def text(value):
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def test_dtypes_are_the_only_members_of_torch(tmp_path):
    for name in ("float32", "bfloat16", "int64"):
        raw = b"\x80\x02ctorch\n" + name.encode() + b"\n."
        with pytest.raises(ExportFault, match=r"E407 resume: .* is a dtype"):
            read(tmp_path, raw)


def test_cut_metadata_is_unreadable_at_any_length(tmp_path, real_metadata):
    for length in range(0, len(real_metadata) - 1, 37):
        with pytest.raises(ExportFault, match="E407 resume:"):
            read(tmp_path, real_metadata[:length])


@pytest.mark.parametrize(
    "value", [None, 3, "text", [], {}, (Metadata({}),), BytesStorageMetadata()], ids=repr
)
def test_something_else_than_metadata(tmp_path, value):
    with pytest.raises(ExportFault, match="E407 resume:"):
        read(tmp_path, pickle.dumps(value))


def test_an_entry_that_is_not_a_tensor(tmp_path, real_metadata):
    metadata = pickle.loads(real_metadata)
    assert all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values())
    metadata.state_dict_metadata["extra"] = BytesStorageMetadata()
    with pytest.raises(ExportFault, match=r"E409 resume: .*'extra'"):
        read(tmp_path, pickle.dumps(metadata))


def test_persistent_ids_are_refused(tmp_path):
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.persistent_id = lambda value: "anything" if value == 3 else None
    pickler.dump([3])
    with pytest.raises(ExportFault, match="E407 resume:"):
        read(tmp_path, stream.getvalue())


def test_a_writer_never_overwrites(tmp_path):
    writer = make_writer(tmp_path)
    assert writer.overwrite is False, DCP_FILE
    assert writer.single_file_per_rank is True, DCP_FILE
    assert writer.sync_files is True, DCP_FILE
