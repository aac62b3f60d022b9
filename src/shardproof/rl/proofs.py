"""The proof ledger: each hand-over of weights and tokens in a run, what was compared, and whether it agreed.

One line of `events.jsonl` per proof; the report shows them at its top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from shardproof.dist.collectives import gather, together
from shardproof.errors import ConfigError, ShardproofError, error_for
from shardproof.export.manifest import ExportReceipt
from shardproof.findings import Finding
from shardproof.rl.data import Share
from shardproof.rollout.token_ledger import TokenLedger, compare_batch
from shardproof.rollout.trajectory import Trajectory
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch

PROOF = "proof"  # the kind of these events
_MAX_FINDINGS = 8  # of a rank, about one batch
# What each proof compares. A reader who knows nothing about this project must understand it.
COMPARED = {
    "load": "Every element that this rank holds was written exactly once, replicated tensors are equal on all ranks, "
    "and buffers equal what their modules compute from the config.",
    "resume": "Every byte of the checkpoint was compared with the checksum that was saved with it.",
    "sync": "The engine's log-probs of a canary prompt were compared with the trainer's after the engine "
    "received the weights.",
    "tokens": "In each step, before the update, every sampled token of the batch, the tokens before it, its log-prob and its "
    "weight version were compared with what the engine read and returned, and the mask with what was sampled. Noted at the "
    "first and last step, at evaluations and at checkpoints.",
    "reference": "Every element of the reference was written exactly once, from the policy's at the same place, and is finite.",
    "checkpoint": "Every file was written whole, with a checksum that a resume compares before it reads anything.",
    "export": "Every tensor was sent once and is finite, and the sizes of all files were read back.",
}


class Ledger(Protocol):
    """What takes the lines: a run's folder."""

    def note(self, step: int, kind: str, text: str, **fields: Any) -> None: ...


@dataclass
class Proof:
    """A hand-over while it is under way. The block that makes it fills in its receipt."""

    text: str = ""  # empty until there is an outcome
    details: dict[str, Any] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    broke: bool = False  # the block raised

    @property
    def passed(self) -> bool:
        return not self.broke and not self.findings

    def take(self, receipt: ExportReceipt) -> None:
        """Keep what an export's receipt says."""
        self.text, self.findings = str(receipt), receipt.findings
        self.details |= {
            "version": receipt.version,
            "tensors": receipt.num_tensors,
            "bytes": receipt.num_bytes,
            "digest": receipt.digest,
        }


@contextmanager
def proving(ledger: Ledger, step: int, proof: str, role: str = "policy", **details: Any) -> Iterator[Proof]:
    """Note what the block proves: passed if it ends without findings, failed with what it raises or found."""
    started, made = time.perf_counter(), Proof(details=details)
    try:
        yield made
    except ConfigError:  # what the user asked for cannot be done; nothing was proved or refuted
        made.text = ""
        raise
    except ShardproofError as error:
        made.text, made.findings, made.broke = str(error), error.findings, True
        raise
    except Exception as error:  # of a library, or of the user's code
        made.text, made.findings, made.broke = f"{type(error).__name__}: {error}", (), True
        raise
    except BaseException:  # the process ends
        made.text = ""
        raise
    finally:
        if made.text:
            _write(ledger, step, proof, role, made, time.perf_counter() - started)


def proved_load(
    ledger: Ledger | None, step: int, role: str, load: Callable[[], ShardedModel]
) -> ShardedModel:
    """The model that `load` returns, with a line for what each rank loaded. Collective: every rank."""
    if ledger is None:
        return load()
    with proving(ledger, step, "load", role):
        model = load()
    for rank, (text, seconds, details) in enumerate(gather(_load_of(model)) or ()):  # only rank 0 writes
        _write(ledger, step, "load", role, Proof(text, details), seconds, rank=rank)
    return model


def prove_tokens(
    ledger: Ledger,
    step: int,
    tokens: TokenLedger,
    batch: Batch,
    trajectories: Sequence[Trajectory],
    share: Share,
    *,
    whole_turns: bool,
    noted: bool,
) -> dict[str, float]:
    """Compare all ranks' batch with what was sampled, and clear the token ledger; returns the metrics.

    There is a line where `noted` asks for it, and where something does not agree: R507. Collective: every rank.
    """
    with proving(ledger, step, "tokens") as proof:
        with together("rollout") as message:
            found = compare_batch(batch, trajectories, tokens, whole_turns=whole_turns)
            if found.findings:
                raise error_for(found.findings[:_MAX_FINDINGS])
            message.mine = [found.num_tokens, found.num_trained, found.num_turns, found.num_conversations]
        sums = [sum(column) for column in zip(*share.once(message.rows), strict=True)]
        if noted:
            num, trained, turns, conversations = sums
            proof.text = f"{num} sampled tokens of {turns} turns in {conversations} conversations are as the engine returned them; {trained} are trained on"
            proof.details |= {
                "tokens": num,
                "trained": trained,
                "turns": turns,
                "conversations": conversations,
            }
    tokens.clear()
    return {"ledger/tokens": float(sums[0])}


def _write(
    ledger: Ledger, step: int, proof: str, role: str, made: Proof, seconds: float, **where: int
) -> None:
    ledger.note(
        step,
        PROOF,
        made.text,
        proof=proof,
        role=role,
        **where,
        passed=made.passed,
        compared=COMPARED[proof],
        seconds=round(seconds, 4),
        findings=[finding.to_json() for finding in made.findings],
        details=dict(made.details),
    )


def _load_of(model: ShardedModel) -> tuple[str, float, dict[str, Any]]:
    receipt = asdict(model.receipt)
    details = {
        "source": model.source,
        "tensors": receipt["num_tensors"],
        "bytes_read": receipt["bytes_read"],
        "bytes_held": receipt["shard_bytes"],
        "peak_bytes": receipt["peak_bytes"],
        "written_by": dict(receipt["num_by_writer"]),
    }
    if model.base_digests:  # compared again at every save and sync
        digest = sum(model.base_digests.values()) % 2**64
        held = {"held_in": model.settings.lora_base, "weights": len(model.base_digests)}
        details["frozen_base"] = held | {"digest": f"{digest:016x}"}
    return str(model.receipt), receipt["seconds"], details
