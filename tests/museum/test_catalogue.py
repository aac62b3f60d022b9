"""The catalogue is complete: every piece is exhibited and on the page, every code has a fault that shows it."""

import re
from pathlib import Path

import pytest

from shardproof.findings import CODES
from tests.museum import test_held, test_hosts, test_running_ahead, test_steps, test_syncs, test_tokens
from tests.museum.pieces import NEED_VLLM, PIECES, Piece, exhibited

pytestmark = pytest.mark.fault

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "museum.md"
REQUIRED = (
    "SkyRL 1709", "SkyRL 1370", "SkyRL 1767", "SkyRL 1822", "transformers 45050", "transformers 45649",
    "transformers 48892", "verl 5995 and 6188", "verl 6405", "verl 7014", "verl 7495", "verl 7834", "TRL 5312",
    "torchtitan 4226 and 4783", "accelerate", "vLLM 42821", "vLLM on CPU", "ms-swift 10154",
    "verl 6719", "verl 6921", "ms-swift 10012", "ART 883", "NeMo RL 4018",
)  # fmt: skip


def row(piece: Piece) -> str:
    codes = ", ".join(f"[{code}](faults.md#{code.lower()})" for code in piece.codes)
    return f"| [{piece.title}]({piece.link}) | {piece.there} | {codes} | {piece.here} |"


def test_every_piece_is_exhibited():
    assert test_held and test_hosts and test_running_ahead and test_steps and test_syncs and test_tokens
    assert set(exhibited) == set(PIECES)


@pytest.mark.parametrize("title", REQUIRED)
def test_the_bugs_that_this_project_began_with_are_there(title):
    assert any(piece.title.startswith(title) for piece in PIECES.values())
    assert sum(piece.title.startswith("SkyRL 1370") for piece in PIECES.values()) >= 5


@pytest.mark.parametrize("name", PIECES)
def test_every_piece_is_on_the_page(name):
    piece = PIECES[name]
    assert set(piece.codes) <= set(CODES)
    assert row(piece) in PAGE.read_text().splitlines(), f"docs/museum.md lacks the line\n{row(piece)}"


def test_the_page_says_which_pieces_need_the_engine_itself():
    section = " ".join(PAGE.read_text().split("## Pieces that are faults of an engine")[1].split())
    assert "tests/rollout/vllm" in section
    for name in NEED_VLLM:
        assert PIECES[name].title in section


def faults_in_the_tests() -> set[str]:
    """Codes that some test expects a fault to be named with."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    return {code for text in texts for code in re.findall(r"\b([CLSTER]\d{3})\b", text)}


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_piece_or_a_fault_of_its_own(code):
    in_the_museum = {code for piece in PIECES.values() for code in piece.codes}
    assert code in in_the_museum | faults_in_the_tests()
