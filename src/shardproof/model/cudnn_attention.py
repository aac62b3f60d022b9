"""Packed causal attention through cuDNN, on GPUs from Hopper on where `nvidia-cudnn-frontend` is installed.

cuDNN builds a plan for given sizes. So that batches of other lengths need no plan of their own, the number of sequences,
the longest length and the number of tokens are rounded up to powers of two; sequences without tokens fill up the first.
A plan is compared with flash attention on random states before it is used for a model. Where it differs, or cuDNN
fails, flash attention computes the same, and a warning says so.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import cache
from typing import Any, NamedTuple

import torch

from shardproof.bounds import within
from shardproof.model import flash_private

logger = logging.getLogger(__name__)

_MIN_BACKEND = 90600  # from this version on, sequences may be empty
_MAX_WIDTH = 128  # of a head, in the backward pass
_MIN_TOKENS = 1024  # for which a plan is built
_MAX_ELEMENTS = 2**31 - 1  # that offsets of 32 bits reach
_SEQUENCE_STRIDE = (
    2**31 - 2**6
)  # offsets say where sequences begin; cuDNN wants a stride that is a multiple of 16 bytes
_MAX_ERROR = 0.02  # on average, in shares of the average: rounding to 16 bits gives about 0.005
_Q, _K, _V, _O, _STATS, _GRAD_O, _GRAD_Q, _GRAD_K, _GRAD_V, _AT_Q, _AT_K, _AT_STATS, _LENGTHS = range(1, 14)


@cache
def can_use(device: torch.device) -> bool:
    """Whether cuDNN's attention pays on this device and its Python frontend is there."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        import cudnn

        return cudnn.backend_version() >= _MIN_BACKEND
    except ImportError:
        hint = "attention of updates would be about 1.6 times as fast with cuDNN: pip install 'shardproof[cudnn]'"
        is_first = os.environ.get("RANK", "0") == "0"  # one rank says it for all
        logger.log(logging.INFO if is_first else logging.DEBUG, hint)
    except (OSError, RuntimeError) as error:
        logger.warning("cuDNN's frontend is installed but cannot be used: %s", error)
    return False


def fits(query: torch.Tensor, value: torch.Tensor, window: int | None) -> bool:
    """Whether these states are of a form that plans are built for."""
    width = query.shape[-1]
    return window is None and width == value.shape[-1] and width <= _MAX_WIDTH and width % 8 == 0


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention inside each sequence: [tokens, heads, width] to the same.

    `borders` are those of a power of two of sequences, of which the last may be empty; `longest` is a power of two too.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.shardproof.cudnn_attention(query, key, value, borders, longest, scale)[0]


class _Bucket(NamedTuple):
    """What a plan is built for."""

    sequences: int
    longest: int
    tokens: int
    heads: int
    key_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device
    scale: float

    @staticmethod
    def of(
        query: torch.Tensor, key: torch.Tensor, borders: torch.Tensor, longest: int, scale: float
    ) -> _Bucket:
        tokens = max(_MIN_TOKENS, 1 << (len(query) - 1).bit_length())
        sizes = (len(borders) - 1, longest, tokens, query.shape[1], key.shape[1], query.shape[2])
        return _Bucket(*sizes, query.dtype, query.device, scale)


