"""An answer while it is drawn: by one replica or several, and by one version of the weights or several."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.trajectory import Segment, Trajectory

Parts = tuple[tuple[int, int], ...]  # (number of tokens, version)


class BadAnswer(Exception):
    """A server's answer is not what its route promises."""


@dataclass(frozen=True)
class Drawn:
    """Tokens that count, with the log-probs and the versions that they were drawn with."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    parts: Parts = ()

    def then(self, more: Drawn) -> Drawn:
        """With more at the end."""
        return Drawn(
            self.tokens + more.tokens, self.logprobs + more.logprobs, joined(self.parts + more.parts)
        )

    @property
    def segment_fields(self) -> dict[str, Any]:
        """`version` and `parts` as `Segment` has them: parts only where there are several versions."""
        return {
            "version": min(version for _, version in self.parts),
            "parts": self.parts if len(self.parts) > 1 else (),
        }


@dataclass(frozen=True)
class Choice:
    """What a server answered. `labels` are (number of tokens, label), None if it says none."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str
    labels: tuple[tuple[int, str], ...] | None

    def drawn(self, versions: Sequence[tuple[int, int]]) -> Drawn:
        """The tokens up to the first of a version below 0, which does not count, nor does anything after it."""
        parts: list[tuple[int, int]] = []
        for num, version in versions:
            if version < 0:
                break
            parts.append((num, version))
        num = sum(num for num, _ in parts)
        return Drawn(self.tokens[:num], self.logprobs[:num], joined(parts))


class Draft:
    """A request with what was drawn of its answer so far. `drawn` is replaced, never changed: any thread may read it."""

    def __init__(self, request: Request, sampling: Sampling):
        self.request, self.sampling = request, sampling
        self.drawn = _begun(request.begun)
        self.ended = False  # the server said that it is complete

    @property
    def complete(self) -> bool:
        tokens, sampling = self.drawn.tokens, self.sampling
        ended = self.ended or len(tokens) >= sampling.max_new_tokens
        return bool(tokens) and (ended or tokens[-1] in sampling.stop_ids)

    @property
    def work(self) -> int:
        """An estimate: tokens to read, and the most that are left to draw."""
        read = sum(len(segment.tokens) for segment in self.request.trajectory.segments)
        return read + self.sampling.max_new_tokens

    @property
    def so_far(self) -> Segment | None:
        """What was drawn, as `Request.begun` takes it; None for nothing."""
        drawn = self.drawn
        if not drawn.tokens:
            return None
        return Segment(drawn.tokens, "policy", drawn.logprobs, trained=True, **drawn.segment_fields)

    def body(self, version: int, model: str | None) -> dict[str, Any]:
        """What a server of a version is asked: to go on after the tokens that were drawn.

        An answer that one version drew alone depends on the seed alone. So what this version drew of it before, until it
        was interrupted, is drawn again: the rest would have another seed.
        """
        if {drawer for _, drawer in self.drawn.parts} == {version}:
            self.drawn = Drawn()
        num, sampling = len(self.drawn.tokens), self.sampling
        params = {
            "max_tokens": sampling.max_new_tokens - num,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": continued_seed(self.request.seed, num),
            "logprobs": 0,
            # The run says where completions end, and has read the checkpoint's generation config for that itself.
            "ignore_eos": True,
            "stop_token_ids": list(sampling.stop_ids),
            "detokenize": False,
        }
        body = {"token_ids": [*self.request.tokens, *self.drawn.tokens], "sampling_params": params}
        return body if model is None else body | {"model": model}

    def add(self, choice: Choice, versions: Sequence[tuple[int, int]]) -> bool:
        """Take what counts of an answer; returns whether all of it did."""
        more = choice.drawn(versions)
        self.drawn = self.drawn.then(more)
        all_counts = len(more.tokens) == len(choice.tokens)
        self.ended = all_counts and choice.reason != "abort"
        return all_counts

    def answer(self, replica: str) -> Trajectory:
        """The trajectory with what was drawn at its end."""
        drawn = self.drawn
        finished = drawn.tokens[-1] in self.sampling.stop_ids
        found = self.request.answered(drawn.tokens, drawn.logprobs, finished, **drawn.segment_fields)
        return replace(found, facts={**found.facts, "replica": replica}) if replica else found


def _begun(segment: Segment | None) -> Drawn:
    """What a segment has; nothing if it does not say who drew its tokens."""
    if segment is None or not segment.tokens or segment.logprobs is None or segment.version is None:
        return Drawn()
    parts = segment.parts or ((len(segment.tokens), segment.version),)
    return Drawn(tuple(segment.tokens), tuple(segment.logprobs), joined(parts))


def joined(parts: Sequence[tuple[int, int]]) -> Parts:
    """Parts without empty ones, neighbours of one version as one."""
    found: list[tuple[int, int]] = []
    for num, version in parts:
        if num and found and found[-1][1] == version:
            found[-1] = (found[-1][0] + num, version)
        elif num:
            found.append((num, version))
    return tuple(found)


def continued_seed(seed: int, num_drawn: int) -> int:
    """The seed that an answer goes on with after some of its tokens: its own, if there are none."""
    if not num_drawn:
        return seed
    digest = hashlib.sha256(f"{seed}/{num_drawn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # vLLM's seeds have 64 bits with a sign


def read_choice(reply: Any) -> Choice:
    """The one completion in a server's answer; raises `BadAnswer` for anything else."""
    try:
        (choice,) = reply["choices"]
        tokens, reason = tuple(choice["token_ids"]), choice["finish_reason"]
        values = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        spans = choice.get("weight_versions")
        labels = None if spans is None else _labels(spans)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"the answer lacks something ({type(error).__name__}: {error})") from error
    if len(values) != len(tokens) or reason not in ("stop", "length", "abort"):
        message = f"the answer ended with {reason!r} and has {len(values)} log-probs for {len(tokens)} tokens"
        raise BadAnswer(message)
    if not tokens and reason != "abort":
        raise BadAnswer(f"the answer ended with {reason!r} and has no token")
    if labels is not None and sum(num for num, _ in labels) != len(tokens):
        raise BadAnswer(f"the answer has {len(tokens)} tokens, its weight versions cover others")
    return Choice(tokens, values, reason, labels)


def _labels(spans: Sequence[dict[str, Any]]) -> tuple[tuple[int, str], ...]:
    """(number of tokens, label) of spans, which must follow each other."""
    end = 0
    for span in spans:
        if span["start"] != end or span["end"] < end:
            raise ValueError("weight versions with gaps")
        end = span["end"]
    return tuple((span["end"] - span["start"], span["version"]) for span in spans)
