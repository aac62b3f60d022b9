"""`samples.jsonl`: the completions and conversations of a step that are kept for reading."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import torch
import torch.distributed as dist

from shardproof.report.read import SAMPLES_NAME
from shardproof.rl.experience import Experience
from shardproof.rl.experience_metrics import in_groups
from shardproof.rl.folder import RunFolder
from shardproof.rl.templates import panics_as_errors
from shardproof.rl.versions import token_counts
from shardproof.rollout.trajectory import Segment, Trajectory, reward_of
from shardproof.text import shortened
from shardproof.train.batching import Batch

_MAX_ANSWER = 1000  # characters of an expected answer
_MAX_TEXT = 4000  # characters of a segment, of a call's arguments, or of its answer
Decode = Callable[[Sequence[int]], str]


def write_samples(folder: RunFolder, experience: Experience, step: int, tokenizer: Any) -> None:
    """Keep the first `output.samples_per_step` completions of a step. Only rank 0 writes, of its own completions.

    Completions of one prompt follow each other, so that a few samples are mostly one group, and can be compared.
    """

    def decode(tokens: Sequence[int]) -> str:
        with panics_as_errors():
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    if dist.get_rank() == 0:
        for line in islice(sample_lines(experience, decode), folder.recipe.output.samples_per_step):
            folder.append(SAMPLES_NAME, {"step": step, **line})


def sample_lines(experience: Experience, decode: Decode) -> Iterator[dict[str, Any]]:
    """Each completion with its prompt, reward and advantage; the first of a group also has the group's rewards.

    A conversation also has its segments, as the tokens say them: `decode` makes text of them.
    """
    place = 0
    for group in in_groups(experience.trajectories):
        rewards = [reward_of(trajectory).measured for trajectory in group]
        for trajectory in group:
            reward = reward_of(trajectory)
            line = {
                "group": trajectory.group,
                "sample": trajectory.sample,
                "prompt": trajectory.facts["prompt"],
                "completion": trajectory.text,
                "reward": reward.measured,
                "rewards": dict(reward.parts),
            }
            places = range(place, place + len(trajectory.sequences))
            if (answer := trajectory.facts.get("answer")) is not None:
                line["answer"] = str(answer)[:_MAX_ANSWER]
            if (advantage := _advantage(experience.batch, places)) is not None:
                line["advantage"] = advantage
            if reward.no_signal:
                line["no_signal"] = list(reward.no_signal)
            if trajectory is group[0]:
                line["group_rewards"] = rewards
            line |= _origin(trajectory, decode)
            if trajectory.ended:
                line |= _conversation(trajectory, experience.batch, places, decode)
            yield line
            place = places.stop


def _origin(trajectory: Trajectory, decode: Decode) -> dict[str, Any]:
    """Where a completion came from, in runs whose engines run ahead or have replicas: docs/report.md shows it."""
    drawn, facts = list(trajectory.sampled), trajectory.facts
    origin = {key: facts[key] for key in ("replica", "drawn_for") if key in facts}
    if not origin and not any(segment.parts for segment in drawn):
        return {}
    origin["versions"] = [
        [num, version]
        for version, same in groupby(token_counts(drawn), key=lambda part: part[1])
        if (num := sum(part[0] for part in same))
    ]
    if not trajectory.ended and len(drawn) == 1:
        origin |= _pieces(drawn[0], decode)
    return origin


def _pieces(segment: Segment, decode: Decode) -> dict[str, Any]:
    """The text of each part of a turn, where the weights changed while it was drawn."""
    if len(segment.parts) < 2:
        return {}
    pieces, whole, end, shown = [], decode(segment.tokens), 0, 0
    for num, version in segment.parts:
        end += num
        # A part may end within a letter of several bytes: the letter belongs to the part that ends it.
        text = decode(segment.tokens[:end]).rstrip("\ufffd") if end < len(segment.tokens) else whole
        text = whole[shown : max(len(text), shown)]
        shown += len(text)
        limit = _MAX_TEXT // len(segment.parts)
        pieces.append({"version": version, "tokens": num, "text": shortened(text, limit)})
    return {"pieces": pieces}


def _conversation(trajectory: Trajectory, batch: Batch, places: range, decode: Decode) -> dict[str, Any]:
    """What ended a conversation, and its segments in the order in which they were written."""
    turns = iter(trajectory.facts.get("turns", ()))
    number, segments = 0, []
    for sequence, place in zip(trajectory.sequences, places, strict=True):
        start = 0
        for segment in sequence.segments:
            stop = start + len(segment.tokens)
            if not segment.tokens:
                continue
            span = slice(max(start - 1, 0), stop - 1)  # a sequence's first token is not predicted
            shown = _segment(segment, batch, place, span, decode)
            if len(places) > 1:
                shown["sequence"] = place - places.start + 1
            if segment.author == "policy":
                number += 1
                shown |= {"turn": number, **_turn(next(turns, {}))}
            segments.append(shown)
            start = stop
    error = trajectory.facts.get("environment", {}).get("error", "")
    return {
        "ended": trajectory.ended,
        **({"error": error[:_MAX_TEXT]} if error else {}),
        "segments": segments,
    }


def _segment(segment: Segment, batch: Batch, place: int, span: slice, decode: Decode) -> dict[str, Any]:
    """A segment's text, and what the update makes of it: whether the mask counts its tokens."""
    shown: dict[str, Any] = {
        "author": segment.author,
        "text": shortened(decode(segment.tokens), _MAX_TEXT),
        "tokens": len(segment.tokens),
        "trained": bool(batch.columns["mask"][place][span].any()) if "mask" in batch.columns else False,
    }
    if segment.author == "policy":
        shown |= {"version": segment.version, "reward": segment.reward, **_pieces(segment, decode)}
        if shown["trained"] and "advantages" in batch.columns:
            shown["advantage"] = round(float(batch.columns["advantages"][place][span].mean()), 4)
    return shown


def _turn(said: Mapping[str, Any]) -> dict[str, Any]:
    """The calls of a turn, each with its answer, what looked like a call and was none, and what else was replied."""
    calls, replies = said.get("calls", ()), list(said.get("reply", ()))
    answers = [reply for reply in replies if reply.get("role") == "tool"]
    shown: dict[str, Any] = {}
    if calls:
        texts = [shortened(str(answer.get("content", "")), _MAX_TEXT) for answer in answers] + [None] * len(
            calls
        )
        shown["calls"] = [
            {
                "name": str(call.get("name", "")),
                "arguments": shortened(_as_json(call.get("arguments", {})), _MAX_TEXT),
                **({} if text is None else {"answer": text, "failed": text.startswith("Error")}),
            }
            for call, text in zip(calls, texts, strict=False)
        ]
    if malformed := [shortened(str(why), _MAX_TEXT) for why in said.get("malformed", ())]:
        shown["malformed"] = malformed
    return shown


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _advantage(batch: Batch, places: range) -> float | None:
    """The mean advantage of a completion's trained tokens; None if none are trained."""
    columns = batch.columns
    if "advantages" not in columns or "mask" not in columns:
        return None
    mask = torch.cat([columns["mask"][place] for place in places])
    advantages = torch.cat([columns["advantages"][place] for place in places])
    num = float(mask.sum())
    return round(float((advantages * mask).sum()) / num, 4) if num else None