class _Plan:
    """cuDNN's forward and backward pass for one bucket."""

    def __init__(self, bucket: _Bucket):
        self.bucket = bucket
        self.forward, self.backward = self._build_forward(), self._build_backward()

    def _begin(self) -> tuple[Any, dict[int, Any]]:
        """(a graph, its tensors that say where each sequence is)."""
        import cudnn

        dtype = cudnn.data_type.BFLOAT16 if self.bucket.dtype == torch.bfloat16 else cudnn.data_type.HALF
        kinds = {"intermediate_data_type": cudnn.data_type.FLOAT, "compute_data_type": cudnn.data_type.FLOAT}
        graph = cudnn.pygraph(io_data_type=dtype, handle=_handle(self.bucket.device), **kinds)
        number = self.bucket.sequences
        sizes = {_AT_Q: number + 1, _AT_K: number + 1, _AT_STATS: number + 1, _LENGTHS: number}
        return graph, {
            uid: graph.tensor(
                dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32, uid=uid
            )
            for uid, size in sizes.items()
        }

    def _describe(self, tensor: Any, uid: int, at: dict[int, Any]) -> Any:
        """Tell cuDNN where a tensor of the graph lies: token after token, sequences at their offsets."""
        bucket = self.bucket
        is_key = uid in (_K, _V, _GRAD_K, _GRAD_V)
        heads = bucket.key_heads if is_key else bucket.heads
        width = 1 if uid == _STATS else bucket.width
        tensor.set_uid(uid).set_dim([bucket.sequences, heads, bucket.longest, width])
        tensor.set_stride([_SEQUENCE_STRIDE, width, heads * width, 1])
        tensor.set_ragged_offset(at[_AT_STATS if uid == _STATS else _AT_K if is_key else _AT_Q])
        return tensor

    def _input(self, graph: Any, uid: int, at: dict[int, Any]) -> Any:
        import cudnn

        kind = cudnn.data_type.FLOAT if uid == _STATS else cudnn.data_type.NOT_SET
        return self._describe(graph.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind), uid, at)

    def _options(self, at: dict[int, Any]) -> dict[str, Any]:
        import cudnn

        return {
            "attn_scale": self.bucket.scale,
            "use_padding_mask": True,
            "seq_len_q": at[_LENGTHS],
            "seq_len_kv": at[_LENGTHS],
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }

    def _build_forward(self) -> Any:
        import cudnn

        graph, at = self._begin()
        states = [self._input(graph, uid, at) for uid in (_Q, _K, _V)]
        out, stats = graph.sdpa(*states, generate_stats=True, **self._options(at))
        self._describe(out.set_output(True), _O, at)
        self._describe(stats.set_output(True).set_data_type(cudnn.data_type.FLOAT), _STATS, at)
        graph.build([cudnn.heur_mode.A])
        return graph

    def _build_backward(self) -> Any:
        import cudnn

        graph, at = self._begin()
        states = [self._input(graph, uid, at) for uid in (_Q, _K, _V, _O, _GRAD_O, _STATS)]
        most = {"max_total_seq_len_q": self.bucket.tokens, "max_total_seq_len_kv": self.bucket.tokens}
        grads = graph.sdpa_backward(*states, **most, **self._options(at))
        for grad, uid in zip(grads, (_GRAD_Q, _GRAD_K, _GRAD_V), strict=True):
            self._describe(grad.set_output(True), uid, at)
        graph.build([cudnn.heur_mode.A])
        return graph

    def run(self, graph: Any, tensors: dict[int, torch.Tensor], borders: torch.Tensor) -> None:
        import cudnn

        bucket = self.bucket
        places = {
            _AT_Q: borders * (bucket.heads * bucket.width),
            _AT_K: borders * (bucket.key_heads * bucket.width),
            _AT_STATS: borders * bucket.heads,
            _LENGTHS: borders.diff(),
        }
        handle = _handle(bucket.device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(bucket.device).cuda_stream)
        room = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=bucket.device)
        graph.execute({**tensors, **places}, room, handle=handle)


# Of each bucket the plan; None where there is none that can be used. The forward pass runs in the caller's thread and
# the backward pass in one of autograd's, never at the same time; the lock makes sure.
_plans: dict[_Bucket, _Plan | None] = {}
_lock = threading.RLock()


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


