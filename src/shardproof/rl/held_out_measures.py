"""What completions of held-out prompts say: unbiased pass@k, majority votes, and how far chance could have moved them."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from shardproof.rl.rewards.answers import EXACT_FLOATS, last_written

Z = 1.959963984540054  # of a 95% interval
_BOX = "\\boxed{"
_PLAIN = re.compile(
    r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)  # one number and no list
Reader = Callable[[str], str | None]  # of a completion's answer
_READS = {"numeric": "number", "math_verify": "boxed", "exact_match": "text"}  # by the reward function


@dataclass(frozen=True)
class Answered:
    """One prompt's completions in the order they were sampled."""

    scores: tuple[float | None, ...]  # of the first reward function, raw; None if it failed
    answers: tuple[str | None, ...] = ()  # as the majority vote reads them; None: there is none


def pass_at(num: int, num_right: int, k: int) -> float:
    """The chance that k of `num` completions, drawn without putting back, have a right one: 1 - C(n-c, k) / C(n, k)."""
    if num < k:
        raise ValueError(f"pass@{k} of {num} completions")
    if num - num_right < k:
        return 1.0
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def interval(values: Sequence[float], num_completions: int) -> tuple[float, float]:
    """A 95% interval (Wilson's) of the mean of one value between 0 and 1 per prompt.

    Values between 0 and 1 vary less than coin flips. They count as the number of flips that would vary as much, which is
    never more than the completions that were made. A few values say little of how much they vary, so the number shrinks as
    Student's t widens (Korn and Graubard), but never below that of the values.
    """
    num, mean = len(values), statistics.fmean(values)
    size = float(num)
    if num > 1 and 0.0 < mean < 1.0:
        spread = statistics.variance(values) / num
        flips = mean * (1.0 - mean) / spread if spread > 0 else math.inf
        size = max(size, min(flips, float(num_completions)) * (Z / _students_t(num - 1)) ** 2)
    centre = mean + Z * Z / (2 * size)
    half = Z * math.sqrt(mean * (1 - mean) / size + Z * Z / (4 * size * size))
    scale = 1 + Z * Z / size
    # Rounding must not move an end past the mean: at 0 and 1 they are the same.
    return max(0.0, min((centre - half) / scale, mean)), min(1.0, max((centre + half) / scale, mean))


def _students_t(freedom: int) -> float:
    """What Z is for that many degrees of freedom: within 3% from 2 on (Abramowitz and Stegun, 26.7.5)."""
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def reader(how: str, first_reward: str) -> Reader | None:
    """What reads the answer of a completion for the majority vote; None if there is no vote."""
    how = _READS.get(first_reward, "none") if how == "auto" else how
    return {"number": _number, "boxed": _boxed, "text": _text, "none": None}[how]


def vote(answered: Answered) -> float | None:
    """The score of the answer that most completions give, of the earliest if several do; None if there is none.

    It is that of the answer's first completion whose reward did not fail.
    """
    counts = Counter(answer for answer in answered.answers if answer is not None)
    if not counts:
        return None
    chosen, _ = counts.most_common(1)[0]  # those that tie are in the order in which they came
    scores = (s for s, answer in zip(answered.scores, answered.answers, strict=True) if answer == chosen)
    return next((score for score in scores if score is not None), None)


def measure(
    prompts: Sequence[Answered], ks: Sequence[int], threshold: float, votes: bool, num_samples: int
) -> dict[str, float]:
    """pass@k with its interval for each k, the mean share of right completions, and the majority's, over the prompts."""

    def is_right(score: float | None) -> bool:
        return score is not None and score >= threshold

    right = [(len(each.scores), sum(map(is_right, each.scores))) for each in prompts]
    num_completions = sum(num for num, _ in right)
    found: dict[str, float] = {}
    for k in ks:
        values = [pass_at(num, good, k) for num, good in right]
        found[f"pass@{k}"] = statistics.fmean(values)
        found[f"pass@{k}_low"], found[f"pass@{k}_high"] = interval(values, num_completions)
    if num_samples > 1:
        found[f"avg@{num_samples}"] = statistics.fmean(good / num for num, good in right)
        if votes:
            found[f"maj@{num_samples}"] = statistics.fmean(float(is_right(vote(each))) for each in prompts)
    return found


def _number(text: str) -> str | None:
    written = last_written(text)
    if written is None:
        return None
    found = float(written) + 0.0  # 0 and -0 are one answer
    return str(Fraction(written)) if EXACT_FLOATS <= abs(found) < math.inf else repr(found)


def _text(text: str) -> str | None:
    return text.strip() or None


def _boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}; without one, the last number."""
    start = text.rfind(_BOX)
    if start < 0:
        return _number(text)
    depth = 1
    for place in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            inner = "".join(text[start + len(_BOX) : place].split())
            return _number(inner) if _PLAIN.fullmatch(inner) else inner or None
    return None
