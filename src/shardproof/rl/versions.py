"""Which weights the engine was handed, and how far behind the policy the tokens are that they drew."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shardproof.dist.collectives import raise_together
from shardproof.findings import Finding
from shardproof.rollout.trajectory import Segment, Trajectory

_REMEMBERED = 130  # hand-overs; rollout.ahead is at most 64


class Versions:
    """The versions of the weights that the engine was handed, oldest first. The last one is the policy's.

    The lag of a token is the number of versions that were handed over after the one that drew it. A hand-over of the same
    version, as at a resume or after an update that was skipped, is not counted.
    """

    def __init__(self) -> None:
        self._handed: list[int] = []

    def hand_over(self, version: int) -> None:
        """Note that the engine has this version from now on."""
        if not self._handed or self._handed[-1] != version:
            self._handed = [*self._handed, version][-_REMEMBERED:]

    def lag(self, version: int | None) -> int | None:
        """How many versions were handed over after this one; None if it is not among those that are remembered."""
        return len(self._handed) - 1 - self._handed.index(version) if version in self._handed else None

    @property
    def current(self) -> int | None:
        return self._handed[-1] if self._handed else None

    def to_json(self) -> list[int]:
        """What `restore` takes."""
        return list(self._handed)

    def restore(self, handed: Sequence[int]) -> None:
        """Go on where a checkpoint was saved."""
        self._handed = list(handed)


def token_counts(segments: Iterable[Segment]) -> Iterator[tuple[int, int | None]]:
    """(number of tokens, version of the weights that drew them) of turns of the policy."""
    for segment in segments:
        yield from segment.parts or ((len(segment.tokens), segment.version),)


def lag_of(segments: Iterable[Segment], versions: Versions) -> int | None:
    """The lag of the oldest token; None if a version is unknown."""
    lags = [versions.lag(version) for _, version in token_counts(segments)]
    known = [lag for lag in lags if lag is not None]
    return max(known, default=0) if len(known) == len(lags) else None


def check_usable(trajectories: Sequence[Trajectory], versions: Versions, ahead: int) -> None:
    """Raise on every rank if trajectories must not be trained on: a larger lag than `ahead`, log-probs that are not numbers.

    Collective: every rank.
    """
    findings = []
    for trajectory in trajectories:
        problem = _too_old(trajectory, versions, ahead)
        if problem is not None:
            fix = "repair the engine; if it may lag this far, raise rollout.ahead"
            findings.append(Finding("R501", "rollout", problem, fix=fix))
            break
    for number, trajectory in enumerate(trajectories):
        logprobs = [logp for segment in trajectory.sampled for logp in segment.logprobs or ()]
        odd = [k for k, logp in enumerate(logprobs) if logp is None or not math.isfinite(logp)]
        if odd:
            message = f"the engine's log-prob of token {odd[0]} of sequence {number} is {logprobs[odd[0]]}."
            findings.append(Finding("R503", "rollout", message, rank=dist.get_rank()))
            break
    raise_together(findings)


def _too_old(trajectory: Trajectory, versions: Versions, ahead: int) -> str | None:
    name = f"trajectory {trajectory.sample} of prompt {trajectory.group}"
    if not trajectory.sampled:
        return f"{name} has no tokens of the policy."
    for _, version in token_counts(trajectory.sampled):
        lag = versions.lag(version)
        if lag is None:
            has = f"{name} has tokens from weights of version {version}, which the engine was not given"
            return f"{has}; the policy is at version {versions.current}."
        if lag > ahead:
            has = f"{name} has tokens from weights of version {version}"
            return f"{has}, {lag} hand-overs before the policy's version {versions.current}; rollout.ahead allows {ahead}."
    return None


def lags_of(trajectories: Iterable[Trajectory], versions: Versions) -> list[list[int]]:
    """[lag, number of trained tokens that have it], by lag. JSON-able."""
    counts: dict[int, int] = {}
    for trajectory in trajectories:
        for num, version in token_counts(each for each in trajectory.sampled if each.trained):
            lag = versions.lag(version) or 0
            counts[lag] = counts.get(lag, 0) + num
    return [[lag, num] for lag, num in sorted(counts.items())]


def ahead_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of running ahead, from the facts of all ranks: see `Buffer.facts`."""
    lags = [(lag, num) for row in rows for lag, num in row["lags"]]
    num_tokens = sum(num for _, num in lags)
    found = {
        "lag/mean": sum(lag * num for lag, num in lags) / max(num_tokens, 1),
        "lag/max": float(max((lag for lag, num in lags if num), default=0)),
        "ahead/buffered": float(sum(row["buffered"] for row in rows)),
    }
    if "in_flight" not in rows[0]:
        return found
    num_made = max(sum(row["made"] for row in rows), 1)
    found["ahead/in_flight"] = float(sum(row["in_flight"] for row in rows))
    found["ahead/interrupted"] = sum(row["interrupted"] for row in rows) / num_made
    found["ahead/dropped"] = float(rows[0]["dropped"])  # every rank counts those of all
    for name in sorted({name for row in rows for name in row["replicas"]}):
        found[f"replica/{name}"] = sum(row["replicas"].get(name, 0) for row in rows) / num_made
    for name in sorted({name for row in rows for name in row["activity"]}):
        # A replica is idle while no rank has a request there: at most as long as any rank says.
        found[name] = min(row["activity"].get(name, 0.0) for row in rows)
    return found
