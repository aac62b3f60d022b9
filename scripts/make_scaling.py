"""The tables and the plot of docs/scaling.md, from docs/data/scaling.json and what `shardproof estimate` computes.

python scripts/make_scaling.py          # print the tables
python scripts/make_scaling.py --write  # put them into the page, and draw the plot
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from make_sizing import MODELS, dense
from transformers import AutoConfig

from shardproof.rl.sizing.model import Sharding, estimate, shape_of

ROOT = Path(__file__).resolve().parents[1]
PAGE, DATA = ROOT / "docs" / "scaling.md", ROOT / "docs" / "data" / "scaling.json"
PLOT = ROOT / "docs" / "images" / "scaling.svg"
PHASES = ("start", "load", "attest", "rollout", "step", "metrics", "sync", "save")
REPEATED = ("rollout", "step", "metrics", "sync")
NAMES = {"dense": "Dense", "moe": "Mixture of experts"}
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
TOKENS, MAX_SHARDS, GIB = 8192, 128, 2**30
LARGE = {
    "30B-A3B": MODELS["30B-A3B (experts)"],
    "235B-A22B": MODELS["30B-A3B (experts)"]
    | dense(4096, 12288, 94, 64)
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4,
       "moe_intermediate_size": 1536},
}  # fmt: skip
TERMS = {
    "1": lambda n: 1.0,
    "log2 n": math.log2,
    "n": lambda n: n,
    "n log2 n": lambda n: n * math.log2(n),
}


def size_of(num_bytes: float) -> str:
    """Bytes for a cell."""
    return f"{num_bytes / 1000:,.1f} KB" if num_bytes < 10**6 else f"{num_bytes / 10**6:,.2f} MB"


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def table_head(cells: list[str]) -> str:
    return row(cells) + "| --- |" + " ---: |" * (len(cells) - 1) + "\n"


def traffic_table(counts: dict[str, Any], fitted: dict[str, Any], whose: str) -> str:
    """Bytes that a rank sends and receives, by phase and number of ranks."""
    text = table_head(["phase", "messages", *counts, "512", "2,048"])
    last = list(counts.values())[-1]["phases"]
    for phase in (*PHASES, "**a whole step**"):
        parts = (phase,) if phase in PHASES else REPEATED
        cells = [phase, str(sum(last[part]["messages"] for part in parts))]
        for size in counts.values():
            cells.append(size_of(sum(size["phases"][part][whose]["control"] for part in parts)))
        for size in ("512", "2048"):
            cells.append(size_of(sum(fitted[part][whose]["carried"][size] for part in parts)))
        text += row(cells)
    return text


def short(fitted: dict[str, Any], counts: dict[str, Any]) -> str:
    """Messages and bytes of a whole step."""
    text = table_head(["a whole step, per rank", "8 ranks", "32", "512", "2,048"])
    for whose, name in (("mean", "mean over the ranks"), ("rank 0", "rank 0")):
        cells = [name]
        cells += [
            size_of(sum(counts[n]["phases"][p][whose]["control"] for p in REPEATED)) for n in ("8", "32")
        ]
        cells += [size_of(sum(fitted[p][whose]["carried"][n] for p in REPEATED)) for n in ("512", "2048")]
        text += row(cells)
    return text


def fit_table(fitted: dict[str, Any]) -> str:
    """The fits of each phase."""
    text = table_head(["phase", "mean over ranks", "off by", "rank 0", "off by"])
    for phase in PHASES:
        cells = [phase]
        for whose in ("mean", "rank 0"):
            factors = fitted[phase][whose]["factors"]
            cells.append(
                " + ".join(
                    f"{factor:,.0f}{'' if name == '1' else f' {name}'}" for name, factor in factors.items()
                )
            )
            cells.append(f"{100 * fitted[phase][whose]['error']:.1f}%")
        text += row(cells)
    return text


def memory_table(name: str) -> str:
    """GiB per rank of a model, cut over all ranks and over at most 128 of them."""
    config = dict(LARGE[name])
    shape = shape_of(AutoConfig.for_model(config.pop("model_type"), **config), "policy")
    text = table_head(
        [
            "ranks",
            "weights",
            "gradients",
            "optimizer",
            "gathered",
            "peak of a step",
            f"peak, {MAX_SHARDS} shards at most",
        ]
    )
    for ranks in RANKS:
        found = [
            estimate(
                shape, Sharding(checkpoint_activations=True, on_gpu=True, replicate=replicate), ranks, TOKENS
            )
            for replicate in (1, max(ranks // MAX_SHARDS, 1))
        ]
        one = found[0]
        parts = (
            one.parameters,
            one.gradients,
            one.optimizer,
            one.gathered,
            one.step_peak,
            found[1].step_peak,
        )
        text += row([f"{ranks:,}", *(f"{part / GIB:,.1f}" for part in parts)])
    return text


def plot(data: dict[str, Any]) -> str:
    """Bytes of a phase over the number of ranks, both axes logarithmic: what was counted, and the fits."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1020 470" width="1020" height="470" '
        'font-family="system-ui, sans-serif" role="img" '
        'aria-label="Control bytes per rank of each phase from 4 to 2,048 ranks">',
        '<rect width="1020" height="470" fill="#ffffff"/>',
    ]
    parts += _panel(data, "mean", "Mean over the ranks", 70)
    parts += _panel(data, "rank 0", "Rank 0", 570)
    return "\n".join([*parts, "</svg>"]) + "\n"


