"""The kernel for weights in 4 bits, interpreted on the CPU and compared with plain torch."""

from __future__ import annotations

import json

import torch

from shardproof.model.nf4 import difference
from shardproof.model.nf4_kernels import dequantise_on_gpu


def main() -> None:
    found = difference(dequantise_on_gpu, torch.device("cpu"), (torch.float32, torch.float16))
    print(json.dumps({"difference": found}))


if __name__ == "__main__":
    main()
