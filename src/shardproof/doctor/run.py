"""An examination on the ranks: layouts one after the other, each stage timed and weighed."""

from __future__ import annotations

import gc
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM

from shardproof import __version__
from shardproof.dist.collectives import broadcast, exchange, together
from shardproof.dist.hosts import hosts
from shardproof.dist.launch import init_distributed, resolve_device, shut_down
from shardproof.doctor.matrix import matrix_of
from shardproof.doctor.probes import STAGES, Patient, Probe
from shardproof.doctor.request import Layout, Request, config_file
from shardproof.doctor.results import Examination, Report, Stage
from shardproof.errors import ConfigError, ShardproofError
from shardproof.model.roles import POLICY
from shardproof.model.skeleton import build_skeleton
from shardproof.shard.memory import PeakMemory
from shardproof.terminal import LIBRARIES, Bar, attached
from shardproof.text import sanitise_logging
from shardproof.weights.source import read_config

logger = logging.getLogger(__name__)

_INTERRUPTED = 130  # as a shell's, after Ctrl-C
# After these the ranks' connections are lost, and no further stage can run.
_LOST = {"T308", "E406"}


def examine(request: Request, progress: Path | None = None) -> Report:
    """Examine every layout. Collective: every rank; the report is the same on each."""
    started = time.perf_counter()
    init_distributed(request.device, timeout_s=request.timeout_s)
    # Deterministic draws: examining the same model twice gives the same report.
    torch.manual_seed(0)
    examinations: list[Examination] = []
    longest = 0
    with _model_folder(request) as folder:
        if isinstance(folder, Examination):
            examinations.append(folder)
        else:
            layouts = _layouts(request, folder)
            for number, layout in enumerate(layouts):
                reporter = _Reporter(request.matrix, number, len(layouts), layout, progress)
                examination, tokens = _examine(request, layout, folder, reporter)
                examinations.append(examination)
                longest = max(longest, tokens)
                if {finding.code for finding in examinations[-1].findings} & _LOST:
                    break
    seconds = time.perf_counter() - started
    return Report(request.label, _facts(request, longest), tuple(examinations), seconds)


@dataclass(frozen=True)
class _Reporter:
    """Reports which layout and which probe of how many is running."""

    is_matrix: bool
    number: int
    num_layouts: int
    layout: Layout
    folder: Path | None  # where each rank notes what it is at, for the launcher to read if the rank dies

    def begin(self, probe: int, name: str) -> None:
        if self.folder is not None:
            self.folder.joinpath(f"rank-{dist.get_rank()}").write_text(f"{name} ({self.layout})")
        if probe == 0 or not self.is_matrix:
            where = f"layout {self.number + 1} of {self.num_layouts}: {self.layout}"
            text = where if self.is_matrix else f"{name}, {where}"
            logger.info("%s", text, extra={"bar": self._bar(probe, text)})

    def end(self) -> None:
        if self.number + 1 == self.num_layouts:
            bar = self._bar(len(STAGES), "", ended=True)
            logger.info("%d %ss done", bar.done, bar.unit, extra={"bar": bar})

    def _bar(self, probe: int, text: str, ended: bool = False) -> Bar:
        if self.is_matrix:
            return Bar("layout", self.number + ended, self.num_layouts, text, ended)
        num = len(STAGES)
        return Bar("probe", self.number * num + probe, self.num_layouts * num, text, ended)


def _layouts(request: Request, folder: str) -> Sequence[Layout]:
    """What is to be examined. A matrix depends on what the model's config allows."""
    if not request.matrix:
        return request.layouts
    found: list[list[dict[str, Any]]] = exchange(
        [asdict(layout) for layout in matrix_of(request, folder)] if dist.get_rank() == 0 else []
    )
    return [Layout(**row) for row in found[0]]


def run_rank(request_json: str, progress: str, quiet: bool) -> dict[str, Any]:
    """One rank's examination, as the launcher starts it."""
    sanitise_logging()
    with attached(quiet, rank=int(os.environ["RANK"])) as terminal:
        terminal.adopt(*LIBRARIES)
        # The report says what they would.
        logging.getLogger("shardproof.train.trainer").setLevel(logging.WARNING)
        transformers.utils.logging.disable_progress_bar()
        try:
            return run_attached(request_json, progress)
        except KeyboardInterrupt:
            # At once: the terminal's Ctrl-C and the launcher's come one after the other, and other ranks may be gone.
            terminal.pause()
            os._exit(_INTERRUPTED)