COLOURS = dict(zip((*PHASES, "a whole step"), ("#868e96", "#4c6ef5", "#f08c00", "#37b24d", "#e03131", "#1098ad",
                                               "#ae3ec9", "#74b816", "#212529"), strict=True))  # fmt: skip
WIDTH, HEIGHT, TOP, LOW, HIGH = 330, 370, 50, 2.0, 8.0  # powers of ten


def _panel(data: dict[str, Any], whose: str, title: str, left: int) -> list[str]:
    counts, fitted = data["counts"]["moe"], data["fitted"]["moe"]

    def x(ranks: float) -> float:
        return left + WIDTH * (math.log2(ranks) - 2) / 9

    def y(num_bytes: float) -> float:
        return TOP + HEIGHT * (HIGH - math.log10(max(num_bytes, 10**LOW))) / (HIGH - LOW)

    out = [_text(left, 28, title, size=15, weight=600)]
    for power in range(int(LOW), int(HIGH) + 1):
        label = {2: "100 B", 3: "1 KB", 4: "10 KB", 5: "100 KB", 6: "1 MB", 7: "10 MB", 8: "100 MB"}[power]
        colour, dash = ("#e03131", ' stroke-dasharray="5 4"') if power == 6 else ("#dee2e6", "")
        out.append(
            f'<line x1="{left}" x2="{left + WIDTH}" y1="{y(10**power):.1f}" y2="{y(10**power):.1f}" stroke="{colour}"{dash}/>'
        )
        out.append(_text(left - 8, y(10**power) + 4, label, anchor="end"))
    for ranks in (4, 8, 16, 32, 128, 512, 2048):
        out.append(_text(x(ranks), TOP + HEIGHT + 20, f"{ranks:,}", anchor="middle"))
    out.append(_text(left + WIDTH / 2, TOP + HEIGHT + 42, "ranks", anchor="middle"))
    ends: list[tuple[float, str]] = []
    for name, colour in COLOURS.items():
        phases = (name,) if name in PHASES else REPEATED

        def carried(n: float, phases: tuple[str, ...] = phases) -> float:
            terms = (f * TERMS[t](n) for p in phases for t, f in fitted[p][whose]["factors"].items())
            return (n - 1) / n * sum(terms)

        line = " ".join(f"{x(2**e):.1f},{y(carried(2**e)):.1f}" for e in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11))
        width = 3 if name == "a whole step" else 1.5
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        for size, row_ in counts.items():
            if "as many" in row_:
                found = sum(row_["as many"][phase][whose]["control"] for phase in phases)
                out.append(f'<circle cx="{x(int(size)):.1f}" cy="{y(found):.1f}" r="3" fill="{colour}"/>')
        ends.append((y(carried(2048)), name))
    at = -math.inf
    for height, name in sorted(ends):
        at = max(height, at + 14)
        out.append(_text(left + WIDTH + 6, at + 4, name, colour=COLOURS[name]))
    return out


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: int = 400,
    colour: str = "#212529",
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def sections(data: dict[str, Any]) -> dict[str, str]:
    """{name of a place in the page: what stands there}."""
    found = {"short": short(data["fitted"]["moe"], data["counts"]["moe"])}
    for model, name in NAMES.items():
        counts, fitted = data["counts"][model], data["fitted"][model]
        found[f"traffic-{model}"] = (
            f"{name}, mean over the ranks:\n\n{traffic_table(counts, fitted, 'mean')}\n"
            f"{name}, rank 0:\n\n{traffic_table(counts, fitted, 'rank 0')}"
        )
    found["fits"] = fit_table(data["fitted"]["moe"])
    for name in LARGE:
        found[f"memory-{name}"] = memory_table(name)
    return found


def main() -> None:
    data = json.loads(DATA.read_text())
    found = sections(data)
    if "--write" not in sys.argv:
        print("\n".join(found.values()))
        return
    text = PAGE.read_text()
    for name, part in found.items():
        begin, end = f"<!-- {name}: scripts/make_scaling.py writes it -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{part}\n{end}{after}"
    PAGE.write_text(text)
    PLOT.write_text(plot(data))


if __name__ == "__main__":
    main()
