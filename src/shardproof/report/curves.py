"""Charts from metrics: which curves share one, which group it stands in, and no more points than a page can use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.report.read import Run

# Groups in the order of the page. A metric belongs to the first group that has its name or its first part.
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward and completions", ("reward", "teacher", "logps", "completion", "prompts")),
    ("Data", ("data", "pool")),
    ("Environment", ("environment",)),
    ("Evaluation", ("eval",)),
    (
        "Optimisation",
        (
            "loss",
            "kl",
            "grad_norm",
            "entropy",
            "clip_fraction",
            "lr",
            "value",
            "router",
            "version",
            "updates",
            "skipped",
        ),
    ),
    ("Engine match", ("canary", "mismatch", "correction", "ratio", "nucleus", "ledger")),
    ("Running ahead", ("lag", "ahead", "replica", "time/trainer_idle", "time/engine_idle")),
    ("Time", ("tokens_per_s", "time")),
    ("Memory", ("memory",)),
)
OTHER = "Other"
# These share the axes of the quantity's mean. Extremes do not: one outlier would flatten the other curves.
STATISTICS = ("mean", "median", "std", "group_std")
# So do these, which mean something beside each other.
BESIDE = {
    "lag/max": "lag/mean",
    "time/engine_idle": "time/trainer_idle",
    "teacher/kl_k3": "teacher/kl",
}
SHARES = ("replica", "pool", "data/share")  # all metrics under such a name share one chart: parts of a whole
FIRST_METRICS = (
    "reward/mean",
    "reward/accuracy",
    "teacher/kl",
    "eval/reward",
    "eval/reward/accuracy",
    "kl/mean",
    "loss/policy",
    "grad_norm",
    "tokens_per_s",
    "lag/mean",
    "time/trainer_idle",
)
ALWAYS_SHOWN = ("reward/mean", "eval/reward")  # a flat line of these is news
ERROR_SUFFIX = "_se"  # `NAME_se` is the standard error of `NAME`, drawn as a band around it
BOUND_SUFFIXES = ("_low", "_high")  # `NAME_low` and `NAME_high` are the ends of an interval around `NAME`
MAX_POINTS = 2000
_LARGEST = 1e100

Values = list[float | None]


@dataclass(frozen=True)
class Curve:
    """One metric of one run: the places in the run's steps where it has a value, and the values."""

    places: list[int]
    values: Values


def curves_of(run: Run) -> dict[str, Curve]:
    """Every metric of a run by name."""
    curves: dict[str, Curve] = {}
    for place, metrics in enumerate(run.metrics):
        for name, value in metrics.items():
            curve = curves.get(name)
            if curve is None:
                curve = curves[name] = Curve([], [])
            curve.places.append(place)
            curve.values.append(value)
    return curves


def charts_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The charts in the order of the page, the metrics that never changed, and how many points were left out."""
    curves = [curves_of(run) for run in runs]
    names = list(dict.fromkeys(name for each in curves for name in each))
    banded = {f"{name}{suffix}" for name in names for suffix in (ERROR_SUFFIX, *BOUND_SUFFIXES)}
    shown = [name for name in names if name not in banded]
    constant = {name: value for name in shown if (value := _constant(name, curves)) is not None}
    aliases = _duplicates([name for name in sorted(shown, key=_order) if name not in constant], curves)
    charts: dict[str, dict[str, Any]] = {}
    for name, others in aliases.items():
        # With several runs a chart has a curve per run, and one statistic.
        title = _shared_title(name, aliases) if len(runs) == 1 else name
        chart = charts.setdefault(title, {"title": title, "group": group_of(title), "same": [], "series": []})
        chart["same"] += others
        for number, each in enumerate(curves):
            if name in each:
                band = next(filter(None, (_band(alike, each) for alike in (name, *others))), None)
                chart["series"].append(
                    {"run": number, "name": name, **_series(each[name], band, runs[number])}
                )
    order = [title for title, _ in GROUPS] + [OTHER]
    return {
        "groups": [group for group in order if any(chart["group"] == group for chart in charts.values())],
        "charts": sorted(charts.values(), key=lambda chart: order.index(chart["group"])),
        "constant": [{"name": name, "value": value[0]} for name, value in sorted(constant.items())],
        "thinned": any(series["thinned"] for chart in charts.values() for series in chart["series"]),
        "max_points": MAX_POINTS,
    }


def _band(name: str, curves: dict[str, Curve]) -> tuple[Curve, Curve] | None:
    """How far below and above a metric's values the truth may be: its standard error, or the ends of its interval."""
    low, high = (curves.get(f"{name}{suffix}") for suffix in BOUND_SUFFIXES)
    if low is None or high is None or low.places != high.places:
        error = curves.get(f"{name}{ERROR_SUFFIX}")
        return None if error is None else (error, error)
    values = dict(zip(curves[name].places, curves[name].values))
    middle = Curve(low.places, [values.get(place) for place in low.places])
    return _distance(middle, low), _distance(high, middle)


