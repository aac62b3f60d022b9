"""How often each prompt was solved: a file that `shardproof data --measure` writes, and filters and pools read."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shardproof.config.schema import Recipe
from shardproof.files import write_atomic
from shardproof.rl.data import Prompt, rows_digest
from shardproof.rl.sources.readers import read_rows
from shardproof.rl.sources.text_files import unusable

_MAX_SAMPLES = 2**40
_MEASURE = "measure them with `shardproof data RECIPE --measure N`"


def key_of(prompt: Prompt) -> str:
    """What a pass rate is known by: the prompt as the model sees it and its answer, wherever the row lies."""
    if not prompt.tokens:  # an environment brings it
        return rows_digest([prompt])[:16]
    answer = prompt.row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)  # as it stands in a cell of a table
    said = json.dumps([prompt.text, answer], default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def write_rates(path: Path, prompts: Sequence[Prompt], counts: Mapping[int, tuple[int, int]]) -> None:
    """Write {row: (solved, judged)} of these prompts, a line each. Rows that nothing judged have null as their pass rate."""
    lines = []
    for row, (solved, num) in sorted(counts.items()):
        prompt = prompts[row]
        line = {
            "key": key_of(prompt),
            "pass_rate": solved / num if num else None,
            "samples": num,
            "prompt": prompt.text[:200],
        }
        lines.append(json.dumps(line, ensure_ascii=False))
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def read_rates(path: str) -> dict[str, float | None]:
    """{key: pass rate, None if nothing judged the prompt} of a file; raises C005 with the line that is no pass rate.

    Rows that are alike have a line each: their pass rate is that of all samples together.
    """
    found: dict[str, list[tuple[float, float]]] = {}  # {key: [(pass rate, samples)]}
    for place, row in read_rows(path):
        rate = row.get("pass_rate", "")
        if not isinstance(row.get("key"), str) or isinstance(rate, bool | str):
            raise unusable(f"{place} is not a pass rate: it needs a 'key' and a 'pass_rate'.", _MEASURE)
        if rate is not None and not (isinstance(rate, int | float) and 0.0 <= rate <= 1.0):
            raise unusable(f"{place}: the pass rate {rate} is not between 0 and 1.", _MEASURE)
        num = row.get("samples", 1)
        if isinstance(num, bool) or not isinstance(num, int) or not 0 <= num <= _MAX_SAMPLES:
            raise unusable(f"{place}: 'samples' is no number of completions.", _MEASURE)
        found.setdefault(row["key"], []).extend([] if rate is None else [(float(rate), max(num, 1))])
    return {key: _together(each) for key, each in found.items()}


def _together(measured: Sequence[tuple[float, float]]) -> float | None:
    if len(measured) < 2:
        return measured[0][0] if measured else None  # as it was written, to the last bit
    return sum(rate * num for rate, num in measured) / sum(num for _, num in measured)


def select(
    recipe: Recipe, prompts: Iterable[Prompt], dropped: Counter[str]
) -> tuple[list[Prompt], list[float | None]]:
    """(the prompts that `data.pass_rate_between` keeps, the pass rate of each as far as it is known)."""
    data, prompts = recipe.data, list(prompts)
    if data.pass_rates is None:
        return prompts, []
    known = read_rates(data.pass_rates)
    keys = [key_of(prompt) for prompt in prompts]
    rates = [known.get(key) for key in keys]
    missing = sum(key not in known for key in keys)
    if missing == len(prompts):
        message = f"data.pass_rates={data.pass_rates!r} knows none of the {len(prompts)} prompts."
        raise unusable(message, f"{_MEASURE} for this data and chat template")
    if data.pass_rate_between is None:
        return prompts, rates
    if missing:
        message = f"data.pass_rates={data.pass_rates!r} lacks {missing} of {len(prompts)} prompts."
        raise unusable(message, f"{_MEASURE} for all rows")
    low, high = data.pass_rate_between
    measured = [(prompt, rate) for prompt, rate in zip(prompts, rates) if rate is not None]
    kept = [(prompt, rate) for prompt, rate in measured if low <= rate <= high]
    if len(measured) < len(prompts):
        dropped["that nothing judged when pass rates were measured"] += len(prompts) - len(measured)
    if len(kept) < len(measured):
        dropped[f"with a pass rate outside {low:g} to {high:g}"] += len(measured) - len(kept)
    if not kept:
        message = f"no prompt has a pass rate from {low:g} to {high:g}."
        raise unusable(message, "widen data.pass_rate_between")
    return [prompt for prompt, _ in kept], [rate for _, rate in kept]
