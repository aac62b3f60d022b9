"""Codes, their words, and the page that explains each."""

import re
from pathlib import Path

import pytest

import shardproof
from shardproof.errors import ConfigError, Fault, LoadFault, ShardFault, choose, error_for, fail
from shardproof.findings import CODES, Finding, merge_findings

PACKAGE = Path(shardproof.__file__).parent
FAULTS_PAGE = Path(__file__).parents[1] / "docs" / "faults.md"


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_title_and_a_fix(code):
    title, fix = CODES[code]
    assert re.fullmatch(r"[CLSTER]\d{3}", code)
    for text in (title, fix):
        assert len(text) > 10
        assert text == text.strip()
        assert not text.endswith(".")


def headings():
    return re.findall(r"^## ([CLSTER]\d{3})\b", FAULTS_PAGE.read_text(), flags=re.MULTILINE)


def test_every_code_has_one_heading_in_the_docs():
    """Every message ends with `see docs/faults.md#l101`; there must be a section of that code."""
    found = headings()
    assert [code for code in CODES if found.count(code) != 1] == []


def test_the_docs_explain_no_code_that_does_not_exist():
    assert [code for code in headings() if code not in CODES] == []


def test_titles_are_told_apart():
    titles = [title for title, _ in CODES.values()]
    assert len(set(titles)) == len(titles)


def test_every_code_that_the_source_uses_is_described():
    used = {
        code
        for path in PACKAGE.rglob("*.py")
        if path.name != "findings.py"
        for code in re.findall(r'"([CLSTER]\d{3})"', path.read_text())
    }
    assert used
    assert used <= set(CODES)


def test_a_finding_names_stage_rank_and_fix():
    finding = Finding("S203", "materialise", "'a' does not share storage with 'b'.", rank=3, tensor="a")
    first, second = str(finding).split("\n")
    assert first == "S203 materialise: rank 3: 'a' does not share storage with 'b'."
    assert second == f"Fix: {CODES['S203'][1]}; see docs/faults.md#s203"
    assert "Fix: do this;" in str(Finding("S203", "plan", "x", fix="do this"))
    assert "rank" not in str(Finding("S203", "plan", "x"))


def test_findings_travel_as_json():
    finding = Finding("L104", "map", "2 missing", rank=1, tensor="lm_head.weight", fix="retrain")
    assert Finding.from_json(finding.to_json()) == finding


def test_equal_findings_are_said_once_in_rank_order():
    a, b, c = (Finding("L104", "map", text) for text in "abc")
    assert merge_findings([[b, a], [a], [], [c, b]]) == [b, a, c]


@pytest.mark.parametrize(("code", "kind"), [("C001", ConfigError), ("L101", LoadFault), ("S201", ShardFault)])
def test_the_stage_decides_the_exception(code, kind):
    error = error_for([Finding(code, "stage", "one"), Finding("L102", "stage", "two")])
    assert type(error) is kind
    assert error.code == code
    assert len(error.findings) == 2
    assert "one" in str(error) and "two" in str(error)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(kind, Fault) or kind is ConfigError


def test_a_wrong_choice_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'fsdp2'"):
        choose("settings", "strategy", "fdsp2", ["fsdp2", "zero"])
    assert choose("settings", "strategy", "zero", ["fsdp2", "zero"]) == "zero"


def test_fail_makes_one_finding():
    error = fail("L106", "map", "shapes differ", tensor="w", rank=2)
    assert [(f.code, f.stage, f.tensor, f.rank) for f in error.findings] == [("L106", "map", "w", 2)]
