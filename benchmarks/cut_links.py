"""A link between two hosts that is cut at a random moment, many times: is it named on both hosts, and in time?

Hosts are Linux namespaces on one machine (tests/hosts). A cut link loses every packet and tells nobody. Which host loses
its link, and how long after its ranks were started, is drawn from the seed: while ranks start, load, sample, train, sync
or save. A trial is good if both hosts end with the exit code of a finding and one finding each that names the other host,
within the deadline and 30 s. Needs root, iproute2 and util-linux.

    python -m benchmarks.cut_links --json docs/data/cut-links.json
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from tests.hosts.cluster import Cluster, Program, tiny_run

_STARTED = "importing torch"  # what rank 0 says first
_MARGIN_S = 30.0
_FAILED = 3
_PATIENCE_S = 300.0


@dataclass
class Trial:
    """One cut link, as it was planned and as it went; lists are by host."""

    host: str  # whose link is cut
    after_s: float  # since the ranks were started
    last_step: int = 0  # that was trained before
    findings: list[list[str]] = field(default_factory=list)
    named_after_s: list[float | None] = field(default_factory=list)  # from the cut to the finding
    ended_after_s: list[float] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def is_good(self, limit_s: float) -> bool:
        return (
            self.exit_codes == [_FAILED, _FAILED]
            and [len(found) for found in self.findings] == [1, 1]
            and all(f"host {other}" in found[0] for other, found in zip("ba", self.findings, strict=True))
            and all(found[0].startswith("T308 ") for found in self.findings)
            and max(self.ended_after_s) <= limit_s
        )

    @property
    def stages(self) -> str:
        return ", ".join(found[0].split()[1].rstrip(":") if found else "none" for found in self.findings)


def draw_trials(seed: int, number: int, longest_s: float) -> list[Trial]:
    draw = random.Random(seed)
    return [Trial(draw.choice("ab"), round(draw.uniform(0, longest_s), 2)) for _ in range(number)]


def run_trial(cluster: Cluster, trial: Trial, deadline_s: float, lost_after_s: float) -> str:
    """Start a run, cut the link and wait for both hosts' ends; what the hosts printed."""
    assert cluster.shared is not None
    recipe = tiny_run(cluster.shared, steps=2000, deadline_s=deadline_s)
    programs = cluster.train(recipe, "--lost-after", f"{lost_after_s:g}")
    programs[0].wait_for(_STARTED, _PATIENCE_S)
    time.sleep(trial.after_s)
    cut_at = time.monotonic()
    cluster[trial.host].cut()
    trial.last_step = max(map(int, re.findall(r" step (\d+)/", programs[0].output())), default=0)
    _wait_for_ends(programs, trial, cut_at)
    said = cluster.transcript()
    cluster.reset()
    return said


def _wait_for_ends(programs: Sequence[Program], trial: Trial, cut_at: float) -> None:
    named: dict[Program, float] = {}
    ended: dict[Program, float] = {}
    while len(ended) < len(programs) and time.monotonic() - cut_at < _PATIENCE_S:
        for program in programs:
            is_running, now = program.is_running, round(time.monotonic() - cut_at, 1)
            if program not in named and _findings(program):
                named[program] = now
            if program not in ended and not is_running:
                ended[program] = now
        time.sleep(0.05)
    trial.findings = [_findings(program) for program in programs]
    trial.named_after_s = [named.get(program) for program in programs]
    trial.ended_after_s = [ended.get(program, float("inf")) for program in programs]
    trial.exit_codes = [program.wait(1) if program in ended else -1 for program in programs]


def _findings(program: Program) -> list[str]:
    return re.findall(r"^[A-Z]\d{3} .*", program.output(), re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--deadline", type=float, default=8.0, metavar="S", help="train.deadline_s")
    parser.add_argument("--lost-after", type=float, default=12.0, metavar="S")
    parser.add_argument("--within", type=float, default=8.0, metavar="S", help="the latest moment of a cut")
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="write there what the hosts printed")
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)
    limit_s = options.deadline + _MARGIN_S
    trials = draw_trials(options.seed, options.trials, options.within)
    with Cluster(2) as cluster:
        for number, trial in enumerate(trials):
            said = run_trial(cluster, trial, options.deadline, options.lost_after)
            print(f"{number + 1:2d} {'good' if trial.is_good(limit_s) else 'BAD'} {trial}", flush=True)
            if options.log is not None:
                options.log.mkdir(parents=True, exist_ok=True)
                (options.log / f"{number + 1:02d}.log").write_text(said + "\n")
    num_good = sum(trial.is_good(limit_s) for trial in trials)
    _print_trials(trials, num_good, limit_s)
    if options.json is not None:
        results = {
            "deadline_s": options.deadline,
            "lost_after_s": options.lost_after,
            "limit_s": limit_s,
            "seed": options.seed,
            "num_trials": len(trials),
            "num_good": num_good,
            "trials": [asdict(trial) for trial in trials],
        }
        write_json(options.json, environment, results)
    raise SystemExit(num_good < len(trials))


def _print_trials(trials: Sequence[Trial], num_good: int, limit_s: float) -> None:
    rows = [
        [
            f"{number + 1}",
            trial.host,
            f"{trial.after_s:.1f}",
            f"{trial.last_step}",
            trial.stages,
            " ".join("none" if each is None else f"{each:.1f}" for each in trial.named_after_s),
            " ".join(f"{each:.1f}" for each in trial.ended_after_s),
        ]
        for number, trial in enumerate(trials)
    ]
    header = ["trial", "cut off", "after s", "last step", "stages", "named after s", "ended after s"]
    title = f"{num_good} of {len(trials)} cut links were named on both hosts within {limit_s:g} s"
    print_table(title, header, rows)


if __name__ == "__main__":
    main()
