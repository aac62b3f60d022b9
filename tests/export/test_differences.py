"""Blocks as differences: what is decoded is what was encoded, in the smallest form, and damage is found."""

import numpy as np
import pytest

from shardproof.export.differences import Damaged, decode, encode

SIZES = (1, 2, 3, 7, 64, 1000, 1001, 70_000)


def body_of(block):
    return np.frombuffer(b"".join(part.tobytes() for part in block.parts), dtype=np.uint8)


def changed(old, share, step, seed=0):
    """`old` with a share of its 2-byte units moved by `step`, or by anything at all."""
    rng = np.random.default_rng(seed)
    new = old.copy()
    units = new[: len(new) // 2 * 2].view(np.int16)
    at = rng.random(len(units)) < share
    units[at] = units[at] + step if step else rng.integers(-(2**15), 2**15, int(at.sum()))
    if len(new) % 2 and share == 1:
        new[-1] ^= 255
    return new


@pytest.mark.parametrize("step", [1, -3, 127, -127, 128, -128, 2**15 - 1, 0])
@pytest.mark.parametrize("share", [0, 0.001, 0.02, 0.2, 0.5, 1])
def test_every_block_comes_back_and_never_takes_more_than_itself(share, step):
    for size in SIZES:
        old = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
        new = changed(old, share, step, size)
        block = encode(new, old)
        assert block.nbytes <= size
        assert np.array_equal(decode(block.to_json(), body_of(block), old), new)
        whole = encode(new, None)
        assert np.array_equal(decode(whole.to_json(), body_of(whole), None), new)


@pytest.mark.parametrize(
    ("share", "step", "form", "most"),
    [
        (0, 1, "same", 0),
        (0.01, 1, "gaps", 0.012),
        (0.01, 0, "gaps", 0.017),
        (0.3, 1, "bits", 0.22),
        (1, 0, "raw", 1),
    ],
)
def test_the_smallest_form_is_used(share, step, form, most):
    old = np.random.default_rng(1).integers(0, 256, 2**20).astype(np.uint8)
    block = encode(changed(old, share, step), old)
    assert block.form == form
    assert block.nbytes <= most * len(old)


def test_neighbours_far_apart_and_at_both_ends():
    old = np.zeros(4000, dtype=np.uint8)
    for places in ([0], [1999], [0, 1999], [254], [255], [256], [510], [0, 255, 510, 511]):
        new = old.copy()
        new.view(np.int16)[places] = 5
        block = encode(new, old)
        assert np.array_equal(decode(block.to_json(), body_of(block), old), new)


def test_damage_is_found_and_never_written_outside_of_the_block():
    rng = np.random.default_rng(2)
    old = rng.integers(0, 256, 3000).astype(np.uint8)
    for share, step in ((0.02, 1), (0.02, 0), (0.3, 1), (0.0, 1)):
        block = encode(changed(old, share, step), old)
        said, body = block.to_json(), body_of(block)
        wrong = [(said | {key: value}, body) for key in said for value in (0, 7, -1, 10**9, "x", None)]
        wrong += [(said, body[:-1]), (said, np.append(body, np.uint8(0)))]
        for header, content in wrong:
            if header == said and len(content) == len(body):
                continue
            try:
                decoded = decode(header, content, old)
            except Damaged:
                continue
            assert len(decoded) == len(old)
    with pytest.raises(Damaged, match="a difference from something else"):
        decode({"form": "same", "size": 10, "changed": 0, "large": None}, old[:0], None)
