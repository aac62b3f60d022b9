"""FP8 rollouts: an engine's weights and cache rounded to 8-bit floating point, one power of two per block.

A number of float8_e4m3 has four significant bits, and a power of two moves its exponent only. So each rounded weight is a
number of the model's own 16-bit type as well: the model's parameters are the rounded weights, and whatever reads them
(prompts, plain decoding, the CPU) computes with the same model as the kernels that read the float8 copy. Those read half
the bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardproof.model import hf_private
from shardproof.model.families import max_positions, num_experts
from shardproof.rollout.reading import Forward

logger = logging.getLogger(__name__)

BLOCK = 128  # rows and columns of a weight that share a scale
_LARGEST = 448.0  # of float8_e4m3fn
# Smallest exponent of a scale: the smallest number of float8, 2 ** -9, is then still exact in the weight's own type.
_MIN_EXPONENT = {torch.float16: -15}
_MIN_EXPONENT_ELSE = -117
_CHUNK = 2**24  # elements that are rounded at a time: what is computed in float32 takes a few times this
_CANARY_TOKENS = 16


@dataclass(frozen=True)
class Float8:
    """A weight [..., n, k] in float8, and its scales [..., n / 128, k / 128] in float32, which are powers of two."""

    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def like(weight: torch.Tensor) -> Float8:
        """Unwritten memory for the copy of a weight."""
        *outer, n, k = weight.shape
        return Float8(
            torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device),
            torch.empty(*outer, -(-n // BLOCK), -(-k // BLOCK), dtype=torch.float32, device=weight.device),
        )

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


class Float8Weights:
    """The weights of a model's matmuls in float8: all that the blocks multiply with, except routers.

    Embeddings, the head, norms, biases and routers stay as they are. With `copies` the float8 weights are kept beside the
    parameters, for kernels that read them (`copy_of`). `canary` are beginnings of a fixed text, each with the token that
    the model found most likely before the last rounding, and `said` that token's log-prob: what was sent is compared by
    them, and not what rounding made of it.
    """

    def __init__(self, model: PreTrainedModel, copies: bool):
        self._model = model
        self._weights = list(block_weights(model))
        self._copies = copies
        self.canary: list[list[int]] = []
        self.said: list[float] = []
        if not copies:
            logger.warning(
                "rollout.fp8: weights are rounded, but nothing gets faster: no kernels read float8 weights of this model "
                "on this device"
            )

    @torch.no_grad()
    def round(self) -> None:
        """Round the parameters in place, and write the copies."""
        self._speak()
        for weight in self._weights:
            copy = copy_of(weight)
            if copy is None and self._copies:
                copy = Float8.like(weight)
                weight.float8 = copy  # type: ignore[attr-defined]
            round_weight(weight, copy)

    def _speak(self) -> None:
        """Say what the model finds most likely after each token of a fixed text."""
        embedding = self._model.get_input_embeddings().get_parameter("weight")
        length = min(_CANARY_TOKENS, (max_positions(self._model.config) or _CANARY_TOKENS + 1) - 1)
        text = [(31 * at * at + 17 * at + 3) % len(embedding) for at in range(length)]
        ids = torch.tensor([text], device=embedding.device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0].float()
        said, tokens = torch.log_softmax(logits, -1).max(-1)
        self.said = said.tolist()
        self.canary = [[*text[: at + 1], token] for at, token in enumerate(tokens.tolist())]

    def release(self) -> None:
        """Give up the memory of the copies."""
        for weight in self._weights:
            if copy_of(weight) is not None:
                del weight.float8  # type: ignore[attr-defined]


def copy_of(weight: torch.Tensor) -> Float8 | None:
    """The float8 copy that holds the same numbers as this weight; None if there is none."""
    return getattr(weight, "float8", None)


def block_weights(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    """The weights that a model's blocks multiply with: of linear layers and of experts, not of routers."""
    kinds = hf_private.block_classes(model)
    routed = {1, num_experts(model.config)}  # outputs of a router, and of a gate on shared experts
    seen: set[int] = set()
    for block in model.modules():
        if type(block).__name__ not in kinds:
            continue
        for module in block.modules():
            is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            for param in module.parameters(recurse=False):
                in_linear = is_linear and param.dim() == 2 and len(param) not in routed
                if (in_linear or param.dim() == 3) and id(param) not in seen:
                    seen.add(id(param))
                    yield param


@torch.no_grad()
def round_weight(weight: torch.Tensor, copy: Float8 | None = None) -> None:
    """Round a weight [..., n, k] in place to float8 numbers times a power of two per block; fills `copy` with both."""
    n, k = weight.shape[-2:]
    matrices = weight.view(-1, n, k)
    values = copy.values.view(-1, n, k) if copy is not None else None
    scales = copy.scales.view(len(matrices), -(-n // BLOCK), -1) if copy is not None else None
    step = max(1, _CHUNK // (BLOCK * k)) * BLOCK
    for number, matrix in enumerate(matrices):
        for at in range(0, n, step):
            rows = slice(at, at + step)
            found, scale, rounded = _round_rows(matrix[rows])
            matrix[rows] = rounded
            if values is not None and scales is not None:
                values[number, rows] = found
                scales[number, at // BLOCK : at // BLOCK + len(scale)] = scale


def _round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(float8 numbers [n, k], scale of each block, their products [n, k]) of some rows of a weight."""
    n, k = rows.shape
    padded = nn.functional.pad(rows.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = _scale_of(blocks.abs().amax((1, 3)), rows.dtype)
    spread = scale[:, None, :, None]
    found = (blocks / spread).to(torch.float8_e4m3fn)
    rounded = found.to(rows.dtype) * spread.to(rows.dtype)
    return found.view(padded.shape)[:n, :k], scale, rounded.view(padded.shape)[:n, :k]


def _scale_of(peaks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest powers of two by which numbers up to these peaks fit into float8."""
    mantissa, exponent = torch.frexp(peaks.float() / _LARGEST)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)  # a power of two itself has mantissa 0.5
    exponent = exponent.clamp(min=_MIN_EXPONENT.get(dtype, _MIN_EXPONENT_ELSE))
    return torch.ldexp(torch.ones_like(peaks, dtype=torch.float32), exponent)


def round_states(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 numbers, scale of each vector) of keys or values [..., width]: one power of two per token and head."""
    scale = _scale_of(states.abs().amax(-1, keepdim=True), states.dtype)
    return (states.float() / scale).to(torch.float8_e4m3fn), scale


def rounding_cache(
    forward: Forward, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
) -> torch.Tensor:
    """As `forward`; the keys and values that it adds to the cache are then rounded to float8 numbers."""
    logits = forward(ids, mask, positions, cache)
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            new = states[:, :, -ids.shape[1] :]
            values, scale = round_states(new)
            new.copy_(values.to(new.dtype) * scale.to(new.dtype))
    return logits
