"""The stages of an examination. Each runs what a training run would run, and returns what the owning check found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from shardproof.dist.collectives import broadcast, exchange, share_findings, together
from shardproof.dist.mesh import make_mesh
from shardproof.doctor.reference import Reference, score_alone
from shardproof.doctor.request import DTYPES, Layout, Request
from shardproof.doctor.results import Buffer
from shardproof.errors import fail
from shardproof.export.manifest import Manifest
from shardproof.export.stream import WeightStream
from shardproof.findings import Finding
from shardproof.model.families import max_positions, num_experts
from shardproof.model.roles import CRITIC, REFERENCE
from shardproof.rollout.engine import Engine, Sampling, generate
from shardproof.rollout.engine import Request as Prompt
from shardproof.rollout.local import EmbeddedEngine, ShardedEngine
from shardproof.rollout.trajectory import Trajectory
from shardproof.shard.attest import attest
from shardproof.shard.load import load
from shardproof.shard.memory import free_memory
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import clean_name
from shardproof.train.batching import Batch
from shardproof.train.forward import Scoring, vocabulary_size
from shardproof.train.optim import make_optimizer
from shardproof.train.score import logprobs, values
from shardproof.train.scoring import scoring_of
from shardproof.train.state import training_state
from shardproof.train.trainer import train_step
from shardproof.weights.reader import open_checkpoint
from shardproof.weights.source import find_folder, read_config

_NEW_TOKENS = 8
_MAX_SEQUENCES = 8
# A single process differs from float32 by its dtype's rounding; a layout may differ by a few times that.
_NOISE_FACTOR, _FLOOR = 4.0, 1e-3


@dataclass
class Patient:
    """A model under examination on this rank; the stages fill it in."""

    request: Request
    layout: Layout
    folder: str
    policy: ShardedModel = field(init=False)
    optimizer: torch.optim.Optimizer | None = None
    sequences: list[list[int]] = field(default_factory=list)  # of every data group
    engine: Engine | None = None
    manifest: Manifest | None = None
    buffers: list[Buffer] = field(default_factory=list)

    @property
    def mine(self) -> list[int]:
        """Which of the sequences this rank takes; ranks of one sequence-parallel group take the same."""
        group = dist.get_rank() // self.layout.sequence_parallel
        return sorted({2 * group % len(self.sequences), (2 * group + 1) % len(self.sequences)})

    @property
    def longest(self) -> int:
        """How many tokens the longest sequence has: fewer than asked where the model has fewer positions."""
        return max(map(len, self.sequences), default=0)

    @property
    def my_sequences(self) -> list[list[int]]:
        return [self.sequences[index] for index in self.mine]


# What a stage says: a note for the table, and findings that are the same on every rank.
Outcome = tuple[str, Sequence[Finding]]
Probe = Callable[[Patient], Outcome]


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def probe_load(patient: Patient) -> Outcome:
    """Load the model as the layout says. Collective: every rank."""
    request, layout = patient.request, patient.layout
    lora = None
    if layout.lora:
        with together("adapters"):
            lora = adapters(layout.lora, _config_of(patient))
    patient.policy = load(
        patient.folder,
        role=request.role,
        strategy=layout.strategy,
        mesh=make_mesh(replicate=layout.replicate, device_type=request.device),
        device=request.device,
        param_dtype=getattr(torch, DTYPES[layout.param_dtype]),
        compute_dtype=getattr(torch, DTYPES[layout.dtype]),
        cpu_offload=layout.cpu_offload,
        lora=lora,
        sequence_parallel=layout.sequence_parallel,
        checkpoint_activations=layout.checkpoint_activations and request.role != REFERENCE,
        trust_remote_code=request.trust_remote_code,
        progress=False,
    )
    receipt = patient.policy.receipt
    note = f"{receipt.num_tensors} tensors, holds {size_text(receipt.shard_bytes)}, read {size_text(receipt.bytes_read)}"
    patient.sequences = _sequences(patient)
    return note, []


def _config_of(patient: Patient) -> PretrainedConfig:
    folder = find_folder(patient.folder, None)
    if folder is None:
        message = f"{patient.folder!r} is neither a folder nor a hub id that can be read."
        raise fail("L101", "adapters", message)
    return read_config(folder, patient.request.trust_remote_code)


def adapters(rank: int, config: PretrainedConfig) -> object:
    """A LoRA config for any family: every linear layer, or the attention's where experts are fused parameters."""
    from peft import LoraConfig

    targets = "all-linear" if num_experts(config) is None else r".*attn\..*proj.*"
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)


