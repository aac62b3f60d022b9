"""The command `shardproof doctor`: from options to a request, to ranks, to a report."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shardproof import __version__
from shardproof.bounds import require_number
from shardproof.dist.schedulers import is_rank
from shardproof.doctor.request import Layout, Request, layouts_of
from shardproof.doctor.results import USAGE_EXIT, Examination, Report, Stage
from shardproof.errors import ShardproofError
from shardproof.findings import Finding
from shardproof.terminal import Terminal, attached

logger = logging.getLogger(__name__)

_INTERRUPTED = 130  # as a shell's, after Ctrl-C
_MAX_STARTED = 1024  # processes on one node, as in a recipe
_FIXES = {
    -9: "use more memory, or run `shardproof estimate` first: usually the system killed it because memory ran out",
    -4: "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16: this processor reports an instruction that it does not support",
}


class CountingCommand(TyperCommand):
    """A command whose exit code counts findings, so that usage errors need another one than click's 2."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            # typer brings a click of its own, so that the class of a usage error depends on its version.
            if getattr(error, "exit_code", None) == 2:
                error.exit_code = USAGE_EXIT  # type: ignore[attr-defined]
            raise


def doctor(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    config: Annotated[str | None, typer.Option(help="a config.json, for random weights")] = None,
    strategy: Annotated[str, typer.Option(help="fsdp2 or fsdp1")] = "fsdp2",
    ranks: Annotated[int, typer.Option(help="processes on this node")] = 2,
    dtypes: Annotated[str, typer.Option(help="dtypes to compute in, such as bf16,fp32")] = "bf16,fp32",
    param_dtype: Annotated[str, typer.Option(help="dtype that shards are stored in")] = "fp32",
    seq_len: Annotated[int, typer.Option(help="length of the longest sequence, in tokens")] = 128,
    packing: Annotated[bool, typer.Option(help="pack sequences end to end, or run them one by one")] = True,
    sequence_parallel: Annotated[int, typer.Option(help="ranks that each sequence is split over")] = 1,
    cpu_offload: Annotated[bool, typer.Option(help="keep shards in host memory")] = False,
    lora: Annotated[int, typer.Option(help="rank of LoRA adapters; 0 for none")] = 0,
    replicate: Annotated[int, typer.Option(help="copies of the sharded model (HSDP)")] = 1,
    checkpoint_activations: Annotated[bool, typer.Option(help="recompute activations")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available")] = None,
    role: Annotated[str, typer.Option(help="policy, reference or critic")] = "policy",
    matrix: Annotated[bool, typer.Option("--matrix", help="cover every pair of settings")] = False,
    reference: Annotated[bool, typer.Option(help="compare with the unsharded model on rank 0")] = True,
    timeout: Annotated[float, typer.Option(help="how long a rank may block the others, in seconds")] = 120.0,
    trust_remote_code: Annotated[bool, typer.Option(help="run the model's own code")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the report as JSON")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="write the report as an HTML page")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="show only the report")] = False,
) -> None:
    """Test a model on this machine, from load to generation. The exit code is the number of findings, at most 100."""
    base = Layout(
        strategy=strategy,
        param_dtype=param_dtype,
        sequence_parallel=sequence_parallel,
        cpu_offload=cpu_offload,
        lora=lora,
        packing=packing,
        replicate=replicate,
        checkpoint_activations=checkpoint_activations,
    )
    names = [name.strip() for name in dtypes.split(",") if name.strip()]
    request = Request(
        source=model,
        config=config,
        layouts=layouts_of(base, names),
        role=role,
        ranks=ranks,
        seq_len=seq_len,
        device=device or _default_device(),
        trust_remote_code=trust_remote_code,
        reference=reference,
        timeout_s=timeout,
        matrix=matrix,
    )
    with attached(quiet, rank=int(os.environ["RANK"]) if is_rank() else 0) as terminal:
        try:
            request.check()
            report = examine_on_ranks(request, quiet, terminal)
        except ShardproofError as error:
            terminal.show(str(error))
            raise SystemExit(USAGE_EXIT) from None
    if not is_rank() or os.environ["RANK"] == "0":
        _show(report, matrix, json_path, html_path)
    refused = not matrix and any(row.refused is not None for row in report.examinations)
    raise SystemExit(report.exit_code or (USAGE_EXIT if refused else 0))


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _show(report: Report, matrix: bool, json_path: Path | None, html_path: Path | None) -> None:
    from shardproof.doctor.page import write_page
    from shardproof.doctor.report import print_matrix, print_report, write_json

    (print_matrix if matrix else print_report)(report)
    if json_path is not None:
        write_json(report, json_path)
    if html_path is not None:
        write_page(report, html_path)


def examine_on_ranks(request: Request, quiet: bool, terminal: Terminal) -> Report:
    """The report of ranks started for it, or of this one if torchrun started it. Ctrl-C exits."""
    logger.info("shardproof %s: doctor of %s", __version__, request.label)
    text = json.dumps(request.to_json())
    if is_rank():
        from shardproof.doctor.run import run_attached

        return Report.from_json(run_attached(text))
    logger.info("starting %d ranks ...", request.ranks)
    from shardproof.dist.start import RankFailed, RanksKilled, RanksStopped, start_ranks
    from shardproof.doctor.run import run_rank

    terminal.pause()  # rank 0 draws from here on
    require_number("doctor", "--ranks", request.ranks, at_most=_MAX_STARTED)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shardproof-doctor-") as progress:
        try:
            report = start_ranks(run_rank, text, progress, quiet, num_ranks=request.ranks)[0]
        except (RanksStopped, RanksKilled):
            terminal.show("interrupted; nothing was written")
            raise SystemExit(_INTERRUPTED) from None
        except RankFailed as error:
            stages = _stages_of_failed_rank(error, Path(progress))
            row = Examination("ranks did not finish", stages)
            return Report(request.label, {"ranks": str(request.ranks)}, (row,), time.perf_counter() - started)
    return Report.from_json(report)


def _stages_of_failed_rank(error: Any, progress: Path) -> tuple[Stage, ...]:
    """What is known of a rank that died or raised alone: where it was, and how it ended."""
    note = progress / f"rank-{error.rank}"
    where = note.read_text() if note.exists() else "the start"
    stage = where.split(" (")[0]
    message = f"the rank ended in {where}: {error}."
    fix = _FIXES.get(error.exit_code, "read the error of the named rank")
    return (Stage(stage, findings=(Finding("L100", stage, message, rank=error.rank, fix=fix),)),)
