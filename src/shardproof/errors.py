"""Exceptions: a `ConfigError` for bad user input, a `Fault` for a broken invariant, both with their findings."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

from shardproof.findings import Finding


class ShardproofError(Exception):
    """Base class of all errors that shardproof raises on purpose."""

    def __init__(self, findings: Sequence[Finding] | Finding):
        self.findings = [findings] if isinstance(findings, Finding) else list(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.findings,)

    @property
    def code(self) -> str:
        return self.findings[0].code


class ConfigError(ShardproofError, ValueError):
    """Invalid input: the message names the key and, where possible, the nearest valid value."""


class Fault(ShardproofError, RuntimeError):
    """A failed check or operation. Every rank raises the same error."""


class LoadFault(Fault):
    """A model cannot be loaded (L1xx)."""


class ShardFault(Fault):
    """A rank's tensors are not what they should be (S2xx)."""


class TrainFault(Fault):
    """A training step or scoring failed (T3xx)."""


class ExportFault(Fault):
    """An export, a save or a resume failed (E4xx)."""


class RolloutFault(Fault):
    """A rollout engine or reward does not do what it should (R5xx)."""


_TIES = 3  # candidates among which the order of letters decides
# An untrusted checkpoint may have a million names: comparing with all of them would take minutes.
_COMPARED_NAMES, _COMPARED_CHARACTERS = 10_000, 200
_NEAR = 0.51  # of 1: 'prompt' has half of its letters in common with 'completion'

_BY_LETTER: dict[str, type[ShardproofError]] = {
    "C": ConfigError,
    "L": LoadFault,
    "S": ShardFault,
    "T": TrainFault,
    "E": ExportFault,
    "R": RolloutFault,
}


def error_for(findings: Sequence[Finding]) -> ShardproofError:
    """The exception of the stage that the first finding's code belongs to."""
    return _BY_LETTER.get(findings[0].code[0], Fault)(findings)


def fail(code: str, stage: str, message: str, **where: object) -> ShardproofError:
    """An exception with one finding; the caller raises it."""
    return error_for([Finding(code, stage, message, **where)])  # type: ignore[arg-type]


def choose(stage: str, key: str, value: object, valid: Iterable[str]) -> str:
    """`value` if it is one of `valid`, else a ConfigError that names the nearest valid one."""
    options = list(valid)
    if value in options:
        return str(value)
    hint = did_you_mean(str(value), options)
    raise fail("C001", stage, f"{key}={value!r} is not one of {', '.join(options)}.{hint}")


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """A sentence, after a space, that suggests the candidate closest to `name`; empty when none is close."""
    near = nearest(name, candidates)
    return f" Did you mean {near[0]!r}?" if near else ""


def nearest(name: str, candidates: Iterable[str], limit: int = 1) -> list[str]:
    """The `limit` candidates closest to `name`; empty when none is close."""
    name = name[:_COMPARED_CHARACTERS]
    some = itertools.islice(candidates, _COMPARED_NAMES)
    by_lower = {candidate.lower(): candidate for candidate in some if len(candidate) <= _COMPARED_CHARACTERS}
    near = difflib.get_close_matches(name.lower(), by_lower, n=max(limit, _TIES), cutoff=_NEAR)
    # Letters in another order are the likelier slip: "gpro" is grpo, not gspo.
    near.sort(key=lambda each: sorted(each) != sorted(name.lower()))
    return [by_lower[each] for each in near[:limit]]
