"""The sections about models: the policy, its adapters, and the roles beside it."""

from __future__ import annotations

from typing import Annotated, Literal

from shardproof.config.numbers import Bound, Count, CountOrNone, LearningRate, Processes
from shardproof.config.section import DtypeName, Section, StrategyName


class Lora(Section):
    """Low-rank adapters (LoRA): the base model is frozen, and small matrices beside it are trained."""

    r: Annotated[int, Bound(gt=0, le=2**16)] = 16
    """Rank of the adapters. Higher ranks can learn more and need more memory."""
    alpha: Count = 32
    """Scale of the adapters: their output is multiplied by alpha / r."""
    target_modules: list[str] | str = "all-linear"
    """Which layers get adapters: a list of module names such as `["q_proj", "v_proj"]`, a regular expression,
    or `"all-linear"` for every linear layer except the head."""
    base: Literal["nf4"] | None = None
    """`"nf4"` holds the linear weights of the frozen blocks in 4 bits (QLoRA): 0.56 bytes per parameter instead
    of 2 or 4. For FSDP2 and models without experts. By default they are held in `model.param_dtype`."""


class Model(Section):
    """The model that is trained (the policy), and how it is sharded."""

    path: str
    """Folder or hub id of the model, in the format that `from_pretrained` reads."""
    random_init: bool = False
    """Draw the weights from `train.seed` instead of reading them. The folder then needs only `config.json`
    and a tokenizer."""
    strategy: StrategyName = "fsdp2"
    """Which version of PyTorch FSDP shards the model. Keep FSDP2 unless you need to match an FSDP1 setup."""
    replicate: Count = 1
    """Number of copies of the sharded model (hybrid sharding, HSDP). The ranks must be a multiple of it;
    raise it to shard inside each node and replicate across nodes."""
    param_dtype: DtypeName = "float32"
    """Dtype in which each rank stores its shard of the parameters. float32 keeps full-precision master
    weights for the optimizer."""
    compute_dtype: DtypeName = "bfloat16"
    """Dtype of the forward and backward pass. Gradients are reduced in float32."""
    cpu_offload: bool = False
    """Keep the shards and the optimizer state in host memory. Saves GPU memory, slows down every step."""
    sequence_parallel: Processes = 1
    """Split each sequence over this many ranks (Ulysses). Raise it when one long sequence does not fit on a
    GPU; it must divide the ranks of a shard group and the attention heads."""
    checkpoint_activations: bool | CountOrNone | Literal["auto"] = False
    """Recompute activations in the backward pass to save memory: `true` for every block, `k` for every k-th
    block, `"auto"` for as few blocks as the free memory requires."""
    reshard_after_forward: bool | None = None
    """`false` gathers the parameters once per step instead of twice per micro-batch, which is faster and needs
    more memory. By default this happens only if `checkpoint_activations = "auto"` finds enough free memory;
    `true` rules it out."""
    compile: bool | None = None
    """Run the transformer blocks through fused kernels: our own for plain blocks on CUDA, `torch.compile` for
    others. By default on for CUDA with 16-bit compute and FSDP2, if Triton and a C compiler are installed."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights. Without this section every weight is trained."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository. Enable it only for repositories that you trust."""


class Role(Section):
    """Another model beside the policy. Keys that you leave out take the policy's value."""

    path: str | None = None
    """Folder or hub id of this model's weights. By default the policy's starting weights."""
    strategy: StrategyName | None = None
    """Which version of PyTorch FSDP shards this model. By default `model.strategy`."""
    cpu_offload: bool | None = None
    """Keep this model's shards in host memory. By default `model.cpu_offload`."""
    lr: LearningRate | None = None
    """Learning rate of the critic; the reference is never trained. By default `optimizer.lr`."""


class Critic(Role):
    """The critic of `ppo`."""

    lora: Lora | None = None
    """Train low-rank adapters and the value head instead of all weights. By default every weight of the critic is
    trained, also where the policy has adapters."""
