"""A run whose hosts die and come back, against one that is left alone: the numbers must be the same, bit for bit.

Hosts are Linux namespaces on one machine (tests/hosts). A host that dies loses its network and every process at once;
a moment later it is back, and the same command is started on it. Which host dies at which step is drawn from the seed.
Needs root, iproute2 and util-linux.

    python -m benchmarks.host_deaths --json docs/data/host-deaths.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    write_json,
)
from tests.hosts.cluster import PORT, Cluster, Host, Program, tiny_run

_LOST_AFTER_S = 5
_DOWN_S = (0.5, 4.0)  # for how long a host stays away
_PATIENCE_S = 900.0
_TRAINERS = ("a", "b")


@dataclass
class Death:
    """One host's death, as it was planned and as it went."""

    host: str
    after_step: int
    into_step_s: float  # from the moment that the step was reported
    down_s: float
    until_next_step_s: float = 0.0  # from the death to the first step that was trained afterwards
    resumed_from_step: int = 0


@dataclass
class Outcome:
    """What a run left behind."""

    seconds: float
    metrics: str  # the digest of metrics.jsonl without time/*
    weights: str  # the digest of the saved model
    checkpoint: str  # the digest of the newest checkpoint: weights, moments and counters of all ranks
    num_steps: int
    restarts: int  # that the launcher counted


def draw_deaths(seed: int, num_deaths: int, num_steps: int) -> list[Death]:
    """Deaths at different steps, in order; never after the last step."""
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(1, num_steps - 1), num_deaths))
    return [
        Death(draw.choice(_TRAINERS), step, round(draw.uniform(0, 0.5), 2), round(draw.uniform(*_DOWN_S), 2))
        for step in steps
    ]


def run_training(num_steps: int, save_every: int, deaths: Sequence[Death]) -> tuple[Outcome, str]:
    """A run on two hosts that meet on a third, disturbed by the deaths; and what the hosts printed."""
    with Cluster(1 + len(_TRAINERS), hostnames=("head", *_TRAINERS)) as cluster:
        assert cluster.shared is not None
        recipe = tiny_run(cluster.shared, steps=num_steps)
        secret = {"SHARDPROOF_RDZV_ID": cluster.secret}
        cluster["head"].start("shardproof", "rendezvous", "--rdzv-endpoint", f"head:{PORT}", env=secret)
        began = time.monotonic()

        def start(host: Host) -> Program:
            words = (f"output.save_every={save_every}", "--lost-after", str(_LOST_AFTER_S))
            restarts = max(2 * len(deaths), 1)
            return cluster.train(recipe, *words, hosts=[host], nnodes=len(_TRAINERS), max_restarts=restarts)[
                0
            ]

        programs = {name: start(cluster[name]) for name in _TRAINERS}
        folder = cluster.shared / "run"
        for death in deaths:
            _wait_for_step(folder, death.after_step, programs, cluster)
            time.sleep(death.into_step_s)
            host, died_at = cluster[death.host], time.monotonic()
            host.die()
            time.sleep(death.down_s)
            last = _last_step(folder)
            host.mend()
            programs[death.host] = start(host)
            death.resumed_from_step = _wait_until_resumed(folder, last, programs, cluster)
            death.until_next_step_s = round(time.monotonic() - died_at, 1)
            print(f"  {death}", flush=True)
        codes = {name: program.wait(_PATIENCE_S) for name, program in programs.items()}
        seconds = time.monotonic() - began
        said = cluster.transcript()
        assert set(codes.values()) == {0}, f"exit codes {codes}:\n{said}"
        counts = [int(count) for count in re.findall(r"\(restart (\d+) of", said)]
        return Outcome(round(seconds, 1), *_digests(folder), max(counts, default=0)), said


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last line may be half written
    return [json.loads(line) for line in lines]


def _last_step(folder: Path) -> int:
    return max((int(row["step"]) for row in _rows(folder)), default=0)


def _wait_for_step(folder: Path, step: int, programs: dict[str, Program], cluster: Cluster) -> None:
    end = time.monotonic() + _PATIENCE_S
    while _last_step(folder) < step:
        _check(programs, end, cluster)
        time.sleep(0.02)


def _wait_until_resumed(folder: Path, last: int, programs: dict[str, Program], cluster: Cluster) -> int:
    """The step whose checkpoint the run went on from, once it has trained a step more."""
    end = time.monotonic() + _PATIENCE_S
    while (now := _last_step(folder)) == last:  # resuming drops the rows after the checkpoint
        _check(programs, end, cluster)
        time.sleep(0.02)
    resumed = min(now, last)
    _wait_for_step(folder, resumed + 1, programs, cluster)
    return resumed


def _check(programs: dict[str, Program], end: float, cluster: Cluster) -> None:
    for name, program in programs.items():
        assert program.is_running, f"host {name}'s command ended early:\n{cluster.transcript()}"
    assert time.monotonic() < end, f"no progress in {_PATIENCE_S:.0f} s:\n{cluster.transcript()}"


def _digests(folder: Path) -> tuple[str, str, str, int]:
    rows = _rows(folder)
    kept = [
        [row["step"], {name: row["metrics"][name] for name in row["metrics"] if not _is_time(name)}]
        for row in rows
    ]
    newest = max((folder / "checkpoints").glob("step-*"))
    return (
        hashlib.sha256(json.dumps(kept).encode()).hexdigest(),
        _digest_files(folder / "model", "*.safetensors"),
        _digest_files(newest, "rank-*.bin"),
        len(rows),
    )


def _is_time(name: str) -> bool:
    return name.startswith("time/") or name == "tokens_per_s"


def _digest_files(folder: Path, pattern: str) -> str:
    digest = hashlib.sha256()
    files = sorted(folder.glob(pattern))
    assert files, f"no {pattern} in {folder}"
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--log", type=Path, help="write there what the hosts of the disturbed run printed")
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)
    undisturbed, _ = run_training(options.steps, options.save_every, [])
    print(f"undisturbed: {undisturbed}", flush=True)
    deaths = draw_deaths(options.seed, options.deaths, options.steps)
    disturbed, said = run_training(options.steps, options.save_every, deaths)
    print(f"disturbed: {disturbed}")
    if options.log is not None:
        options.log.write_text(said)
    same = {
        name: getattr(undisturbed, name) == getattr(disturbed, name)
        for name in ("metrics", "weights", "checkpoint")
    }
    print(f"the same bits: {same}")
    if options.json is not None:
        results = {
            "hosts": len(_TRAINERS),
            "ranks_per_host": 1,
            "steps": options.steps,
            "save_every": options.save_every,
            "seed": options.seed,
            "lost_after_s": _LOST_AFTER_S,
            "deaths": [asdict(death) for death in deaths],
            "undisturbed": asdict(undisturbed),
            "disturbed": asdict(disturbed),
            "same_bits": same,
        }
        write_json(options.json, environment, results)
    raise SystemExit(0 if all(same.values()) else 1)


if __name__ == "__main__":
    main()
