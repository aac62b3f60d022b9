"""The page of a real run: what the run writes is what the page reads."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.rl.runs import run_recipe, small_recipe

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_a_run_ends_with_a_page_of_its_proofs(tab, tmp_path):
    folder = tmp_path / "run"
    run_ranks(
        2, run_recipe, small_recipe(folder, "train.steps=3", "algorithm.kl_coef=0.01", "output.save_every=2")
    )
    tab.open((folder / "report.html").as_uri())
    assert tab.text("header .status") == "finished" and "step 3 of 3" in tab.text("header .state")
    verdicts = dict(zip(tab.texts(".proof .what b"), tab.texts(".proof > summary > .badge"), strict=True))
    assert verdicts == {
        "Load · policy": "✓ all 2 passed",
        "Load · reference": "✓ all 2 passed",
        "Weight sync · policy": "✓ all 4 passed",
        "Trained tokens · policy": "✓ all 3 passed",
        "Checkpoint · policy": "✓ all 2 passed",
        "Export · policy": "✓ passed",
    }
    assert tab.texts("[data-group='Load · policy'] .strip b") == ["rank 0", "rank 1"]
    assert all(tab.texts(".proof .compared")) and "worst canary gap" in tab.texts(".proof .what")[2]
    assert "Held-out reward" in tab.texts("#numbers dt") and "±" in tab.text("#numbers")
    card = tab.text("#samples .sample-group")
    assert "Expected answer" in card and "advantage" in card and "4 completions" in card
    facts = dict(zip(tab.texts(".facts dt"), tab.texts(".facts dd"), strict=True))
    assert facts["Ranks"] == "2" and facts["torch"].startswith("2.")
    assert "train.steps" in tab.text("#changed")
