"""Flat ranges on disk: any split reads what any other wrote, and an index in JSON says where it lies."""

import json
import random
import zlib
from pathlib import Path

import pytest
import torch

from shardproof.checkpoints import ranges as ranges_file
from shardproof.checkpoints.ranges import (
    INDEX_NAME,
    check_index,
    data_name,
    merge_index,
    read_ranges,
    write_ranges,
)
from shardproof.errors import ExportFault
from shardproof.shard.local import LocalShard
from shardproof.weights.boxes import cut

SIZES = {"a": 1, "b": 7, "c": 64, "d": 1000, "e": 3}
DTYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32, "d": torch.float32, "e": torch.int64}


def whole(name):
    generator = torch.Generator().manual_seed(len(name) + SIZES[name])
    return torch.randint(-1000, 1000, (SIZES[name],), generator=generator).to(DTYPES[name])


def held_range(values, start, numel):
    return LocalShard.of_range("t", (numel,), start, start + values.numel(), values)


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


def save(folder, parts, num_ranks):
    """Write every rank's ranges, and the index of them all."""
    written = []
    for rank in range(num_ranks):
        held = {
            name: held_range(whole(name)[slice(*cuts[rank])].clone(), cuts[rank][0], SIZES[name])
            for name, cuts in parts.items()
        }
        path = folder / data_name(rank)
        part, size, crc = write_ranges(path, held)
        assert (size, crc) == (path.stat().st_size, zlib.crc32(path.read_bytes()))
        written.append(part)
    (folder / INDEX_NAME).write_text(json.dumps(merge_index(written)))


def load(folder, parts, rank):
    """{name: (start, stop, elements)} as a rank reads them."""
    held = {
        name: held_range(torch.full((stop - start,), -7, dtype=DTYPES[name]), start, SIZES[name])
        for name, cuts in parts.items()
        for start, stop in [cuts[rank]]
    }
    read_ranges(folder, held, read(folder))
    return {name: (*item.flat_range, item.flat) for name, item in held.items()}


@pytest.mark.parametrize("seed", range(24))
def test_any_split_reads_what_any_other_wrote(tmp_path, seed):
    draw = random.Random(seed)
    writers, readers = draw.randint(1, 5), draw.randint(1, 5)
    save(tmp_path, splits(writers, seed), writers)
    for rank in range(readers):
        for name, (start, stop, found) in load(tmp_path, splits(readers, seed + 1), rank).items():
            assert found.dtype == DTYPES[name]
            assert torch.equal(found, whole(name)[start:stop]), name


def test_boxes_read_what_ranges_wrote_and_the_other_way_round(tmp_path):
    shape = (4, 6, 5)
    values = torch.arange(120.0).view(shape)
    boxes = [
        ((0, 2), (0, 6), (0, 2)),
        ((2, 4), (1, 6), (0, 2)),
        ((2, 4), (0, 1), (0, 2)),
        ((0, 4), (0, 6), (2, 5)),
    ]
    ranges = [((0, 17),), ((17, 61),), ((61, 120),)]
    held = {"boxes": [boxes[:1], boxes[1:3], boxes[3:]], "ranges": [[box] for box in ranges]}
    for kind, other in [("boxes", "ranges"), ("ranges", "boxes"), ("boxes", "boxes")]:
        folder = tmp_path / f"{kind}-{other}"
        folder.mkdir()
        written = []
        for rank, mine in enumerate(held[kind]):
            flat = torch.cat([cut(values, box).reshape(-1) for box in mine])
            shard = LocalShard.of_boxes("w", shape, mine, flat)
            written.append(write_ranges(folder / data_name(rank), {"w": shard})[0])
        (folder / INDEX_NAME).write_text(json.dumps(merge_index(json.loads(json.dumps(written)))))
        for mine in held[other]:
            flat = torch.cat([cut(values, box).reshape(-1) for box in mine])
            shard = LocalShard.of_boxes("w", shape, mine, torch.full_like(flat, -7))
            read_ranges(folder, {"w": shard}, read(folder))
            assert torch.equal(shard.flat, flat)
    reshaped = LocalShard.of_range("w", (120,), 0, 120, torch.zeros(120))
    with pytest.raises(ExportFault, match=r"E407 resume: 'w' has the shape .* in the checkpoint"):
        read_ranges(folder, {"w": reshaped}, read(folder))


def test_another_dtype_is_converted(tmp_path):
    save(tmp_path, {"c": [(0, 64)]}, 1)
    item = held_range(torch.zeros(10, dtype=torch.float64), 5, 64)
    read_ranges(tmp_path, {"c": item}, read(tmp_path))
    assert torch.equal(item.flat, whole("c")[5:15].double())


def test_a_tensor_of_no_elements_is_in_the_index(tmp_path):
    part, _, _ = write_ranges(tmp_path / data_name(0), {"z": held_range(torch.zeros(0), 0, 0)})
    saved = check_index(merge_index([part]), "step-1", {data_name(0): 0})
    assert (saved["z"].numel, saved["z"].chunks) == (0, [])


