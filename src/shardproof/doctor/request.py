"""What the doctor examines: a model, and the layouts to examine it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.bounds import require_number
from shardproof.errors import choose, fail

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
DEVICES = ("cpu", "cuda")
STRATEGIES = ("fsdp2", "fsdp1")
ROLES = ("policy", "reference", "critic")
_STAGE = "doctor"


@dataclass(frozen=True)
class Layout:
    """One way to shard and run a model."""

    strategy: str = "fsdp2"
    dtype: str = "bf16"  # what blocks compute in
    param_dtype: str = "fp32"  # how shards are stored
    sequence_parallel: int = 1
    cpu_offload: bool = False
    lora: int = 0  # rank of the adapters; 0: none
    packing: bool = True
    replicate: int = 1
    checkpoint_activations: bool | str = False  # "auto": what does not fit
    optimizer: str = "adamw"  # whose state is estimated

    def __str__(self) -> str:
        parts = [self.strategy, self.dtype]
        parts += [f"stored as {self.param_dtype}"] if self.param_dtype != "fp32" else []
        parts += [f"sequence parallel {self.sequence_parallel}"] if self.sequence_parallel > 1 else []
        parts += [f"{self.replicate} replicas"] if self.replicate > 1 else []
        parts += ["CPU offload"] if self.cpu_offload else []
        parts += [f"LoRA {self.lora}"] if self.lora else []
        parts += [] if self.packing else ["one by one"]
        recomputed = "activations recomputed" + (
            " as needed" if self.checkpoint_activations == "auto" else ""
        )
        parts += [recomputed] if self.checkpoint_activations else []
        parts += [self.optimizer] if self.optimizer != "adamw" else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Request:
    """A model and its layouts. It travels to the ranks as JSON."""

    source: str | None  # a folder or hub id
    config: str | None  # a config.json, or a folder with one: weights are drawn at random
    layouts: tuple[Layout, ...]
    role: str = "policy"
    ranks: int = 2
    seq_len: int = 128
    device: str = "cpu"
    trust_remote_code: bool = False
    reference: bool = True  # compare scores with a whole model in one process
    timeout_s: float = 120.0
    matrix: bool = False  # also every pair of settings; the layouts say in which dtypes

    @property
    def label(self) -> str:
        return self.source if self.source is not None else f"{self.config} (random weights)"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        layouts = tuple(Layout(**layout) for layout in data["layouts"])
        return cls(**{**data, "layouts": layouts})

    def check(self) -> None:
        """Raise a ConfigError for settings that are invalid for every model."""
        if (self.source is None) == (self.config is None):
            raise fail("C001", _STAGE, "pass a model, or --config for random weights, and not both.")
        if self.config is not None and not config_file(self.config).is_file():
            raise fail("C001", _STAGE, f"--config={self.config}: there is no such file.")
        choose(_STAGE, "--role", self.role, ROLES)
        choose(_STAGE, "--device", self.device, DEVICES)
        require_number(_STAGE, "--ranks", self.ranks, at_least=1, at_most=2**20)
        require_number(_STAGE, "--seq-len", self.seq_len, at_least=4, at_most=2**24)
        require_number(_STAGE, "--timeout", self.timeout_s, above=0, at_most=10**7)
        for layout in self.layouts:
            choose(_STAGE, "--strategy", layout.strategy, STRATEGIES)
            choose(_STAGE, "--dtypes", layout.dtype, DTYPES)
            choose(_STAGE, "--param-dtype", layout.param_dtype, DTYPES)
            require_number(_STAGE, "--lora", layout.lora, at_least=0, at_most=2**16)
            require_number(_STAGE, "--replicate", layout.replicate, at_least=1, at_most=self.ranks)
            if layout.sequence_parallel < 1 or self.ranks % layout.sequence_parallel:
                message = (
                    f"--sequence-parallel={layout.sequence_parallel} does not divide {self.ranks} ranks."
                )
                raise fail("C001", _STAGE, message)


def config_file(path: str) -> Path:
    """The config.json that a path names."""
    given = Path(path).expanduser()
    return given / "config.json" if given.is_dir() else given


def layouts_of(base: Layout, dtypes: Sequence[str]) -> tuple[Layout, ...]:
    """The layout in each dtype."""
    return tuple(replace(base, dtype=dtype) for dtype in dtypes)
