"""The experts that a vLLM server returns with its tokens, as the record of an answer."""

from __future__ import annotations

import base64
import importlib.util
import io

import numpy as np

from shardproof.errors import fail
from shardproof.rollout.expert_records import num_recorded
from shardproof.rollout.experts import Experts, ExpertShape
from shardproof.rollout.trajectory import Segment, Trajectory


def check_returns(device: str) -> None:
    """Raise if a vLLM server that a run starts on this kind of device cannot return experts."""
    if device == "cpu" and importlib.util.find_spec("triton") is None:
        message = "rollout.replay_experts: vLLM on a CPU returns experts only where Triton is installed."
        fix = 'use rollout.engine="embedded", or set rollout.replay_experts to false'
        raise fail("C001", "rollout", message, fix=fix)


class Recorded:
    """Where the record of an answer to `asked` begins, and how what servers return becomes part of it."""

    def __init__(self, asked: Trajectory, shape: ExpertShape):
        self._first, self._num_asked = num_recorded(asked), len(asked.tokens)
        self._shape = shape

    def stop(self, rows: np.ndarray | None) -> int:
        """The first token of the sequence whose experts are not known yet: a server is asked for those from it on."""
        return self._first + (0 if rows is None else len(rows))

    def read(self, text: str | None) -> np.ndarray:
        """The experts [tokens, layers with a router, chosen] in a server's answer; `ValueError` if there are others.

        A server that was interrupted before it read anything returns none, and so does one that was not asked to record.
        """
        shape = self._shape
        if text is None:
            fix = "start it with --enable-return-routed-experts, or set rollout.replay_experts to false"
            raise fail("R511", "generate", "the vLLM server returned no experts with its tokens.", fix=fix)
        # All layers of the model have a place in what it returns, those without a router too.
        rows = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
        if rows.ndim != 3 or rows.shape[1] <= max(shape.layers) or rows.shape[2] != shape.num_chosen:
            raise ValueError(f"they have the shape {rows.shape}")
        return rows[:, list(shape.layers)].astype(shape.dtype)

    def record(self, rows: np.ndarray | None) -> Experts:
        """The record of an answer."""
        if rows is None:
            rows = np.zeros((0, len(self._shape.layers), self._shape.num_chosen), self._shape.dtype)
        return Experts(self._first, rows, self._shape.layers)

    def fits(self, begun: Segment) -> bool:
        """Whether the beginning of an answer has the experts of all its tokens but the last."""
        found, stop = begun.experts, self._num_asked + len(begun.tokens) - 1
        if found is None or found.layers != self._shape.layers:
            return False
        return (found.start, found.stop) == (self._first, stop)


def put_together(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    """The rows of both; None for none."""
    rows = [each for each in (one, other) if each is not None]
    return np.concatenate(rows) if len(rows) == 2 else next(iter(rows), None)
