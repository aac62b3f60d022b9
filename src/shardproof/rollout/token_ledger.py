"""The token ledger: what the engine read and sampled, turn by turn, and the proof that a batch trains on just that.

A conversation is known by its place in the step's batch, (group, sample), and a turn by its number. Both are written down
when the engine's answer comes in. Token tuples cannot change, so the ledger keeps the tuples themselves: a conversation
costs a few pointers per turn, and what somebody puts in their place later is another tuple, and is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardproof.errors import fail
from shardproof.findings import Finding
from shardproof.rollout.expert_records import experts_difference, unrecorded
from shardproof.rollout.experts import Experts
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.train.batching import Batch

Key = tuple[int, int]  # of a conversation: group and sample


@dataclass(frozen=True)
class Sampled:
    """A turn as the engine returned it."""

    context: tuple[tuple[int, ...], ...]  # what the engine read, in the pieces that it came in
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int | None
    experts: Experts | None = None
    parts: tuple[tuple[int, int], ...] = ()  # (number of tokens, version), as `Segment.parts`

    @property
    def start(self) -> int:
        """How many tokens the engine read."""
        return sum(map(len, self.context))


class TokenLedger:
    """What an engine read and sampled in one step, for `attest_batch`.

    Call `record` with each answer of the engine as it comes, and `clear` when the step's batch was compared. Each
    conversation needs its own (group, sample).
    """

    def __init__(self) -> None:
        self._turns: dict[Key, list[Sampled]] = {}

    def __len__(self) -> int:
        """How many turns are recorded."""
        return sum(map(len, self._turns.values()))

    def record(self, asked: Trajectory, answered: Trajectory) -> None:
        """Add one turn: what the engine was asked to continue, and what it returned.

        Raises if the engine did anything else than append one segment of the policy.
        """
        segment = appended(asked, answered)
        context = tuple(tuple(each.tokens) for each in asked.segments)
        assert segment.logprobs is not None
        drawn = tuple(segment.tokens), tuple(segment.logprobs), segment.version
        turn = Sampled(context, *drawn, segment.experts, _parts(segment))
        self._turns.setdefault((asked.group, asked.sample), []).append(turn)

    def turns(self, group: int, sample: int) -> tuple[Sampled, ...]:
        """The turns of a conversation, in the order in which they were sampled."""
        return tuple(self._turns.get((group, sample), ()))

    def put(self, group: int, sample: int, turns: Sequence[Sampled]) -> None:
        """Take over the turns of a conversation that another ledger recorded."""
        self._turns[group, sample] = list(turns)

    def clear(self) -> None:
        """Forget all turns: the next step begins."""
        self._turns.clear()


def appended(asked: Trajectory, answered: Trajectory) -> Segment:
    """The segment of the policy that an engine appended to what it was asked to continue; raises for anything else."""
    where = f"the engine's answer to {_name(asked)}"
    fix = "return request.answered(...); see docs/extending.md#an-engine"
    if (answered.group, answered.sample) != (asked.group, asked.sample):
        raise fail("R500", "generate", f"{where} belongs to {_name(answered)}.", fix=fix)
    for number, (before, after) in enumerate(zip(asked.segments, answered.segments, strict=False)):
        if before is not after and before != after:
            message = f"{where} changed segment {number}, which it was to continue: {_changed(before, after)}"
            raise fail("R507", "generate", message, fix=fix)
    added = answered.segments[len(asked.segments) :]
    if len(added) != 1 or added[0].author != "policy":
        authors = ", ".join(segment.author for segment in added) or "nothing"
        raise fail("R500", "generate", f"{where} appended {authors}, expected one policy segment.", fix=fix)
    num = None if added[0].logprobs is None else len(added[0].logprobs)
    if num != len(added[0].tokens):
        message = f"{where} has {num or 'no'} log-probs for {len(added[0].tokens)} tokens."
        raise fail("R500", "generate", message, fix=fix)
    if problem := _wrong_parts(added[0]):
        raise fail("R500", "generate", f"{where} {problem}.", fix=fix)
    return added[0]


def _wrong_parts(segment: Segment) -> str:
    """What is wrong with a segment's versions; "" for nothing."""
    parts, num = _parts(segment), len(segment.tokens)
    if not parts:
        return ""
    if sum(size for size, _ in parts) != num or any(size < 1 for size, _ in parts):
        return f"has parts {parts} for {num} tokens"
    oldest = min(version for _, version in parts)
    return "" if segment.version == oldest else f"has version {segment.version}, its oldest part {oldest}"


