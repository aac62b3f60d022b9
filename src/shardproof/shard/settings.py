"""The settings of a load: what the user asks for, checked, and what sharding derives from it."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardproof.bounds import require_number
from shardproof.dist.launch import resolve_device
from shardproof.dist.mesh import check_mesh, make_mesh
from shardproof.errors import choose, fail
from shardproof.model.compiling import can_compile
from shardproof.model.nf4 import NF4
from shardproof.model.roles import REWARD, ROLES
from shardproof.model.skeleton import AUTO

FSDP1, FSDP2 = "fsdp1", "fsdp2"
STRATEGIES = (FSDP2, FSDP1)


@dataclass(frozen=True)
class LoadSettings:
    """The arguments of `load` that must be the same on every rank; a loaded model keeps them."""

    role: str
    strategy: str
    mesh: Any  # the DeviceMesh; None until `with_mesh`, where the user passed none
    device: torch.device
    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    cpu_offload: bool
    lora: Any
    lora_base: str | None  # what the frozen base's linear weights are held in; None: param_dtype
    sequence_parallel: int
    checkpoint_activations: bool | int | str  # True: every block; k: every k-th; "auto": what does not fit
    reshard_after_forward: bool | None  # None: unless "auto" above finds memory to spare
    revision: str | None
    trust_remote_code: bool
    attn_implementation: str | None
    experts_implementation: str | None
    compile: bool | None  # None: where it is worth having
    new_head: bool = False  # draw a reward model's head where the checkpoint has none

    @property
    def storage_device(self) -> torch.device:
        """Where shards lie between uses."""
        return torch.device("cpu") if self.cpu_offload else self.device

    @property
    def pin_memory(self) -> bool:
        return self.cpu_offload and self.device.type == "cuda"

    @property
    def shard_size(self) -> int:
        return int(self.mesh.size(self.mesh.ndim - 1))

    @property
    def recomputes_as_needed(self) -> bool:
        """Whether training decides which blocks are recomputed."""
        return self.checkpoint_activations == AUTO

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled. Under FSDP1 their parameters are views that torch.compile cannot trace."""
        if self.compile is None:
            return self.strategy == FSDP2 and can_compile(self.device, self.compute_dtype)
        return self.compile

    def check(self) -> None:
        """Raise a ConfigError that names the setting that cannot be."""
        if not isinstance(self.device, torch.device):
            raise fail(
                "C001",
                "settings",
                f"device={self.device!r} is not a torch device.",
                fix="pass 'cpu', 'cuda' or 'cuda:N'",
            )
        choose("settings", "role", self.role, ROLES)
        choose("settings", "strategy", self.strategy, STRATEGIES)
        if self.new_head and self.role != REWARD:
            message = f"new_head=True is for role='reward'; a {self.role} has another head."
            raise fail("C001", "settings", message, fix="leave new_head out")
        if not isinstance(self.checkpoint_activations, int) and self.checkpoint_activations != AUTO:
            message = f"checkpoint_activations={self.checkpoint_activations!r} is not True, False, a number or {AUTO!r}."
            raise fail("C001", "settings", message)
        if self.checkpoint_activations != AUTO:
            require_number("settings", "checkpoint_activations", int(self.checkpoint_activations), at_least=0)
        require_number("settings", "sequence_parallel", self.sequence_parallel, at_most=2**20)
        for name in ("param_dtype", "compute_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise fail("C001", "settings", f"{name}={dtype!r} is not a floating torch.dtype.")
        self._check_base()
        if self.strategy == FSDP1 and self.cpu_offload and self.device.type == "cpu":
            message = "strategy='fsdp1' with cpu_offload=True needs an accelerator: torch's CPUOffload pins host memory."
            raise fail(
                "C001", "settings", message, fix="use strategy='fsdp2', or cpu_offload=False on a CPU machine"
            )
        if self.strategy == FSDP1 and self.compile:
            message = "strategy='fsdp1' with compile=True: torch.compile cannot trace FSDP1's parameters."
            raise fail("C001", "settings", message, fix="use strategy='fsdp2', or leave compile out")
        if self.strategy == FSDP1 and self.reshard_after_forward is False:
            message = (
                "strategy='fsdp1' with reshard_after_forward=False: without a backward pass FSDP1 would keep using "
                "parameters gathered before an update."
            )
            raise fail("C001", "settings", message, fix="use strategy='fsdp2', or leave it out")

    def _check_base(self) -> None:
        if self.lora_base is None:
            return
        choose("settings", "lora_base", self.lora_base, (NF4,))
        if self.lora is None:
            message = f"lora_base={self.lora_base!r} without lora: weights in 4 bits are not trained."
            raise fail("C001", "settings", message, fix="pass lora=LoraConfig(...), or leave lora_base out")
        if self.strategy == FSDP1:
            message = f"strategy='fsdp1' with lora_base={self.lora_base!r}: FSDP1 joins tensors of one dtype and cuts rows."
            raise fail("C001", "settings", message, fix="use strategy='fsdp2'")

    def described(self) -> dict[str, str]:
        """The settings as text, without this rank's own device number."""
        values = {name: _text(value) for name, value in vars(self).items()}
        return {**values, "device": self.device.type, "mesh": _describe_mesh(self.mesh)}

    def with_mesh(self) -> LoadSettings:
        """The checked settings with the mesh of a load. Collective: every rank, when `mesh` is None."""
        mesh = check_mesh(self.mesh) if self.mesh is not None else make_mesh(device_type=self.device.type)
        if mesh.device_type != self.device.type:
            raise fail(
                "C002", "settings", f"the mesh is on {mesh.device_type} devices, but device={self.device}."
            )
        return replace(self, mesh=mesh)


def parse_device(device: Any) -> Any:
    """The torch device that is asked for; an invalid value is returned unchanged, for `check` to refuse on all ranks."""
    try:
        return resolve_device(device)
    except (RuntimeError, TypeError):
        return device


def _describe_mesh(mesh: DeviceMesh | None) -> str:
    return "None" if mesh is None else f"{tuple(mesh.shape)} {mesh.mesh_dim_names}"


def _text(value: Any) -> str:
    """A value as text that is the same in every process: sets print in an order of their own."""
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{name}={_text(item)}" for name, item in sorted(vars(value).items()))
        return f"{type(value).__name__}({inner})"
    return str(value)
