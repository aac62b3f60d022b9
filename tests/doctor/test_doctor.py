"""The doctor: clean models are silent in every layout, spoiled ones are named, and the report says so everywhere."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from shardproof.doctor import run
from shardproof.doctor.matrix import cover_pairs
from shardproof.doctor.page import write_page
from shardproof.doctor.report import print_matrix, print_report, write_json
from shardproof.doctor.request import Layout, Request
from shardproof.doctor.results import Buffer, Examination, Report, Stage
from shardproof.errors import ConfigError
from shardproof.findings import Finding
from shardproof.shard.torch_private import local_tensor
from tests.doctor.page_reader import open_page, rows, text_of, tiles
from tests.models import EXTRA_FAMILIES, FAMILIES, make_checkpoint
from tests.ranks import run_ranks
from tests.report.folders import HOSTILE

pytestmark = pytest.mark.distributed

STAGES = ["load", "attest", "score", "round trip", "step", "stream", "verify", "generate"]
FP32 = Layout(dtype="fp32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("doctor")
    return {f: str(make_checkpoint(root / f, f)) for f in ("llama", "qwen3_tied", "qwen3_moe", "phi3")}


def make_request(folder, *layouts, **options):
    return Request(source=folder, config=None, layouts=layouts or (FP32,), seq_len=24, **options)


def examine(request, spoil, spoil_stages):
    """The report of this rank; `spoil` changes the patient right after its load, `spoil_stages` what runs then."""
    stages = run.STAGES
    try:
        if spoil is not None:
            run.STAGES = (stages[0], ("spoil", lambda patient: spoil(patient) or ("", [])), *stages[1:])
        if spoil_stages is not None:
            spoil_stages()
        return run.examine(request)
    finally:
        run.STAGES = stages


def report_of(request, spoil=None, spoil_stages=None):
    """The report, the same on every rank but for the time each took to write it."""
    reports = run_ranks(request.ranks, examine, request, spoil, spoil_stages)
    # As text: a NaN among the buffers is not equal to itself.
    texts = [str(replace(report, seconds=0)) for report in reports]
    assert texts == texts[:1] * len(texts)
    return reports[0]


def codes(examination):
    return {stage.name: {f.code for f in stage.findings} for stage in examination.stages if stage.findings}


# Clean models.


@pytest.mark.parametrize(
    ("family", "role", "layout"),
    [
        ("llama", "policy", Layout()),
        ("qwen3_moe", "policy", replace(FP32, strategy="fsdp1", sequence_parallel=2)),
        ("qwen3_tied", "policy", Layout(lora=4, cpu_offload=True, packing=False)),
        ("qwen3_tied", "critic", replace(FP32, checkpoint_activations=True)),
        ("llama", "reference", replace(FP32, param_dtype="bf16", strategy="fsdp1")),
    ],
    ids=str,
)
def test_a_clean_model_is_silent(folders, family, role, layout):
    (row,) = report_of(make_request(folders[family], layout, role=role)).examinations
    assert row.findings == [] and row.refused is None
    assert [stage.name for stage in row.stages] == STAGES
    notes = {stage.name: stage.note for stage in row.stages}
    assert "from a single process" in notes["score"]
    assert "equal to the files bit for bit" in notes["round trip"] and not notes["round trip"].startswith(
        "0 "
    )
    assert ("not trained" in notes["step"]) == (role == "reference")
    assert "from the trainer" in notes["generate"] or role == "critic"
    assert all(stage.seconds > 0 for stage in row.stages)


@pytest.mark.parametrize(("index", "family"), list(enumerate((*FAMILIES, *EXTRA_FAMILIES))))
def test_every_family_is_silent(tmp_path, index, family):
    layout = (Layout(), replace(FP32, strategy="fsdp1"))[index % 2]
    (row,) = report_of(make_request(str(make_checkpoint(tmp_path, family)), layout)).examinations
    assert row.findings == [] and row.refused is None
    assert [stage.name for stage in row.stages] == STAGES


def test_the_buffer_table_has_every_rank(folders):
    (row,) = report_of(make_request(folders["llama"])).examinations
    found = [buffer for buffer in row.buffers if buffer.name == "model.rotary_emb.inv_freq"]
    assert [(b.rank, b.dtype, b.shape, b.num_nan) for b in found] == [
        (0, "float32", (4,), 0),
        (1, "float32", (4,), 0),
    ]
    assert found[0].first == found[1].first == pytest.approx((1.0, 0.1, 0.01, 0.001))


@pytest.mark.slow
def test_a_matrix_covers_what_the_model_allows(folders):
    request = make_request(folders["phi3"], Layout(dtype="fp32"), matrix=True)
    found = report_of(request).examinations
    assert not any(row.findings for row in found)
    refused = {row.layout: row.refused.message for row in found if row.refused is not None}
    assert set(refused) == {"fsdp2, fp32, sequence parallel 2", "fsdp1, fp32, CPU offload"}
    assert "rotary embedding" in refused["fsdp2, fp32, sequence parallel 2"]
    ran = [row.layout for row in found if row.refused is None]
    assert not any("sequence parallel" in layout for layout in ran)
    for words in combinations(["CPU offload", "LoRA 8", "one by one", "activations recomputed"], 2):
        assert any(all(word in layout for word in words) for layout in ran), words


def test_every_allowed_pair_is_covered():
    axes = {"a": [0, 1], "b": [0, 1, 2], "c": [0, 1], "d": [0, 1]}
    every = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    allowed = [row for row in every if not (row["a"] == 1 and row["b"] == 2)]
    chosen = cover_pairs(axes, allowed)
    assert len(chosen) < len(allowed) / 2
    assert all(row in allowed for row in chosen)
    for x, y in combinations(axes, 2):
        for pair in product(axes[x], axes[y]):
            possible = any((row[x], row[y]) == pair for row in allowed)
            assert any((row[x], row[y]) == pair for row in chosen) == possible


# Spoiled models.


def spoil_frequencies(patient):
    if torch.distributed.get_rank() == 1:
        patient.policy.model.model.rotary_emb.inv_freq.fill_(float("nan"))


def test_skyrl_1709_is_named_and_its_effect_shown(folders):
    request = make_request(folders["llama"], replace(FP32, strategy="fsdp1", sequence_parallel=2))
    (row,) = report_of(request, spoil_frequencies).examinations
    found = codes(row)
    assert found["attest"] == {"S205", "S207", "S209"} and found["score"] == {"T301"}
    assert {(f.rank, f.tensor) for f in row.stages[2].findings} == {(1, "model.rotary_emb.inv_freq")}
    spoiled = [b.num_nan for b in row.buffers if b.name == "model.rotary_emb.inv_freq"]
    assert spoiled == [0, 4]


def spoil_weight(patient):
    for name, param in patient.policy.named_parameters():
        if name.endswith("layers.0.mlp.down_proj.weight"):
            local_tensor(param).mul_(-1.0)


def test_wrong_weights_differ_from_a_single_process_and_from_the_files(folders):
    (row,) = report_of(make_request(folders["llama"]), spoil_weight).examinations
    assert codes(row) == {"score": {"T304"}, "round trip": {"E404"}}
    assert [f.rank for f in row.findings if f.code == "T304"] == [0, 1]
    (wrong,) = [f for f in row.findings if f.code == "E404"]
    assert wrong.tensor == "model.layers.0.mlp.down_proj.weight"


def spoil_engine():
    """The engine keeps an old head: every byte arrived, and it samples from something else."""
    stage = dict(run.STAGES)["stream"]

    def stream(patient):
        outcome = stage(patient)
        with torch.no_grad():
            patient.engine.model.lm_head.weight.neg_()
        return outcome

    run.STAGES = tuple((name, stream if name == "stream" else probe) for name, probe in run.STAGES)


def test_an_engine_with_an_old_head_is_caught_by_its_log_probs(folders):
    (row,) = report_of(make_request(folders["llama"]), None, spoil_engine).examinations
    assert codes(row) == {"generate": {"R503"}}


def test_a_checkpoint_that_cannot_be_loaded_is_a_finding(tmp_path):
    folder = make_checkpoint(tmp_path / "cut", "llama")
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-7])
    report = report_of(make_request(str(folder)))
    assert codes(report.examinations[0]) == {"load": {"L103"}}
    assert (report.num_findings, report.exit_code) == (1, 1)


# What is asked.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": "there/is/none.json", "source": None}, "no such file"),
        ({"config": "also"}, "not both"),
        ({"role": "policyy"}, "Did you mean 'policy'"),
        ({"layouts": (Layout(dtype="bf61"),)}, "Did you mean 'bf16'"),
        ({"layouts": (Layout(sequence_parallel=3),)}, "does not divide"),
        ({"ranks": 0}, "--ranks=0 must be"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, words):
    request = replace(make_request("folder"), **options)
    with pytest.raises(ConfigError, match=words):
        request.check()


def test_a_request_travels_as_json():
    request = make_request("folder", Layout(lora=4), FP32, role="critic")
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


# The report.


def make_report(label="models/tiny"):
    finding = Finding("S209", "attest", f"buffer 'x' begins [nan]; {HOSTILE}", rank=1, tensor="x")
    stages = (Stage("load", 0.5, 3 * 2**20, "12 tensors"), Stage("attest", 0.1, 0, "", (finding,)))
    buffers = (
        Buffer("x", 0, "float32", (4,), 0, (1.0, 0.5)),
        Buffer("x", 1, "bfloat16", (4,), 2, (float("nan"), 1.0)),
    )
    refused = Examination("fsdp1, bf16", refused=Finding("C001", "settings", "needs an accelerator."))
    return Report(label, {"ranks": "2"}, (Examination("fsdp2, bf16", stages, buffers), refused), 1.5)


def test_the_exit_code_counts_findings_up_to_a_hundred():
    report = make_report()
    assert report.exit_code == report.num_findings == 1
    many = tuple(Finding("S205", "attest", f"{index}") for index in range(300))
    flooded = Report("m", {}, (Examination("l", (Stage("attest", findings=many),)),))
    assert (flooded.num_findings, flooded.exit_code) == (300, 100)


def test_the_terminal_names_code_rank_and_fix(capsys):
    print_report(make_report())
    said = capsys.readouterr().out
    for words in (
        "S209 attest: rank 1: buffer 'x'",
        "Fix: recompute it",
        "bfloat16",
        "1 findings",
        "refused with an error",
    ):
        assert words in said
    print_matrix(make_report())
    said = capsys.readouterr().out
    assert "refused (C001)" in said and "needs an accelerator" in said


def test_the_report_travels_as_json(tmp_path):
    write_json(make_report(), tmp_path / "out" / "report.json")
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["num_findings"] == 1
    assert data["examinations"][0]["buffers"][1]["first"] == [None, 1.0]
    assert data["examinations"][0]["stages"][1]["findings"][0]["tensor"] == "x"
    report = make_report()
    whole = replace(report, examinations=report.examinations[1:])
    assert Report.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_the_page_shows_findings_and_runs_nothing(tmp_path):
    dom = open_page(write_page(make_report(HOSTILE), tmp_path / "page.html"), tmp_path / "profile")
    assert text_of(dom.find(".//title")).endswith("shardproof doctor")
    assert tiles(dom)["Findings"] == "1" and tiles(dom)["Refused by name"] == "1"
    (finding,) = rows(dom, "findings")
    assert finding.startswith("S209 1 x buffer 'x' begins [nan]") and "recompute it" in finding
    assert rows(dom, "layouts") == ["fsdp2, bf16 S209", "fsdp1, bf16 refused (C001) needs an accelerator."]
    assert not dom.findall(".//script")


# The command.


def run_doctor(*options, timeout=120):
    command = [sys.executable, "-m", "shardproof", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_the_command_on_random_weights(tmp_path, folders):
    result = run_doctor(
        "--config", f"{folders['llama']}/config.json", "--dtypes", "fp32", "--seq-len", "16",
        "--json", str(tmp_path / "report.json"), "--html", str(tmp_path / "page.html"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 findings" in result.stdout and "inv_freq" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seconds"] > 0 and [s["name"] for s in report["examinations"][0]["stages"]] == STAGES
    assert (tmp_path / "page.html").stat().st_size > 2000


@pytest.mark.parametrize("options", [["--nope"], ["--role", "policyy", "m"]], ids=str)
def test_usage_errors_have_an_exit_code_of_their_own(options):
    result = run_doctor(*options)
    assert result.returncode == 120
    assert "nope" in result.stderr or "policyy" in result.stderr


def test_the_sequence_length_is_the_one_that_was_run(folders):
    asked = replace(make_request(folders["llama"], ranks=1, reference=False), seq_len=1000)
    assert report_of(asked).facts["sequence length"].startswith("128 instead of 1000")
