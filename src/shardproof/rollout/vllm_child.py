"""The program between a trainer and its vLLM server: it ties the server's life to the trainer's, then becomes it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """`python -m shardproof.rollout.vllm_child TRAINER_PID vllm-arguments...`"""
    trainer, *arguments = sys.argv[1:]
    # A trainer that is killed cannot stop its server; the kernel then does. The request survives the exec below.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(trainer):
        sys.exit("the trainer was gone before its vLLM server started")
    # `vllm serve` is this program too, but its command asks for metadata that the CPU package does not have.
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments])


if __name__ == "__main__":
    main()