def _sequences(patient: Patient) -> list[list[int]]:
    """Two sequences of tokens for each data group, of different lengths, the same on every rank."""
    policy, length = patient.policy, patient.request.seq_len
    length = min(length, max_positions(policy.model.config) or length)
    vocabulary = vocabulary_size(policy)
    groups = dist.get_world_size() // patient.layout.sequence_parallel
    generator = torch.Generator().manual_seed(0)
    lengths = [length, length // 2 + 1] * min(groups, _MAX_SEQUENCES // 2)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def probe_attest(patient: Patient) -> Outcome:
    """Attest the model with the optimizer it will be trained with, and note its buffers. Collective: every rank."""
    if patient.request.role != REFERENCE:
        patient.optimizer = make_optimizer(patient.policy, lr=1e-4)
    patient.buffers = gather_buffers(patient.policy.model)
    findings = attest(patient.policy, patient.optimizer)
    return f"{len(patient.policy.provenance)} writers named", findings


def gather_buffers(module: torch.nn.Module) -> list[Buffer]:
    """Every rank's buffers: dtype, shape, number of NaN, first five values. Collective: every rank."""
    mine = [
        {
            "name": clean_name(name),
            "dtype": str(buffer.dtype),
            "shape": list(buffer.shape),
            "num_nan": int(buffer.isnan().sum()) if not buffer.is_meta else 0,
            "first": [] if buffer.is_meta else buffer.detach().reshape(-1)[:5].float().tolist(),
        }
        for name, buffer in module.named_buffers()
    ]
    return [
        Buffer(
            row["name"],
            rank,
            row["dtype"].removeprefix("torch."),
            tuple(row["shape"]),
            row["num_nan"],
            tuple(row["first"]),
        )
        for rank, rows in enumerate(exchange(mine))
        for row in rows
    ]


def probe_score(patient: Patient) -> Outcome:
    """Score this rank's sequences and compare with a whole model in one process. Collective: every rank."""
    policy = patient.policy
    if not patient.layout.packing:
        found = scoring_of(policy)
        training_state(policy).scoring = Scoring(
            None if found.packed else found.attention, found.chunked, "--no-packing"
        )
    critic = policy.role == CRITIC
    mine = values(policy, patient.my_sequences) if critic else logprobs(policy, patient.my_sequences)
    count = sum(exchange(sum(row.numel() for row in mine))) // policy.sequence_parallel
    scored = f"{count} {'values' if critic else 'log-probs'}, no NaN"
    if not patient.request.reference:
        return f"{scored}; not compared", []
    reference = score_alone(policy, patient.folder, patient.sequences, patient.request.trust_remote_code)
    gaps = exchange(_gap(patient, mine, reference))
    allowed = _NOISE_FACTOR * reference.noise + _FLOOR
    findings = [
        Finding(
            "T304",
            "score",
            f"its scores differ by {gap:.3g} on average from those of a single process; rounding explains {allowed:.3g}.",
            rank=rank,
        )
        for rank, gap in enumerate(gaps)
        if not gap <= allowed
    ]
    return f"{scored}; {max(gaps):.1e} from a single process, {allowed:.1e} allowed", findings


def _gap(patient: Patient, mine: Sequence[torch.Tensor], reference: Reference) -> float:
    """Mean distance of this rank's scores from the reference's."""
    truth = torch.cat([reference.scores[index] for index in patient.mine])
    return float((torch.cat([row.float().cpu() for row in mine]) - truth).abs().mean())


def probe_round_trip(patient: Patient) -> Outcome:
    """Stream the untrained model in the dtypes of its files, and compare with the files. Collective: every rank."""
    policy = patient.policy
    files = open_checkpoint(policy.folder) if dist.get_rank() == 0 and policy.folder is not None else None
    findings, num_same, num_bytes = [], 0, 0
    with WeightStream(policy, dtype="checkpoint", digests=False) as stream:
        for name, tensor in stream:
            entry = files.tensors.get(name) if files is not None else None
            if files is None or entry is None or entry.shape != tuple(tensor.shape):
                continue  # a name that only the model has, such as a critic's head
            sent = files.whole(name).to(policy.settings.param_dtype).to(tensor.dtype)
            if torch.equal(sent, tensor.cpu()):
                num_same, num_bytes = num_same + 1, num_bytes + tensor.numel() * tensor.element_size()
            else:
                message = f"{name!r} differs between the stream and its file."
                findings.append(Finding("E404", "round trip", message, tensor=name))
    num_same, num_bytes = broadcast([num_same, num_bytes])
    note = f"{num_same} tensors, {size_text(num_bytes)}, equal to the files bit for bit"
    return note, share_findings(findings)


def probe_step(patient: Patient) -> Outcome:
    """One guarded step, and attestation of what it left. Collective: every rank."""
    if patient.optimizer is None:
        return "a reference is not trained", []
    policy = patient.policy
    columns = {"returns": [1.0] * len(patient.mine)} if policy.role == CRITIC else {}
    result = train_step(
        policy,
        Batch(patient.my_sequences, **columns),
        patient.optimizer,
        loss="value" if policy.role == CRITIC else "sft",
        micro_batch_tokens=sum(len(sequence) for sequence in patient.sequences[:2]),
        deadline_s=patient.request.timeout_s,
    )
    findings = attest(policy, patient.optimizer)
    if not result.stepped:
        message = (
            f"the step was skipped: {result.reason} (micro-batch {result.micro_batch}, {result.tensor})."
        )
        findings.append(Finding("T302", "step", message, rank=result.rank, tensor=result.tensor))
    return f"loss {result.loss:.4g}, grad norm {result.grad_norm:.4g}, {result.num_tokens} tokens", findings


def probe_stream(patient: Patient) -> Outcome:
    """Send the weights to an engine, as a sync does. Collective: every rank."""
    policy = patient.policy
    dtype = policy.settings.compute_dtype
    stream = WeightStream(policy, dtype, deadline_s=patient.request.timeout_s)
    if policy.role == CRITIC:
        for _ in stream:
            pass
        receipt = stream.receipt
    else:
        patient.engine = _engine(policy, stream)
        receipt = patient.engine.load_weights(stream)
    assert receipt is not None
    patient.manifest = receipt.manifest
    return (
        f"version {receipt.version}, {receipt.num_tensors} tensors, {size_text(receipt.num_bytes)}",
        receipt.findings,
    )


def _engine(policy: ShardedModel, stream: WeightStream) -> Engine:
    """A replica on every rank where replicas fit into half of the free memory, else the sharded policy itself."""
    needed = sum(meta.nbytes for meta in stream.metadata())
    on_this_node = 1 if policy.device.type == "cuda" else dist.get_world_size()
    fits = all(exchange(2 * needed * on_this_node <= free_memory(policy.device)[0]))
    return EmbeddedEngine(policy) if fits else ShardedEngine(policy)


def probe_verify(patient: Patient) -> Outcome:
    """Compare what a second receiver gets, tensor by tensor, with the manifest. Collective: every rank."""
    assert patient.manifest is not None
    dtype = patient.policy.settings.compute_dtype
    stream = WeightStream(patient.policy, dtype, digests=False, deadline_s=patient.request.timeout_s)
    findings = share_findings(patient.manifest.compare(stream, "a second receiver"))
    return f"digest {patient.manifest.total[:16]}", findings


def probe_generate(patient: Patient) -> Outcome:
    """Sample a few tokens, and compare the engine's log-probs of them with the trainer's. Collective: every rank."""
    if patient.engine is None:
        return "a critic does not generate", []
    prompt = patient.my_sequences[-1][:-_NEW_TOKENS] or patient.my_sequences[-1]
    request = Prompt(Trajectory.of_prompt(tuple(prompt)), seed=0)
    (made,) = generate(patient.engine, [request], Sampling(_NEW_TOKENS))
    (trained,) = logprobs(patient.policy, [list(made.tokens)])
    gap = (trained.cpu()[len(prompt) - 1 :] - torch.tensor(made.sampled[-1].logprobs)).abs().max()
    gaps = exchange(float(gap))
    allowed = 1e-2 if patient.layout.dtype == "fp32" else 0.5
    findings = [
        Finding(
            "R503",
            "generate",
            f"engine and trainer log-probs of the same tokens differ by {gap:.3g}, the tolerance is {allowed:g}.",
            rank=rank,
        )
        for rank, gap in enumerate(gaps)
        if not gap <= allowed
    ]
    kind = type(patient.engine).__name__
    return f"{made.num_sampled} tokens by {kind}; {max(gaps):.1e} from the trainer", findings


STAGES: tuple[tuple[str, Probe], ...] = (
    ("load", probe_load),
    ("attest", probe_attest),
    ("score", probe_score),
    ("round trip", probe_round_trip),
    ("step", probe_step),
    ("stream", probe_stream),
    ("verify", probe_verify),
    ("generate", probe_generate),
)