def _parts(segment: Segment) -> tuple[tuple[int, int], ...]:
    return tuple((num, version) for num, version in segment.parts)


def _changed(before: Segment, after: Segment) -> str:
    found = _first_difference(after.tokens, before.tokens)
    if found is None:
        return f"its tokens are the same, but not its author, log-probs, version or reward ({before.author})."
    return f"token {found[0]} was {found[2]} and is now {found[1]}."


@dataclass
class Comparison:
    """What a batch was compared with, and what did not agree: at most one finding for each sequence."""

    findings: list[Finding] = field(default_factory=list)
    num_conversations: int = 0
    num_turns: int = 0
    num_tokens: int = 0  # that were sampled; those that they follow are compared too
    num_trained: int = 0  # of these


def attest_batch(
    batch: Batch, trajectories: Sequence[Trajectory], ledger: TokenLedger, *, whole_turns: bool = True
) -> list[Finding]:
    """Prove that a batch trains on exactly the tokens that were sampled; returns what does not agree with the ledger.

    Compares, for each turn of each sequence: its tokens, the tokens before it, its `rollout_logps`, the weight version of each
    token and, where the engine recorded them, the experts that are replayed (R511).
    The `mask` must be 1 on sampled tokens only, and each sampled turn must be in the batch exactly once. A turn may be left
    out as a whole if its segment is not `trained`, or if its reward failed or is left out. With
    `whole_turns=False` the mask may also leave out single tokens.

    `trajectories` are in the order of the batch's sequences. Each finding names trajectory, turn and token. Looks at this
    rank's batch only: no collectives.
    """
    return compare_batch(batch, trajectories, ledger, whole_turns=whole_turns).findings


def compare_batch(
    batch: Batch, trajectories: Sequence[Trajectory], ledger: TokenLedger, *, whole_turns: bool = True
) -> Comparison:
    """What `attest_batch` compares and finds, with counts."""
    parts = [part for trajectory in trajectories for part in trajectory.sequences]
    result = Comparison(num_conversations=len({(part.group, part.sample) for part in parts}))
    if len(parts) != len(batch):
        message = f"the batch has {len(batch)} sequences, the trajectories have {len(parts)}."
        result.findings.append(Finding("R507", "attest", message))
        return result
    placed: dict[Key, int] = {}
    broken: set[Key] = set()
    for number, part in enumerate(parts):
        key = part.group, part.sample
        row = _Row(batch, number, part, whole_turns)
        try:
            for turn, sampled, segment in _turns_of(part, ledger.turns(*key), placed):
                row.compare(turn, sampled, segment)
            row.compare_rest()
        except _Disagreement as error:
            if key not in broken:  # the rest of a conversation only follows from its first disagreement
                message = f"{_name(part)}, {error} It is in sequence {number} of the batch."
                result.findings.append(Finding(error.code, "attest", message))
            broken.add(key)
        result.num_turns += len(row.turns)
        result.num_tokens += sum(stop - start for start, stop, _ in row.turns)
        result.num_trained += row.num_trained
    for key, num in placed.items():
        turns = ledger.turns(*key)
        if num < len(turns) and key not in broken:
            message = f"{_label(*key)}, turn {num + 1}: its {len(turns[num].tokens)} sampled tokens are in no sequence of the batch."
            result.findings.append(Finding("R507", "attest", message))
    return result