def run_attached(request_json: str, progress: str | None = None) -> dict[str, Any]:
    """One rank's examination, in a process whose terminal is attached."""
    request = Request.from_json(json.loads(request_json))
    try:
        return examine(request, Path(progress) if progress else None).to_json()
    finally:
        shut_down()


def _facts(request: Request, longest: int) -> dict[str, str]:
    """What was examined; `longest` is the length of the longest sequence that was run, 0 if none was."""
    shorter = f" instead of {request.seq_len}: the model has no more positions"
    device = torch.cuda.get_device_name() if request.device == "cuda" else platform.machine()
    ranks, where = dist.get_world_size(), hosts()
    return {
        "role": request.role,
        "ranks": f"{ranks} on {where.place(range(ranks))}" if where.num > 1 else str(ranks),
        "device": f"{request.device} ({device})",
        "sequence length": f"{longest or 'none'}{shorter if 0 < longest < request.seq_len else ''}",
        "versions": f"shardproof {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
    }


@contextmanager
def _model_folder(request: Request) -> Iterator[str | Examination]:
    """The model's folder or hub id; for a config, a folder into which rank 0 saves random weights meanwhile.

    A config that cannot be built gives an examination that says so. Collective: every rank.
    """
    if request.source is not None:
        yield request.source
        return
    assert request.config is not None
    with tempfile.TemporaryDirectory(prefix="shardproof-doctor-") as own:
        folder = broadcast(own)
        try:
            with together("config"):
                if dist.get_rank() == 0:
                    _save_random(request, Path(folder))
        except ShardproofError as error:
            yield Examination("random weights", (Stage("config", findings=tuple(error.findings)),))
            return
        yield folder
        exchange("done")  # rank 0 must not delete files that another rank still reads


def _save_random(request: Request, folder: Path) -> None:
    """A checkpoint of the config with weights that transformers draws. Memory: the whole model, on rank 0."""
    assert request.config is not None
    path = config_file(request.config)
    config = read_config(path.parent, request.trust_remote_code, path.name)
    build_skeleton(
        config, role=POLICY, trust_remote_code=request.trust_remote_code
    )  # refuses what cannot be built
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=request.trust_remote_code
    )
    model.save_pretrained(folder)


def _examine(request: Request, layout: Layout, folder: str, reporter: _Reporter) -> tuple[Examination, int]:
    """One layout, stage by stage, and the length of its longest sequence.

    A stage that fails does not keep the later ones from running if they can.

    Collective: every rank.
    """
    patient = Patient(request, layout, folder)
    stages: list[Stage] = []
    for number, (name, probe) in enumerate(STAGES):
        reporter.begin(number, name)
        try:
            stages.append(_run_stage(name, probe, patient))
        except ConfigError as error:
            refused = Examination(str(layout), tuple(stages), tuple(patient.buffers), error.findings[0])
            return refused, patient.longest
        codes = {finding.code for finding in stages[-1].findings}
        if codes & _LOST or (name == "load" and codes) or (name == "stream" and patient.manifest is None):
            break
    reporter.end()
    buffers, longest = tuple(patient.buffers), patient.longest
    del patient
    gc.collect()
    return Examination(str(layout), tuple(stages), buffers), longest


def _run_stage(name: str, probe: Probe, patient: Patient) -> Stage:
    """A stage's row. A fault becomes its findings; a refused setting is raised. Collective: every rank."""
    note, findings = "", []
    started = time.perf_counter()
    with PeakMemory(resolve_device(patient.request.device)) as memory:
        try:
            note, found = probe(patient)
            findings = list(found)
        except ConfigError:
            raise
        except ShardproofError as error:
            note, findings = "stopped", error.findings
    seconds = time.perf_counter() - started
    if {finding.code for finding in findings} & _LOST:
        return Stage(name, seconds, memory.rise, note, tuple(findings))
    rows = exchange([seconds, memory.rise, note])  # the note of rank 0 stands for all
    seconds, peak = max(row[0] for row in rows), max(row[1] for row in rows)
    return Stage(name, seconds, peak, rows[0][2], tuple(dict.fromkeys(findings)))
