"""Muon over sharded matrices: whole where they are orthogonalised, sharded everywhere else.

Newton-Schulz needs whole matrices. Each matrix has one owner among the ranks of a shard group: the others send it their
slices, it orthogonalises, and sends the slices back. That moves 4 bytes per element of a rank's shard, in bfloat16, which
is what torch's Newton-Schulz rounds to in any case. Gathering every matrix on every rank would move (ranks / 2) times as
much, and every rank would compute what one can. Momentum is elementwise and stays sharded as the parameter is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardproof.dist.collectives import all_gather_flat
from shardproof.dist.traffic import traffic
from shardproof.shard.optimizer_state import StateSpec, adam_state
from shardproof.shard.torch_private import local_tensor
from shardproof.train.torch_muon import adjusted_lr, orthogonalise

# Elements that an owner receives at a time, unless one matrix has more.
_ROUND_ELEMENTS = 2**26

WIRE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Sharded:
    """A parameter that is a matrix, or a stack of them, and the flat range of it that this rank holds."""

    param: torch.nn.Parameter
    shape: tuple[int, ...]  # of the whole
    start: int


class Matrix(NamedTuple):
    """One matrix: `numel` elements from `start` on of a parameter's flat order."""

    param: int  # its index
    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


class Slice(NamedTuple):
    """The elements of a matrix that one rank holds, in the parameter's flat order."""

    matrix: Matrix
    start: int
    stop: int


class Muon(torch.optim.AdamW):
    """Muon for matrices, AdamW for what the other groups hold. Its steps are collective: every rank of `group`.

    `groups` are those of AdamW. `device` is where matrices are orthogonalised.
    """

    def __init__(
        self,
        matrices: Sequence[Sharded],
        groups: Sequence[dict[str, Any]],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
    ):
        settings = {
            "params": [item.param for item in matrices],
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
        }
        super().__init__([settings, *groups], lr=lr, betas=betas, eps=eps, fused=True)
        self._matrices, self._group, self._device = list(matrices), group, device
        self._plan: _Plan | None = None

    def declare_state(self, group: Mapping[str, Any], param: torch.Tensor) -> StateSpec:
        """One momentum per element of a matrix; what AdamW keeps for the others."""
        return {"momentum_buffer": param.dtype} if "momentum" in group else adam_state(group, param)

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: Any,
        grads: Any,
        exp_avgs: Any,
        exp_avg_sqs: Any,
        max_exp_avg_sqs: Any,
        state_steps: Any,
    ) -> Any:
        """Make the missing state of a group; AdamW's lists get nothing of the matrices."""
        if "momentum" not in group:
            return super()._init_group(
                group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
            )
        for param in group["params"]:
            if param.grad is not None and "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        return False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Collective: every rank of the shard group."""
        loss = super().step(closure)
        with torch.no_grad():
            self._step_matrices(self.param_groups[0])
        return loss

    def _step_matrices(self, settings: dict[str, Any]) -> None:
        assert self._group is not None, "made for an estimate of memory"
        if self._plan is None:
            self._plan = _Plan(self._matrices, self._group, self._device)
        parts = [_Part.of(param, self.state.get(param, {}), settings) for param in settings["params"]]
        for part in parts:
            part.begin()
        for index in range(self._plan.num_rounds):
            self._plan.run(index, parts, settings["ns_steps"])


@dataclass(frozen=True)
class _Part:
    """This rank's elements of a parameter in a step."""

    flat: torch.Tensor
    grad: torch.Tensor | None  # None: the parameter was not used, and does not change
    momentum: torch.Tensor | None
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, param: torch.nn.Parameter, state: Mapping[str, Any], settings: Mapping[str, Any]) -> _Part:
        flat = local_tensor(param).view(-1)
        if param.grad is None:
            return cls(flat, None, None, settings)
        grad, momentum = local_tensor(param.grad), local_tensor(state["momentum_buffer"])
        return cls(flat, grad.reshape(-1), momentum.view(-1), settings)

    def begin(self) -> None:
        """Take the gradient into the momentum, and decay the weights."""
        if self.grad is not None and self.momentum is not None:
            self.momentum.lerp_(self.grad, 1 - self.settings["momentum"])
            self.flat.mul_(1 - self.settings["lr"] * self.settings["weight_decay"])

    def update(self, low: int, high: int) -> torch.Tensor:
        """Elements of the update before it is orthogonalised."""
        if self.grad is None or self.momentum is None:
            return self.flat.new_zeros(high - low)
        momentum = self.momentum[low:high]
        return (
            self.grad[low:high].lerp(momentum, self.settings["momentum"])
            if self.settings["nesterov"]
            else momentum
        )

    def apply(self, low: int, high: int, update: torch.Tensor, shape: tuple[int, int]) -> None:
        """Take a step along elements of the orthogonalised update of a matrix of this shape."""
        if self.grad is not None:
            rate = adjusted_lr(self.settings["lr"], self.settings["adjust_lr"], shape)
            self.flat[low:high].add_(update.to(self.flat.device), alpha=-rate)