class _Disagreement(Exception):
    """What in a sequence is not as the ledger has it."""

    code = "R507"


class _OtherExperts(_Disagreement):
    code = "R511"


def _turns_of(
    part: Trajectory, sampled: Sequence[Sampled], placed: dict[Key, int]
) -> Iterator[tuple[int, Sampled, Segment]]:
    """(number, the ledger's turn, the sequence's segment) of the policy's turns in a sequence.

    `placed` counts the turns of each conversation over its sequences. A later sequence may repeat an earlier turn for
    reading: an untrained segment, whose tokens are compared as what the next turn read.
    """
    key = part.group, part.sample
    for segment in part.segments:
        number = placed.setdefault(key, 0)
        if segment.author != "policy":
            continue
        is_next = number < len(sampled) and segment.tokens == sampled[number].tokens
        if not is_next and not segment.tokens:
            continue  # of a conversation that failed before its first turn
        earlier = sampled[:number]
        if not segment.trained and not is_next and any(segment.tokens == turn.tokens for turn in earlier):
            continue
        if number == len(sampled):
            raise _Disagreement(
                f"turn {number + 1}: the batch has it, but the engine sampled {number} turns of this conversation."
            )
        placed[key] = number + 1
        yield number + 1, sampled[number], segment


def _compare_versions(turn: int, sampled: Sampled, segment: Segment) -> None:
    """Raise if the weights that drew a turn's tokens are not those that the engine named."""
    if _parts(segment) != sampled.parts:
        before = Segment(sampled.tokens, "policy", version=sampled.version, parts=sampled.parts)
        found = _first_difference(segment.token_versions, before.token_versions)
        if found is not None:
            at, has, wanted = found
            message = f"the batch has it from weights of version {has}, the engine sampled it from version {wanted}."
            raise _Disagreement(f"turn {turn}, token {at}: {message}")
    if segment.version != sampled.version:
        raise _Disagreement(
            f"turn {turn}: the batch has it from weights of version {segment.version}, the engine sampled it from version {sampled.version}."
        )


