"""The kernels for digests and for moments in 16 and 8 bits, interpreted on the CPU and compared with plain torch."""

from __future__ import annotations

import json

import torch

from shardproof.digest import _column_weights, digest
from shardproof.digest_kernels import digest_words
from shardproof.train.adamw_8bit import difference
from shardproof.train.moment_8bit_kernels import step_on_gpu as step_8bit_on_gpu
from shardproof.train.moment_kernels import step_on_gpu
from shardproof.train.rounded_adamw import _difference


def main() -> None:
    words = [
        torch.randint(-(2**63), 2**63 - 1, (size,), generator=torch.Generator().manual_seed(size))
        for size in (1, 701, 1024, 3 * 1024 + 17, 9000)
    ]
    print(
        json.dumps(
            {
                "digests": digest_words(words, _column_weights("cpu")).tolist(),
                "plain": [digest(each) for each in words],
                "moments": [
                    _difference(step_on_gpu, dtype, torch.device("cpu"))
                    for dtype in (torch.float32, torch.float16)
                ],
                "moments in 8 bits": [
                    difference(step_8bit_on_gpu, dtype, torch.device("cpu"))
                    for dtype in (torch.float32, torch.float16)
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