class _Plan:
    """Who owns which matrix, and what ranks send each other in each round. Collective: the group."""

    def __init__(self, items: Sequence[Sharded], group: dist.ProcessGroup, device: torch.device):
        self._group, self._device = group, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._starts = [item.start for item in items]
        mine = [[item.start, item.start + local_tensor(item.param).numel()] for item in items]
        local = torch.tensor(mine, dtype=torch.int64, device=device).view(-1)
        ranges = torch.empty(self._size * local.numel(), dtype=torch.int64, device=device)
        all_gather_flat(local, ranges, group)
        # Of each rank, of each parameter: its first element and the one after its last.
        self._ranges = ranges.view(self._size, -1, 2).tolist()
        self._rounds = _share_out([item.shape for item in items], self._size)
        self.num_rounds = max(map(len, self._rounds), default=0)
        # Of each round: what this rank sends to each owner, and what it gets from each rank of the matrices it owns.
        ranks = range(self._size)
        self._exchanged = [
            (
                [self._slices(self._rank, owner, index) for owner in ranks],
                [self._slices(rank, self._rank, index) for rank in ranks],
            )
            for index in range(self.num_rounds)
        ]

    def _slices(self, rank: int, owner: int, index: int) -> list[Slice]:
        """What a rank holds of the matrices that are the owner's in a round."""
        found = []
        for matrix in self._rounds[owner][index] if index < len(self._rounds[owner]) else ():
            start, stop = self._ranges[rank][matrix.param]
            low, high = max(start, matrix.start), min(stop, matrix.start + matrix.numel)
            if low < high:
                found.append(Slice(matrix, low, high))
        return found

    def run(self, index: int, parts: Sequence[_Part], ns_steps: int) -> None:
        """Update the matrices of one round. Collective: the group."""
        sent, held = self._exchanged[index]
        outgoing = torch.empty(_count(sent), dtype=WIRE_DTYPE, device=self._device)
        for piece, (matrix, start, stop) in _pieces(outgoing, sent):
            first = self._starts[matrix.param]
            piece.copy_(parts[matrix.param].update(start - first, stop - first))
        incoming = self._swap(outgoing, sent, held)
        self._orthogonalise(incoming, held, ns_steps)
        outgoing = self._swap(incoming, held, sent)
        for piece, (matrix, start, stop) in _pieces(outgoing, sent):
            first = self._starts[matrix.param]
            parts[matrix.param].apply(start - first, stop - first, piece, (matrix.rows, matrix.columns))

    def _swap(self, outgoing: torch.Tensor, out: list[list[Slice]], back: list[list[Slice]]) -> torch.Tensor:
        """Send each rank its slices; returns what arrives. Collective: the group."""
        if self._size == 1:
            return outgoing
        incoming = outgoing.new_empty(_count(back))
        arriving, leaving = ([_count([slices]) for slices in rows] for rows in (back, out))
        dist.all_to_all_single(incoming, outgoing, arriving, leaving, group=self._group)
        traffic.count_data("optimizer", outgoing.nbytes, incoming.nbytes)
        return incoming

    def _orthogonalise(self, received: torch.Tensor, held: list[list[Slice]], ns_steps: int) -> None:
        """Replace the slices of this rank's matrices by those of their orthogonal factors."""
        by_matrix: dict[Matrix, list[tuple[torch.Tensor, Slice]]] = {}
        for piece, part in _pieces(received, held):
            by_matrix.setdefault(part.matrix, []).append((piece, part))
        for matrix, pieces in by_matrix.items():
            whole = received.new_empty(matrix.numel)
            for piece, part in pieces:
                whole[part.start - matrix.start : part.stop - matrix.start] = piece
            result = orthogonalise(whole.view(matrix.rows, matrix.columns), ns_steps).reshape(-1)
            for piece, part in pieces:
                piece.copy_(result[part.start - matrix.start : part.stop - matrix.start])


def _count(rows: Sequence[Sequence[Slice]]) -> int:
    return sum(part.stop - part.start for row in rows for part in row)


def _pieces(buffer: torch.Tensor, rows: Sequence[Sequence[Slice]]) -> list[tuple[torch.Tensor, Slice]]:
    """Each slice with its place in a buffer that holds them all end to end."""
    slices = [part for row in rows for part in row]
    return (
        list(zip(buffer.split([part.stop - part.start for part in slices]), slices, strict=True))
        if slices
        else []
    )


def _share_out(shapes: Sequence[tuple[int, ...]], num_owners: int) -> list[list[list[Matrix]]]:
    """Of each owner, of each round: its matrices. The largest go first, each to the owner that has least to do."""
    loads = [0] * num_owners
    rounds: list[list[list[Matrix]]] = [[] for _ in range(num_owners)]
    filled = [_ROUND_ELEMENTS] * num_owners
    for matrix in sorted(_matrices(shapes), key=lambda matrix: -matrix.numel):
        owner = loads.index(min(loads))
        if filled[owner] + matrix.numel > _ROUND_ELEMENTS:
            rounds[owner].append([])
            filled[owner] = 0
        rounds[owner][-1].append(matrix)
        filled[owner] += matrix.numel
        loads[owner] += matrix.numel
    return rounds


def _matrices(shapes: Sequence[tuple[int, ...]]) -> list[Matrix]:
    """The matrices of all parameters; a stack of three dimensions holds one per entry of its first."""
    found = []
    for index, shape in enumerate(shapes):
        *stack, rows, columns = shape
        for place in range(torch.Size(stack).numel()):
            found.append(Matrix(index, place * rows * columns, rows, columns))
    return found