class _Row:
    """One sequence of a batch while it is compared."""

    def __init__(self, batch: Batch, number: int, part: Trajectory, whole_turns: bool):
        self.tokens = batch.sequences[number]
        columns = batch.columns
        every = np.ones(len(self.tokens) - 1, np.float32)
        self.mask = columns["mask"][number].numpy() if "mask" in columns else every
        self.logps = columns["rollout_logps"][number].numpy() if "rollout_logps" in columns else None
        self.experts = batch.experts[number].numpy() if batch.experts is not None else None
        self.num_routed = 0  # tokens from the beginning whose experts an engine recorded
        self.part = part
        self.whole_turns = whole_turns
        self.left_out = part.reward is not None and not part.reward.counts
        self.turns: list[tuple[int, int, int]] = []  # first token, the one after the last, number of the turn
        self.num_trained = 0
        self._read: tuple[
            tuple[int, ...], ...
        ] = ()  # what was compared from the sequence's beginning, in pieces

    def compare(self, turn: int, sampled: Sampled, segment: Segment) -> None:
        """Raise if a turn is not as it was sampled, or does not follow what the engine read."""
        start, stop = self._compare_tokens(turn, sampled)
        _compare_versions(turn, sampled, segment)
        self._compare_logps(turn, sampled, start, stop)
        self._compare_experts(turn, sampled)
        counted = self.mask[max(start - 1, 0) : stop - 1]
        num = int(np.count_nonzero(counted))
        self.num_trained += num
        self.turns.append((start, stop, turn))
        if num and not segment.trained:
            raise _Disagreement(f"turn {turn}: it is not to be trained, but its mask is not 0.")
        may_be_left_out = not self.whole_turns or (num == 0 and (self.left_out or not segment.trained))
        if num < len(counted) and not may_be_left_out:
            token = int(np.argmin(counted != 0)) + stop - start - len(counted)
            raise _Disagreement(
                f"turn {turn}, token {token}: it was sampled, but its mask is 0. Masked are {len(counted) - num} of {len(counted)} tokens of the turn."
            )

    def _compare_tokens(self, turn: int, sampled: Sampled) -> tuple[int, int]:
        """Where the turn's tokens are: (first, one after the last)."""
        pieces = (*sampled.context, sampled.tokens)
        position = start = 0
        for k, piece in enumerate(pieces):
            start, position = position, position + len(piece)
            if k < len(self._read) and self._read[k] is piece:
                continue  # compared with the same place of this sequence for an earlier turn
            self._read = ()
            here = self.tokens[start:position]
            found = _first_difference(here, piece)
            if found is not None:
                at, has, wanted = found
                is_read = k < len(sampled.context)
                place = f"token {start + at} of what it follows" if is_read else f"token {at}"
                verb = "read" if is_read else "sampled"
                raise _Disagreement(f"turn {turn}, {place}: the batch has {has}, the engine {verb} {wanted}.")
        self._read = pieces
        return start, position

    def _compare_logps(self, turn: int, sampled: Sampled, start: int, stop: int) -> None:
        if self.logps is None:
            return
        first = max(start, 1)  # the first token of a sequence is not predicted
        wanted = np.array(sampled.logprobs[first - start :], np.float32)
        here = self.logps[first - 1 : stop - 1]
        same = here == wanted
        if not same.all():
            at = int(np.argmin(same))
            raise _Disagreement(
                f"turn {turn}, token {at + first - start}: the batch has log-prob {here[at]:.9g}, the engine's is {wanted[at]:.9g}."
            )

    def _compare_experts(self, turn: int, sampled: Sampled) -> None:
        found = experts_difference(self.experts, sampled.experts)
        if found is not None:
            raise _OtherExperts(f"turn {turn}, {found}")
        if sampled.experts is not None:
            self.num_routed = sampled.experts.stop

    def compare_rest(self) -> None:
        """Raise if the mask, or experts, are of what was not sampled. To be called once all turns were compared."""
        found = None if self.experts is None else unrecorded(self.experts, self.num_routed)
        if found is not None:
            raise _OtherExperts(found)
        self._compare_mask()

    def _compare_mask(self) -> None:
        if np.count_nonzero(self.mask == 1) != np.count_nonzero(self.mask):
            at = int(np.argmax((self.mask != 1) & (self.mask != 0)))
            raise _Disagreement(
                f"token {at + 1} of the sequence: its mask is {self.mask[at]:g}, expected 0 or 1."
            )
        if np.count_nonzero(self.mask) == self.num_trained:
            return
        rest = self.mask.copy()
        for start, stop, _ in self.turns:
            rest[max(start - 1, 0) : stop - 1] = 0
        at = int(np.argmax(rest != 0)) + 1
        turn = sum(start <= at for start, _, _ in self.turns)
        where = f"after turn {turn}" if turn else "before turn 1"
        raise _Disagreement(
            f"{where}, token {at} of the sequence: its mask is 1, but it was not sampled (author: {self._author(at)})."
        )

    def _author(self, at: int) -> str:
        for segment in self.part.segments:
            if at < len(segment.tokens):
                return segment.author
            at -= len(segment.tokens)
        return "batch"


def _first_difference(
    has: Sequence[int | None], wanted: Sequence[int | None]
) -> tuple[int, object, object] | None:
    """(index, what is there, what should be) of the first token that differs; None if none does."""
    if list(has) == list(wanted):
        return None
    common = min(len(has), len(wanted))
    at = next((k for k in range(common) if has[k] != wanted[k]), common)
    return at, has[at] if at < len(has) else "nothing", wanted[at] if at < len(wanted) else "nothing"


def _name(trajectory: Trajectory) -> str:
    return _label(trajectory.group, trajectory.sample)


def _label(group: int, sample: int) -> str:
    return f"trajectory {sample} of prompt {group}"
