"""A position-sensitive 64-bit digest of a tensor's bytes, fast enough to take of everything.

Each 8-byte word is mixed with itself, multiplied by an odd weight of its column and an odd weight of its row, and
summed modulo 2^64. Any one-word change, a swap of words, complements and paired sign flips change the digest, and the
digests of 8-byte-aligned shards of a tensor add up to the digest of the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np
import torch

logger = logging.getLogger(__name__)

_COLUMNS = 1024
# 96 rows of 8 KiB stay inside a core's L2 cache together with the two scratch buffers.
_ROWS_AT_A_TIME = 96
_LOW_35_BITS = 2**35 - 1
_KEPT_ROWS = 2**20  # whose weights stay in memory, once they were needed: those of a tensor of 8 GiB


def _splitmix64(index: np.ndarray, salt: int) -> np.ndarray:
    """Odd pseudo-random int64 weights for word positions."""
    with np.errstate(over="ignore"):
        z = index.astype(np.uint64) + np.uint64(salt)
        z = (z + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z | np.uint64(1)).view(np.int64)


@lru_cache(maxsize=8)
def _column_weights(device: str) -> torch.Tensor:
    return torch.from_numpy(_splitmix64(np.arange(_COLUMNS), salt=0)).to(device)


@lru_cache(maxsize=32)
def _first_row_weights(count: int, device: str) -> torch.Tensor:
    return torch.from_numpy(_splitmix64(np.arange(count), salt=1 << 40)).to(device)


def _row_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    size = 1 << (first + count - 1).bit_length()
    if size <= _KEPT_ROWS:
        return _first_row_weights(size, str(device))[first : first + count]
    return torch.from_numpy(_splitmix64(np.arange(first, first + count), salt=1 << 40)).to(device)


def digest(tensor: torch.Tensor, first_word: int = 0) -> int:
    """The signed 64-bit digest of the tensor's contiguous bytes.

    `first_word` is the shard's offset in the whole tensor, in 8-byte words. Tail bytes are padded with zeros.
    """
    return int(_digest(tensor, first_word))


def _digest(tensor: torch.Tensor, first_word: int = 0) -> torch.Tensor:
    """The digest on the tensor's device: the host does not wait for it."""
    raw = (
        tensor.detach().reshape(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )
    aligned = raw.data_ptr() % 8 == 0 and raw.numel() >= 8
    whole = raw.numel() // 8 * 8 if aligned else 0
    parts = []
    if whole:
        words = raw[:whole].view(torch.int64)
        fused = _kernel(raw.device) if first_word == 0 and raw.device.type == "cuda" else None
        if fused is not None:
            parts.append(fused([words], _column_weights(str(raw.device)))[0])
        else:
            parts += _digest_words(words, first_word)
    if whole < raw.numel():
        tail = raw.new_zeros((raw.numel() - whole + 7) // 8 * 8)
        tail[: raw.numel() - whole] = raw[whole:]
        parts += _digest_words(tail.view(torch.int64), first_word + whole // 8)
    return sum(parts[1:], parts[0]) if parts else raw.new_zeros((), dtype=torch.int64)


def _digest_words(words: torch.Tensor, first_word: int) -> list[torch.Tensor]:
    """Numbers that add up to the digest."""
    parts, position = [], 0
    column = first_word % _COLUMNS
    if column:
        head = min(_COLUMNS - column, words.numel())
        parts.append(_digest_partial_row(words[:head], first_word))
        position = head
    num_rows = (words.numel() - position) // _COLUMNS
    if num_rows:
        block = words[position : position + num_rows * _COLUMNS].view(num_rows, _COLUMNS)
        parts.append(_digest_rows(block, (first_word + position) // _COLUMNS))
        position += num_rows * _COLUMNS
    if position < words.numel():
        parts.append(_digest_partial_row(words[position:], first_word + position))
    return parts


def _mix(words: torch.Tensor) -> torch.Tensor:
    # The mask makes the arithmetic shift a logical one; without it a word and its complement collide.
    return words ^ ((words >> 29) & _LOW_35_BITS)


def _digest_partial_row(words: torch.Tensor, first_word: int) -> torch.Tensor:
    row, column = divmod(first_word, _COLUMNS)
    weights = _column_weights(str(words.device))[column : column + words.numel()]
    return (_mix(words) * weights).sum() * _row_weights(row, 1, words.device)[0]


def _digest_rows(block: torch.Tensor, first_row: int) -> torch.Tensor:
    weights = _row_weights(first_row, block.shape[0], block.device)
    return (_row_sums(block) * weights).sum()


def _row_sums(block: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each row's mixed words; a row may be shorter than a whole one."""
    columns = _column_weights(str(block.device))[: block.shape[1]]
    if block.device.type != "cpu":
        # Integer matrix products exist on the CPU only.
        step = 4096
        return torch.cat(
            [(_mix(block[i : i + step]) * columns).sum(1) for i in range(0, block.shape[0], step)]
        )
    scratch = torch.empty(min(_ROWS_AT_A_TIME, block.shape[0]), block.shape[1], dtype=torch.int64)
    row_sums = torch.empty(block.shape[0], dtype=torch.int64)
    for i in range(0, block.shape[0], _ROWS_AT_A_TIME):
        rows = block[i : i + _ROWS_AT_A_TIME]
        mixed = scratch[: rows.shape[0]]
        torch.bitwise_right_shift(rows, 29, out=mixed)
        mixed.bitwise_and_(_LOW_35_BITS).bitwise_xor_(rows)
        torch.mv(mixed, columns, out=row_sums[i : i + rows.shape[0]])
    return row_sums


def digest_tiles(tiles: torch.Tensor) -> list[int]:
    """The digest of each row of a contiguous matrix: many small tensors for the price of one large one."""
    return lazy_digest_tiles(tiles).tolist()


def lazy_digest_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """`digest_tiles` as a vector on the device of the matrix: the host does not wait for it."""
    count, nbytes = tiles.shape[0], tiles[0].numel() * tiles.element_size() if len(tiles) else 0
    words = nbytes // 8
    uneven = nbytes % 8 or words == 0 or (words > _COLUMNS and words % _COLUMNS)
    if uneven or not tiles.is_contiguous() or tiles.data_ptr() % 8 or tiles.device.type == "cuda":
        return lazy_digests(list(tiles))
    matrix = tiles.detach().reshape(-1).view(torch.int64).view(-1, min(words, _COLUMNS))
    sums = _row_sums(matrix).view(count, -1)
    return (sums * _row_weights(0, sums.shape[1], tiles.device)).sum(1)


def lazy_digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The digests of tensors of one device, as a vector there: the host does not wait for it."""
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    device = tensors[0].device
    fused = _kernel(device) if device.type == "cuda" else None
    plain = [place for place, each in enumerate(tensors) if fused is not None and _is_plain(each)]
    if fused is None or not plain:
        return torch.stack([_digest(each) for each in tensors])
    found = fused([tensors[place] for place in plain], _column_weights(str(device)))
    if len(plain) == len(tensors):
        return found
    parts = dict(zip(plain, found.unbind(), strict=True))
    return torch.stack([parts[n] if n in parts else _digest(each) for n, each in enumerate(tensors)])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a run of whole words."""
    nbytes = tensor.numel() * tensor.itemsize
    return tensor.is_contiguous() and nbytes > 0 and not nbytes % 8 and not tensor.data_ptr() % 8


@cache
def _kernel(device: torch.device) -> Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor] | None:
    """What digests many tensors in one pass on this GPU; None unless it was seen to be right there."""
    try:
        from shardproof.digest_kernels import digest_words

        columns = _column_weights(str(device))
        sizes = (1, 701, 21 * _COLUMNS + 16)
        host = [torch.from_numpy(_splitmix64(np.arange(size), salt=size)) for size in sizes]
        if digest_words([each.to(device) for each in host], columns).tolist() != list(map(digest, host)):
            raise ValueError("it computes other digests")
    except Exception as error:
        logger.warning("the kernel for digests is not used, which makes syncs slower: %s", error)
        return None
    return digest_words
