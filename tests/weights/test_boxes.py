"""Box arithmetic against the same operations on real tensors."""

import random
from math import prod

import pytest
import torch
from transformers import core_model_loading as ops

from shardproof.weights.box_tensor import BoxTensor, NotSliceable
from shardproof.weights.boxes import (
    blocks,
    copy_overlap,
    cut,
    enclosing_range,
    first_miscount,
    flat_range_boxes,
    flatten,
    put,
    put_held,
    size_of,
)

MAX_NUMEL = 4000


def make_sources(shapes):
    """Tensors in which every element is unique, and their boxes."""
    sources, first = {}, 0
    for index, shape in enumerate(shapes):
        sources[f"t{index}"] = torch.arange(first, first + prod(shape)).view(shape)
        first += prod(shape)
    return sources, {name: BoxTensor.of_source(name, t.shape, t.dtype) for name, t in sources.items()}


def read_box(boxes, box, sources):
    """What the slices of `box` say is there; every element must be written exactly once."""
    out = torch.full([b - a for a, b in box], -1)
    for piece in boxes.slices(box):
        assert bool((cut(out, piece.box) == -1).all()), "an element is written twice"
        put(out, piece, cut(sources[piece.source], piece.source_box))
    return out


def read_flat(boxes, start, stop, sources):
    parts = [
        read_box(boxes, box, sources).reshape(-1) for _, box in flat_range_boxes(boxes.shape, start, stop)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def put_together(rng, account, sources):
    """The tensor from parts of the sources, each put in its place by whoever holds it."""
    out = torch.full(account.shape, -1)
    for piece in account.pieces:
        source = sources[piece.source]
        for box in halves(rng, rng.choice([whole_box(source.shape), ((0, source.numel()),)]), 3):
            put_held(out, piece, box, cut(source, box).reshape(-1))
    return out


def whole_box(shape):
    return tuple((0, n) for n in shape)


def random_shape(rng, max_dims=3):
    return tuple(rng.randint(1, 4) for _ in range(rng.randint(1, max_dims)))


def random_step(rng, pool):
    """One operation on both sides of a random pair; the results join the pool."""
    boxes, tensor = rng.choice(pool)
    ndim = tensor.ndim
    same = [pair for pair in pool if pair[1].shape == tensor.shape]
    operation = rng.choice(["stack", "cat", "chunk", "transpose", "unbind", "squeeze", "squeeze_dim"])
    if operation == "stack":
        several = rng.choices(same, k=rng.randint(1, 3))
        dim = rng.randint(-ndim - 1, ndim)
        return [
            (torch.stack([b for b, _ in several], dim=dim), torch.stack([t for _, t in several], dim=dim))
        ]
    if operation == "squeeze":
        return [(torch.squeeze(boxes), torch.squeeze(tensor))]
    if ndim == 0:
        return []
    dim = rng.randint(-ndim, ndim - 1)
    if operation == "squeeze_dim":
        return [(boxes.squeeze(dim), tensor.squeeze(dim))]
    if operation == "cat":
        several = rng.choices(same, k=rng.randint(1, 3))
        return [(torch.cat([b for b, _ in several], dim=dim), torch.cat([t for _, t in several], dim=dim))]
    if operation == "transpose":
        other = rng.randint(-ndim, ndim - 1)
        return [(torch.transpose(boxes, dim, other), torch.transpose(tensor, dim, other))]
    if operation == "chunk":
        parts = rng.randint(1, 4)
        return list(zip(torch.chunk(boxes, parts, dim=dim), torch.chunk(tensor, parts, dim=dim), strict=True))
    return list(zip(torch.unbind(boxes, dim=dim), torch.unbind(tensor, dim=dim), strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_chains_of_operations_keep_account_of_every_element(seed):
    rng = random.Random(seed)
    shape = random_shape(rng)
    sources, boxes = make_sources([shape, shape, random_shape(rng)])
    pool = [(boxes[name], sources[name]) for name in sources]
    for _ in range(rng.randint(2, 7)):
        made = [pair for pair in random_step(rng, pool) if 0 < pair[1].numel() <= MAX_NUMEL]
        pool += rng.sample(made, min(len(made), 3))
    for result, tensor in pool[-6:]:
        assert result.shape == tensor.shape
        assert result.numel() == tensor.numel()
        assert torch.equal(read_box(result, whole_box(tensor.shape), sources), tensor)
        assert torch.equal(put_together(rng, result, sources), tensor)
        for _ in range(4):
            box = []
            for length in tensor.shape:
                start = rng.randint(0, length - 1)
                box.append((start, rng.randint(start + 1, length)))
            expected = tensor[tuple(slice(a, b) for a, b in box)]
            assert torch.equal(read_box(result, tuple(box), sources), expected)
            start = rng.randint(0, tensor.numel())
            stop = rng.randint(start, tensor.numel())
            assert torch.equal(read_flat(result, start, stop, sources), tensor.reshape(-1)[start:stop])


GATE, UP, DOWN = "experts.*.gate", "experts.*.up", "experts.*.down"
# (operations, shape and number of the tensors of each source pattern, target patterns)
CONVERSIONS = {
    "stack experts": ([ops.MergeModulelist(dim=0)], {DOWN: ((3, 5), 4)}, ["experts.down"]),
    "stack experts on the last dim": ([ops.MergeModulelist(dim=-1)], {DOWN: ((3, 5), 4)}, ["experts.down"]),
    "stack and fuse gate and up": (
        [ops.MergeModulelist(dim=0), ops.Concatenate(dim=1)],
        {GATE: ((3, 5), 4), UP: ((3, 5), 4)},
        ["experts.gate_up"],
    ),
    "stack, fuse and transpose": (
        [ops.MergeModulelist(dim=0), ops.Concatenate(dim=1), ops.Transpose(1, 2)],
        {GATE: ((3, 5), 4), UP: ((3, 5), 4)},
        ["experts.gate_up"],
    ),
    "concatenate": ([ops.Concatenate(dim=0)], {"q": ((4, 3), 1), "k": ((2, 3), 1), "v": ((2, 3), 1)}, ["qkv"]),
    "split a fused tensor": ([ops.Chunk(dim=0)], {"qkv": ((9, 4), 1)}, ["q", "k", "v"]),
    "split unevenly": ([ops.Chunk(dim=1)], {"qkv": ((2, 7), 1)}, ["q", "k", "v"]),
    "transpose": ([ops.Transpose(0, 1)], {"weight": ((3, 5), 1)}, ["kernel"]),
    "unstack experts": ([ops.SplitModulelist(dim=0)], {"experts.down": ((4, 3, 5), 1)}, [DOWN]),
    "fuse and split text and vision experts": (
        [ops.ErnieFuseAndSplitTextVisionExperts(stack_dim=0, concat_dim=1)],
        {GATE: ((3, 5), 6), UP: ((3, 5), 6)},
        ["text.gate_up", "vision.gate_up"],
    ),
    "decouple text and vision experts": (
        [ops.ErnieSplitAndDecoupleTextVisionExperts(stack_dim=0, concat_dim=1)],
        {"text.gate_up": ((3, 4, 5), 1), "vision.gate_up": ((3, 4, 5), 1)},
        [GATE, UP],
    ),
}  # fmt: skip


def apply_operations(operations, values, targets):
    values = {pattern: list(items) for pattern, items in values.items()}
    patterns = list(values)
    for operation in operations:
        values = operation.convert(values, source_patterns=patterns, target_patterns=targets, config=None)
    return values


def conversion_inputs(described):
    shapes = [(pattern, shape) for pattern, (shape, count) in described.items() for _ in range(count)]
    sources, boxes = make_sources([shape for _, shape in shapes])
    by_pattern = {pattern: [] for pattern in described}
    for (pattern, _), name in zip(shapes, sources, strict=True):
        by_pattern[pattern].append(name)
    return (
        sources,
        {pattern: [sources[n] for n in names] for pattern, names in by_pattern.items()},
        {pattern: [boxes[n] for n in names] for pattern, names in by_pattern.items()},
    )


@pytest.mark.parametrize("case", CONVERSIONS)
def test_transformers_conversions_run_on_boxes(case):
    operations, described, targets = CONVERSIONS[case]
    sources, tensors, boxes = conversion_inputs(described)
    expected = apply_operations(operations, tensors, targets)
    actual = apply_operations(operations, boxes, targets)
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape
        assert torch.equal(read_box(actual[name], whole_box(tensor.shape), sources), tensor)
        numel = tensor.numel()
        for start, stop in [
            (0, numel // 3),
            (numel // 3, numel // 2),
            (numel // 2, numel),
            (numel - 1, numel),
        ]:
            assert torch.equal(read_flat(actual[name], start, stop, sources), tensor.reshape(-1)[start:stop])


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        (ops.Interleave(dim=0), (6, 4)),
        (ops.Interleave(dim=1, inverse=True), (3, 4)),
        (ops.Conv3dToLinear(in_channels=3, kernel_size=(2, 2, 2)), (4, 3, 2, 2, 2)),
    ],
    ids=["interleave", "inverse interleave", "conv3d"],
)
def test_an_operation_that_moves_single_elements_is_refused(operation, shape):
    _, tensors, boxes = conversion_inputs({"weight": (shape, 1)})
    assert apply_operations([operation], tensors, ["weight"])["weight"].numel() == prod(shape)
    with pytest.raises(NotSliceable):
        apply_operations([operation], boxes, ["weight"])


@pytest.mark.parametrize(
    "call",
    [
        lambda box: box + 1,
        lambda box: box.float(),
        lambda box: box[0],
        lambda box: torch.add(box, box),
        lambda box: torch.flip(box, [0]),
        lambda box: torch.stack([box, torch.squeeze(box.chunk(2)[0])]),
    ],
    ids=["add", "cast", "index", "torch.add", "flip", "stack of two shapes"],
)  # fmt: skip
def test_anything_else_than_moving_boxes_is_refused(call):
    box = BoxTensor.of_source("t", (4, 3), torch.float32)
    with pytest.raises((NotSliceable, TypeError)):
        call(box)


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (1, 4), (4, 1), (3, 5), (2, 3, 4), (2, 1, 3), (2, 2, 2, 3), (0, 3), (3, 0)]
)
def test_flat_ranges_are_boxes_in_order(shape):
    numel = prod(shape)
    values = torch.arange(numel).view(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            position = start
            for offset, box in flat_range_boxes(shape, start, stop):
                part = values[tuple(slice(a, b) for a, b in box)].reshape(-1)
                assert offset == position
                assert torch.equal(part, torch.arange(position, position + part.numel()))
                position += part.numel()
            assert position == stop


def test_a_flat_range_needs_few_boxes():
    """At most two a dim and one in the middle, however long the range is."""
    shape = (50, 40, 30)
    rng = random.Random(0)
    for _ in range(200):
        start = rng.randint(0, prod(shape) - 1)
        stop = rng.randint(start + 1, prod(shape))
        assert len(list(flat_range_boxes(shape, start, stop))) <= 2 * len(shape) - 1


# Boxes beside boxes, against tensors that say the same element by element.


def random_box(rng, shape):
    """A box with a range per dim, or a range of the flattened tensor; empty now and then."""
    if rng.random() < 0.4:
        return (tuple(sorted(rng.randint(0, prod(shape)) for _ in range(2))),)
    return tuple(tuple(sorted(rng.randint(0, n) for _ in range(2))) for n in shape)


def covered(shape, boxes):
    """How often each element is in one of the boxes."""
    times = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        cut(times, box).add_(1)
    return times


def test_what_random_boxes_share_is_copied_and_nothing_else():
    rng = random.Random(0)
    for _ in range(400):
        shape = random_shape(rng)
        one, other = random_box(rng, shape), random_box(rng, shape)
        values = torch.arange(prod(shape)).view(shape)
        target = torch.full((size_of(one),), -1)
        copy_overlap(shape, target, one, cut(values, other).reshape(-1), other)
        shared = covered(shape, [other]) > 0
        assert torch.equal(target, cut(torch.where(shared, values, -1), one).reshape(-1)), (shape, one, other)


def test_blocks_of_random_boxes_are_their_memory_in_order():
    rng = random.Random(1)
    for _ in range(200):
        shape = random_shape(rng)
        box = random_box(rng, shape)
        values = torch.arange(prod(shape)).view(shape)
        memory = cut(values, box).reshape(-1)
        low, high = sorted(rng.randint(0, memory.numel()) for _ in range(2))
        position = low
        for offset, block in blocks(shape, box, low, high):
            assert offset == position
            assert torch.equal(cut(values, block).reshape(-1), memory[offset : offset + size_of(block)])
            position += size_of(block)
        assert position == high
        first, last = enclosing_range(box, shape)
        assert memory.numel() == 0 or (first, last) == (int(memory[0]), int(memory[-1]) + 1)
        assert torch.equal(cut(values, flatten(box, shape)).reshape(-1), memory)


def test_the_first_element_that_random_boxes_miscount():
    """Half of the cases are coverings: the boxes held, cut in two again and again; then one is lost, or there twice."""
    rng = random.Random(2)
    seen = set()
    for _ in range(600):
        shape = random_shape(rng)
        held = [random_box(rng, shape) for _ in range(rng.randint(0, 2))]
        found = [random_box(rng, shape) for _ in range(rng.randint(0, 4))]
        if rng.random() < 0.5:
            found = [part for box in held for part in halves(rng, box, 3)]
            rng.shuffle(found)
            if found and rng.random() < 0.5:
                found = found[1:] if rng.random() < 0.5 else [*found, found[0]]
        expected, counted = covered(shape, held), covered(shape, found)
        wrong = (expected != counted).reshape(-1).nonzero()
        miscount = first_miscount(shape, held, found)
        seen.add(miscount is None)
        if miscount is None:
            assert not len(wrong), (shape, held, found)
            continue
        first = int(wrong[0])
        assert miscount.expected == int(expected.view(-1)[first])
        assert miscount.found == int(counted.view(-1)[first])
        by_dims = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), shape))
        assert miscount.position in ((first,), by_dims)
    assert seen == {True, False}


def halves(rng, box, times):
    """A box cut in two along random dims, again and again."""
    parts = [box]
    for _ in range(times):
        part = parts.pop(rng.randrange(len(parts)))
        dim = rng.randrange(len(part))
        a, b = part[dim]
        middle = rng.randint(a, b)
        parts += [(*part[:dim], (a, middle), *part[dim + 1 :]), (*part[:dim], (middle, b), *part[dim + 1 :])]
    return parts