def _distance(upper: Curve, lower: Curve) -> Curve:
    """How far apart two curves are; an interval's own rounding may put its end on the other side of its value."""
    ends = zip(upper.values, lower.values)
    return Curve(lower.places, [None if a is None or b is None else max(a - b, 0.0) for a, b in ends])


def _shared_title(name: str, shown: Iterable[str]) -> str:
    """The title of the chart that a metric of a single run stands in."""
    quantity, _, statistic = name.rpartition("/")
    if quantity in SHARES:
        return quantity
    title = f"{quantity}/mean" if statistic in STATISTICS else _beside(name)
    return title if title in shown else name


def _beside(name: str) -> str:
    """The metric that this one stands beside; itself if it stands alone."""
    if name.endswith("/rejected"):
        return name.removesuffix("rejected") + "chosen"
    return BESIDE.get(name, name)


def group_of(name: str) -> str:
    """The title of the group that a metric's chart stands in."""
    first = name.split("/")[0]
    for title, members in GROUPS:
        if name in members or first in members:
            return title
    if first.endswith(("_s", "_seconds")):
        return "Time"
    return "Memory" if first.endswith(("_bytes", "_gib", "_mib")) else OTHER


def _order(name: str) -> tuple[int, str, bool, str]:
    """Where a metric stands in its group; one that stands beside another follows it."""
    title = _beside(name)
    place = FIRST_METRICS.index(title) if title in FIRST_METRICS else len(FIRST_METRICS)
    return (place, _by_number(title), title != name, _by_number(name))


def _by_number(name: str) -> str:
    """A name that sorts by the numbers in it: pass@8 before pass@32."""
    return re.sub(r"\d+", lambda found: found[0].zfill(9), name)


def _constant(name: str, curves: Sequence[dict[str, Curve]]) -> tuple[float | None] | None:
    """(the one value that a metric has at every step of every run,), or None if it changes or is seen once only."""
    lists = [each[name].values for each in curves if name in each]
    first = lists[0][0]
    if name in ALWAYS_SHOWN or sum(map(len, lists)) < 2:
        return None
    return (first,) if all(values.count(first) == len(values) for values in lists) else None


def _duplicates(names: Iterable[str], curves: Sequence[dict[str, Curve]]) -> dict[str, list[str]]:
    """Each metric with the later ones that have the same values at the same steps in every run."""
    kept: dict[str, list[str]] = {}
    alike: dict[tuple[Any, ...], list[str]] = {}  # metrics that have the same first and last values
    for name in names:
        found = [each.get(name) for each in curves]
        ends = tuple(None if curve is None else (curve.values[0], curve.values[-1]) for curve in found)
        # One point says little about a curve: two metrics may agree in it by chance.
        is_long = any(curve is not None and len(curve.places) > 1 for curve in found)
        others = alike.setdefault(ends, []) if is_long else []
        first = next((other for other in others if [each.get(other) for each in curves] == found), None)
        if first is not None:
            kept[first].append(name)
        else:
            others.append(name)
            kept[name] = []
    return kept


def _series(curve: Curve, band: tuple[Curve, Curve] | None, run: Run) -> dict[str, Any]:
    places = thin(curve.values)
    steps = [curve.places[place] for place in places]
    series: dict[str, Any] = {
        "values": [_short(curve.values[place]) for place in places],
        "missing": curve.values.count(None),
        "thinned": len(places) < len(curve.values),
    }
    if len(steps) != len(run.steps):  # places of all steps need not be said
        series["places"] = [after - before for before, after in zip([0, *steps], steps)]
    if band is not None:
        ends = zip(band[0].places, zip(band[0].values, band[1].values))
        reach = {step: [_short(below), _short(above)] for step, (below, above) in ends if below is not None}
        series["band"] = [reach.get(step) for step in steps]
    return series


def thin(values: Values, limit: int = MAX_POINTS) -> list[int]:
    """The places to draw: all of them, or the smallest, the largest and a missing value of each of `limit / 2` buckets."""
    if len(values) <= limit:
        return list(range(len(values)))
    num_buckets = limit // 2
    chosen = {0, len(values) - 1}
    for bucket in range(num_buckets):
        begin, end = (len(values) * edge // num_buckets for edge in (bucket, bucket + 1))
        bucket_values = values[begin:end]
        known = [value for value in bucket_values if value is not None]
        if known:
            chosen |= {begin + bucket_values.index(min(known)), begin + bucket_values.index(max(known))}
        if len(known) < len(bucket_values):
            chosen.add(begin + bucket_values.index(None))
    return sorted(chosen)


def _short(value: float | None) -> float | int | None:
    """Six digits are more than a curve shows, and half the bytes of seventeen."""
    # Coordinates of larger numbers overflow; to a reader they are not finite.
    if value is None or abs(value) > _LARGEST:
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