def test_a_file_that_became_shorter_is_named(tmp_path):
    save(tmp_path, {"d": [(0, 1000)]}, 1)
    saved = read(tmp_path)
    (tmp_path / data_name(0)).write_bytes(b"short")
    with pytest.raises(ExportFault, match=r"E407 resume: rank-0.bin ends before 'd' is complete"):
        read_ranges(tmp_path, {"d": held_range(torch.zeros(1000), 0, 1000)}, saved)


def test_what_ranks_leave_out_is_found_before_it_is_published(tmp_path):
    part, size, _ = write_ranges(tmp_path / data_name(0), {"c": held_range(whole("c")[:63], 0, 64)})
    with pytest.raises(ExportFault, match=r"E408 save: .*'c' has a gap at element 63 of 64"):
        check_index(merge_index([part]), "step-1", {data_name(0): size}, stage="save", code="E408")


def test_a_file_is_never_overwritten(tmp_path):
    (tmp_path / data_name(0)).write_bytes(b"")
    with pytest.raises(FileExistsError):
        write_ranges(tmp_path / data_name(0), {})


# The index.


def read(folder):
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return check_index(json.loads((folder / INDEX_NAME).read_text()), "step-1", sizes)


FILE = data_name(0)


def entry(dtype="float32", numel=4, chunks=((0, 4, FILE, 0),), **more):
    return {"dtype": dtype, "numel": numel, "chunks": [list(chunk) for chunk in chunks], **more}


def test_an_entry_that_is_right():
    assert check_index({"a": entry()}, "step-1", {FILE: 16})["a"].numel == 4


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
    "a gap": entry(numel=8, chunks=[(0, 2, FILE, 0), (3, 5, FILE, 8)]),
    "an overlap": entry(numel=8, chunks=[(0, 4, FILE, 0), (3, 5, FILE, 16)]),
    "too few elements": entry(numel=5),
    "too many elements": entry(numel=3),
    "a chunk that begins late": entry(chunks=[(1, 3, FILE, 0)]),
    "a chunk of three": entry(chunks=[(0, 4, FILE)]),
    "an offset below zero": entry(chunks=[(0, 4, FILE, -1)]),
    "beyond the file": entry(chunks=[(0, 4, FILE, 95)]),
    "a file that is not there": entry(chunks=[(0, 4, "rank-5.bin", 0)]),
    "a file elsewhere": entry(chunks=[(0, 4, "../rank-0.bin", 0)]),
    "a file that holds no tensors": entry(chunks=[(0, 4, "state.json", 0)]),
    "a file that is a number": entry(chunks=[(0, 4, 0, 0)]),
    "a box without a shape": entry(chunks=[([[0, 2], [0, 2]], FILE, 0)]),
    "a box of other dims": entry(shape=[2, 2], chunks=[([[0, 2]], FILE, 0)]),
    "a box beyond the shape": entry(shape=[2, 2], chunks=[([[0, 2], [0, 3]], FILE, 0)]),
    "a box that ends before it begins": entry(shape=[2, 2], chunks=[([[0, 2], [2, 0]], FILE, 0)]),
    "a box of text": entry(shape=[2, 2], chunks=[(["02", [0, 2]], FILE, 0)]),
    "a gap between boxes": entry(shape=[2, 2], chunks=[([[0, 2], [0, 1]], FILE, 0)]),
    "boxes that overlap": entry(shape=[2, 2], chunks=[(0, 4, FILE, 0), ([[0, 1], [0, 1]], FILE, 0)]),
    "a shape of another size": entry(shape=[2, 3]),
    "a shape that is a number": entry(shape=4),
    "a shape of a thousand dims": entry(shape=[1] * 1000 + [4]),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_index_that_is_wrong(what):
    sizes = {FILE: 100, "state.json": 100, "../rank-0.bin": 100}
    with pytest.raises(ExportFault, match=r"E407 resume: step-1: index.json cannot be used: .*'a'"):
        check_index({"b": entry(), "a": WRONG[what]}, "step-1", sizes)


@pytest.mark.parametrize("index", [None, 3, "text", [], {}], ids=repr)
def test_something_else_than_an_index(index):
    with pytest.raises(ExportFault, match="E407 resume:"):
        check_index(index, "step-1", {FILE: 100})


def test_no_file_of_a_checkpoint_is_unpickled(tmp_path):
    """What ranks write are the elements and nothing else; pickles pass between a rank and its own workers alone."""
    save(tmp_path, {name: [(0, size)] for name, size in SIZES.items()}, 1)
    raw = (tmp_path / FILE).read_bytes()
    for name, rows in json.loads((tmp_path / INDEX_NAME).read_text()).items():
        ((_, _, file, offset),) = rows["chunks"]
        expected = whole(name).view(torch.uint8).numpy().tobytes()
        assert (file, raw[offset : offset + len(expected)]) == (FILE, expected)
    assert len(raw) == sum(whole(name).nbytes for name in SIZES)
    package = Path(ranges_file.__file__).parents[1]
    texts = {path.name: path.read_text() for path in package.rglob("*.py")}
    unpickling = (
        "pickle.load",
        "Unpickler(",
        "torch.load(",
        "distributed.checkpoint",
        "_object_list(",
        "gather_object(",
    )
    found = {name for name, text in texts.items() if any(word in text for word in unpickling)}
    assert found <= {"async_workers.py", "jobs.py", "workers.py", "worker.py"}, "of rewards and environments"