def _plan(bucket: _Bucket) -> _Plan | None:
    """The bucket's plan, built and compared the first time; None: flash attention takes its place."""
    if bucket not in _plans:
        _plans[bucket] = None
        problem = None
        elements = bucket.tokens * bucket.heads * bucket.width
        if elements > _MAX_ELEMENTS:
            problem = f"{elements} elements are more than its offsets reach"
        else:
            try:
                plan = _Plan(bucket)
                problem = _difference(plan)
                _plans[bucket] = plan if problem is None else None
            except Exception as error:  # whatever cuDNN raises, there is another way
                problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            logger.warning("attention runs through flash attention instead of cuDNN: %s", problem)
    return _plans[bucket]


def _difference(plan: _Plan) -> str | None:
    """In what a plan differs from flash attention on random states, if it does."""
    bucket = plan.bucket
    lengths = [min(length, bucket.longest) for length in (77, 300, 1, 130)][: bucket.sequences]
    lengths += [0] * (bucket.sequences - len(lengths))
    borders = torch.tensor([0, *lengths], device=bucket.device).cumsum(0).to(torch.int32)
    draw = torch.Generator(bucket.device).manual_seed(0)
    query, key, value, grad = (
        torch.randn(
            sum(lengths), heads, bucket.width, generator=draw, device=bucket.device, dtype=bucket.dtype
        )
        for heads in (bucket.heads, bucket.key_heads, bucket.key_heads, bucket.heads)
    )
    out, stats = _forward(plan, query, key, value, borders)
    found = (out, *_backward(plan, grad, query, key, value, out, stats, borders))
    out, stats = flash_private.forward(query, key, value, borders, bucket.longest, bucket.scale)
    wanted = (
        out,
        *flash_private.backward(grad, query, key, value, out, stats, borders, bucket.longest, bucket.scale),
    )
    for name, one, other in zip(("output", "query", "key", "value"), found, wanted, strict=True):
        error = float((one.float() - other.float()).abs().mean() / other.float().abs().mean())
        if not within(error, _MAX_ERROR):
            what = name if name == "output" else f"gradient of the {name}"
            return f"its {what} differs by {error:.3g} on average"
    return None


def _forward(
    plan: _Plan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, stats = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    plan.run(plan.forward, {_Q: query, _K: key, _V: value, _O: out, _STATS: stats}, borders)
    return out, stats


def _backward(
    plan: _Plan,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    borders: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    tensors = {_Q: query, _K: key, _V: value, _O: out, _STATS: stats, _GRAD_O: grad}
    tensors |= dict(zip((_GRAD_Q, _GRAD_K, _GRAD_V), grads, strict=True))
    plan.run(plan.backward, tensors, borders)
    return grads


@torch.library.custom_op("shardproof::cudnn_attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    bucket = _Bucket.of(query, key, borders, longest, scale)
    with _lock:
        plan = _plan(bucket)
        if plan is None:
            return flash_private.forward(query, key, value, borders, bucket.longest, bucket.scale)
        return _forward(plan, query, key, value, borders)


@torch.library.custom_op("shardproof::cudnn_attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, query, key, value = (each.contiguous() for each in (grad, query, key, value))
    bucket = _Bucket.of(query, key, borders, longest, scale)
    with _lock:
        plan = _plan(bucket)
        if plan is None:
            return flash_private.backward(
                grad, query, key, value, out, stats, borders, bucket.longest, bucket.scale
            )
        return _backward(plan, grad, query, key, value, out, stats, borders)


@_attention.register_fake
def _(query: Any, key: Any, value: Any, borders: Any, longest: Any, scale: Any) -> Any:
    return _like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@_attention_backward.register_fake
def _(grad: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
    return _like(query), _like(key), _like(value)


def _like(states: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(states, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, borders, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, borders)


def _differentiate(ctx: Any, grad: torch.Tensor, grad_stats: torch.Tensor) -> Any:
    grads = torch.ops.shardproof.cudnn_attention_backward(grad, *ctx.saved_tensors, ctx.longest, ctx.scale)
    return *grads, None, None, None


_attention.register_autograd(_differentiate, setup_context=_keep)
