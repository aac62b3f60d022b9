"""The digest notices what changes a model and nothing else."""

import itertools
import random

import pytest
import torch

from shardproof.digest import digest, digest_tiles

# Fewer than a row of 1024 words, exactly one, several blocks of rows, and tails that are no multiple of 8 bytes.
SIZES = [1, 2, 3, 7, 8, 9, 1023, 2048, 2049, 5000, 300_001]


def values(numel, dtype=torch.float32, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_it_is_a_signed_64_bit_integer_and_repeatable():
    tensor = values(5000)
    assert isinstance(digest(tensor), int)
    assert -(2**63) <= digest(tensor) < 2**63
    assert digest(tensor) == digest(tensor.clone())


def test_the_value_is_fixed():
    """Digests are compared between machines and kept in receipts: another version must not compute another."""
    assert digest(torch.tensor([1])) == 8181461094107157873
    assert digest(torch.arange(5000)) == 4354530493967865122
    assert digest(torch.arange(-3, 300, dtype=torch.float32)) == 7264362368022026008


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_one_element_change_is_seen(numel, dtype):
    tensor = values(numel, dtype)
    before = digest(tensor)
    rng = random.Random(numel)
    for index in {0, numel - 1, *(rng.randrange(numel) for _ in range(10))}:
        changed = tensor.clone()
        raw = changed.view(torch.uint8)
        raw[index * tensor.element_size() + rng.randrange(tensor.element_size())] ^= 1 << rng.randrange(8)
        assert digest(changed) != before, index


@pytest.mark.parametrize("numel", [2, 9, 2049, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_swap_is_seen(numel, dtype):
    tensor = torch.arange(1, numel + 1).to(dtype) if dtype == torch.int64 else values(numel, dtype)
    before = digest(tensor)
    rng = random.Random(numel)
    for _ in range(20):
        i, j = rng.sample(range(numel), 2)
        if tensor[i] == tensor[j]:
            continue
        swapped = tensor.clone()
        swapped[i], swapped[j] = tensor[j], tensor[i]
        assert digest(swapped) != before, (i, j)


def test_swapped_and_rolled_blocks_are_seen():
    tensor = values(64 * 1024)
    rows = tensor.view(32, 2048)
    before = digest(tensor)
    assert digest(rows.flip(0)) != before
    assert digest(rows.roll(1, 0)) != before
    assert digest(tensor.roll(2)) != before
    assert digest(tensor.view(2, -1).flip(0)) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_pairs_of_sign_flips_are_seen(dtype):
    """Flipping the top bit of two words changes a plain sum by 2^64, that is, not at all."""
    tensor = values(5000, dtype)
    before = digest(tensor)
    rng = random.Random(0)
    for _ in range(50):
        flipped = tensor.clone()
        for index in rng.sample(range(5000), 2):
            flipped[index] = -flipped[index]
        assert digest(flipped) != before
    assert digest(-tensor) != before


def test_the_complement_is_seen():
    words = torch.randint(-(2**62), 2**62, (3000,), generator=torch.Generator().manual_seed(0))
    assert digest(~words) != digest(words)
    for index in range(0, 3000, 97):
        changed = words.clone()
        changed[index] = ~changed[index]
        assert digest(changed) != digest(words)


def test_zeros_of_any_size_and_nothing_have_the_digest_zero():
    assert digest(torch.empty(0)) == 0
    assert digest(torch.empty(3, 0, dtype=torch.bfloat16)) == 0
    assert digest(torch.zeros(5000)) == 0
    assert digest(torch.full((5000,), -0.0)) != 0


@pytest.mark.parametrize("numel", [16, 2048, 5000, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_digests_of_aligned_shards_add_up(numel, dtype):
    tensor = values(numel, dtype)
    a_word = 8 // tensor.element_size()
    rng = random.Random(numel)
    for num_cuts in (1, 3, 10):
        cuts = sorted({0, numel, *(rng.randrange(0, numel, a_word) for _ in range(num_cuts))})
        parts = [digest(tensor[a:b], first_word=a // a_word) for a, b in itertools.pairwise(cuts)]
        assert (sum(parts) - digest(tensor)) % 2**64 == 0


def test_the_same_bytes_have_one_digest_in_every_dtype_and_shape():
    tensor = values(4096)
    for dtype in (torch.uint8, torch.int16, torch.bfloat16, torch.int32, torch.int64, torch.float64):
        assert digest(tensor.view(dtype)) == digest(tensor)
    assert digest(tensor.view(64, 64)) == digest(tensor)
    assert digest(tensor.view(torch.uint8) > 100) == digest((tensor.view(torch.uint8) > 100).to(torch.uint8))


@pytest.mark.parametrize("num_bytes", range(1, 26))
def test_tails_are_padded_with_zeros(num_bytes):
    raw = torch.arange(1, num_bytes + 1, dtype=torch.uint8)
    padded = torch.zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8)
    padded[:num_bytes] = raw
    assert digest(raw) == digest(padded)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_memory_that_is_not_aligned_gives_the_same_digest(dtype):
    tensor = (values(9000) * 20).abs().to(dtype)
    for offset in (1, 2, 3, 5):
        view = tensor[offset : offset + 5001]
        assert digest(view) == digest(view.clone())


def test_strides_do_not_matter():
    tensor = values(60 * 70).view(60, 70)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(tensor[:, 3:9]) == digest(tensor[:, 3:9].clone())
    assert digest(tensor.t()) != digest(tensor)


def test_scalars_and_parameters_have_digests():
    assert digest(torch.tensor(1.5)) == digest(torch.tensor([1.5]))
    parameter = torch.nn.Parameter(values(10))
    assert digest(parameter) == digest(parameter.detach())


@pytest.mark.parametrize("words", [1, 3, 64, 1023, 1024, 1025, 2048, 3000, 5120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tiles_have_the_digests_of_their_rows(words, dtype):
    size = words * 8 // dtype.itemsize
    raw = torch.randint(-(2**62), 2**62, (7 * words,), generator=torch.Generator().manual_seed(words))
    tiles = raw.view(dtype).view(7, size)
    assert digest_tiles(tiles) == [digest(tile) for tile in tiles]
    assert digest_tiles(tiles[2:2]) == []
    assert digest_tiles(tiles[:, : size - 1]) == [digest(tile) for tile in tiles[:, : size - 1]]
