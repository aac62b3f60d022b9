"""An answer while it is drawn: by one replica or several, and by one version of the weights or several."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.returned_experts import Recorded, put_together
from shardproof.rollout.sampling import Ends
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
    # Of the sequence's tokens from the first without a record to the last but one, where they are recorded.
    experts: np.ndarray | None = field(default=None, compare=False)

    def then(self, more: Drawn) -> Drawn:
        """With more at the end."""
        return Drawn(
            self.tokens + more.tokens,
            self.logprobs + more.logprobs,
            joined(self.parts + more.parts),
            put_together(self.experts, more.experts),
        )

    def cut(self, num: int) -> Drawn:
        """The first `num` tokens."""
        versions = [version for count, version in self.parts for _ in range(count)][:num]
        parts, left_out = joined([(1, version) for version in versions]), len(self.tokens) - num
        experts = self.experts if self.experts is None else self.experts[: len(self.experts) - left_out]
        return Drawn(self.tokens[:num], self.logprobs[:num], parts, experts)

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
    experts: str | None = None  # as the server wrote them

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

    def __init__(self, request: Request, sampling: Sampling, experts: ExpertShape | None = None):
        self.request = request
        self.sampling = _limited(request.settings(sampling), request.limit(sampling))
        self._recorded = Recorded(request.trajectory, experts) if experts is not None else None
        self.drawn = _begun(request.begun, self._recorded)
        self.ended = False  # the server said that it is complete
        self._ends = self._look()

    @property
    def complete(self) -> bool:
        tokens = self.drawn.tokens
        ended = self.ended or len(tokens) >= self.sampling.max_new_tokens
        return bool(tokens) and (ended or self._ends.num is not None)

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
        experts = self._recorded.record(drawn.experts) if self._recorded is not None else None
        fields = drawn.segment_fields
        return Segment(drawn.tokens, "policy", drawn.logprobs, trained=True, experts=experts, **fields)

    def body(self, version: int, model: str | None) -> dict[str, Any]:
        """What a server of a version is asked: to go on after the tokens that were drawn.

        An answer that one version drew alone depends on the seed alone. So what this version drew of it before, until it
        was interrupted, is drawn again: the rest would have another seed.
        """
        if {drawer for _, drawer in self.drawn.parts} == {version} or self._counts:
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
            **_settings(sampling, num),
        }
        if self._recorded is not None:
            params["routed_experts_prompt_start"] = self._recorded.stop(self.drawn.experts)
        body = {"token_ids": [*self.request.tokens, *self.drawn.tokens], "sampling_params": params}
        return body if model is None else body | {"model": model}

    def add(self, choice: Choice, versions: Sequence[tuple[int, int]]) -> bool:
        """Take what counts of an answer; returns whether all of it did."""
        more = choice.drawn(versions)
        all_counts = len(more.tokens) == len(choice.tokens)
        if self._recorded is not None and more.tokens:
            more = self._with_experts(more, choice, self._recorded)
        self.drawn = self.drawn.then(more)
        self.ended = all_counts and choice.reason != "abort"
        self._ends = self._look()
        return all_counts

    def _look(self) -> Ends:
        """Where the answer ends: a server may have found a stop string later than with the token that completes it."""
        ends = Ends(self.sampling)
        if ends.look(self.drawn.tokens) and ends.num is not None:
            self.drawn = self.drawn.cut(ends.num)
        return ends

    @property
    def _counts(self) -> bool:
        """Whether a server must have drawn the answer from its beginning, because penalties count what it drew."""
        return bool(self.sampling.presence_penalty or self.sampling.frequency_penalty)

    def _with_experts(self, more: Drawn, choice: Choice, recorded: Recorded) -> Drawn:
        """With the experts of what was read; of an interrupted answer only the tokens whose experts came."""
        try:
            rows = recorded.read(choice.experts)
        except ValueError as error:
            raise BadAnswer(f"the answer's experts cannot be read ({error})") from error
        read = len(self.request.tokens) + len(self.drawn.tokens) - recorded.stop(self.drawn.experts)
        num = min(len(more.tokens), len(rows) + 1 - read)  # nobody has read the last token
        if num < len(more.tokens):
            if choice.reason != "abort":
                raise BadAnswer(
                    f"the answer has {len(rows)} experts for {read + len(more.tokens) - 1} tokens"
                )
            more = more.cut(max(num, 0))
        return replace(more, experts=rows[: read + num - 1]) if num > 0 else more

    def answer(self, replica: str) -> Trajectory:
        """The trajectory with what was drawn at its end."""
        drawn = self.drawn
        ends = self._ends
        experts = self._recorded.record(drawn.experts) if self._recorded is not None else None
        fields = drawn.segment_fields | {"experts": experts, "stop_string": ends.stop_string}
        found = self.request.answered(drawn.tokens, drawn.logprobs, ends.num is not None, **fields)
        return replace(found, facts={**found.facts, "replica": replica}) if replica else found


def _limited(sampling: Sampling, limit: int) -> Sampling:
    """With another limit."""
    least = min(sampling.min_new_tokens, limit)
    return replace(sampling, max_new_tokens=limit, min_new_tokens=least)


def _settings(sampling: Sampling, num: int) -> dict[str, Any]:
    """What else a server is told of a request that has drawn so many tokens; nothing that it does by itself."""
    found: dict[str, Any] = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_tokens": max(sampling.min_new_tokens - num, 0),
    }
    neutral = {"repetition_penalty": 1.0}
    found = {key: value for key, value in found.items() if value != neutral.get(key, 0)}
    if sampling.stop:
        # Special tokens have a text, too, and all tokens that were drawn come back.
        strings = {"stop": list(sampling.stop.strings), "detokenize": True, "skip_special_tokens": False}
        found |= {**strings, "spaces_between_special_tokens": False, "include_stop_str_in_output": True}
    return found


def _begun(segment: Segment | None, recorded: Recorded | None) -> Drawn:
    """What a segment has; nothing if it does not say who drew its tokens, or with which experts."""
    if segment is None or not segment.tokens or segment.logprobs is None or segment.version is None:
        return Drawn()
    parts = segment.parts or ((len(segment.tokens), segment.version),)
    drawn = Drawn(tuple(segment.tokens), tuple(segment.logprobs), joined(parts))
    if recorded is None:
        return drawn
    if not recorded.fits(segment):
        return Drawn()
    assert segment.experts is not None
    return replace(drawn, experts=segment.experts.rows)


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
    return Choice(tokens, values, reason, labels, choice.get("routed_experts"))


def _labels(spans: Sequence[dict[str, Any]]) -> tuple[tuple[int, str], ...]:
    """(number of tokens, label) of spans, which must follow each other."""
    end = 0
    for span in spans:
        if span["start"] != end or span["end"] < end:
            raise ValueError("weight versions with gaps")
        end = span["end"]
    return tuple((span["end"] - span["start"], span["version"]) for span in spans)
