"""`shardproof explain CODE`."""

import pytest
from typer.testing import CliRunner

from shardproof.cli import app
from shardproof.findings import CODES


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_explained_with_its_title_and_fix(code):
    shown = CliRunner().invoke(app, ["explain", code.lower()]).output
    assert shown.startswith(f"{code}: {CODES[code][0]}\n")
    assert "Fix: " in shown and "<a id" not in shown and "\n## " not in shown


def test_a_code_that_there_is_not_is_named_with_the_nearest():
    found = CliRunner().invoke(app, ["explain", "S270"])
    assert (
        found.exit_code == 2 and "'S270' is not a code" in found.output and "Did you mean 'S2" in found.output
    )
