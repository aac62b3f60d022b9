"""Options of the commands that cannot be."""

import pytest
from typer.testing import CliRunner

from shardproof.cli import app

pytestmark = pytest.mark.fault


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["doctor", "model", "--ranks", "100000"], "--ranks=100000"),
        (["doctor", "model", "--ranks", "-1"], "--ranks=-1"),
        (["doctor", "model", "--timeout", "nan"], "--timeout=nan"),
        (["doctor", "model", "--seq-len", "1000000000000"], "--seq-len=1000000000000"),
        (["doctor", "model", "--lora", "1000000000"], "--lora=1000000000"),
        (["doctor", "model", "--replicate", "0"], "--replicate=0"),
        (["estimate", "model", "--micro-batch-tokens", "-1"], "--micro-batch-tokens=-1"),
        (["estimate", "model", "--ranks", "1000000000000"], "--ranks=1000000000000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_of_commands_have_bounds(arguments, named):
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 120, found.output
    assert "C001" in found.output and named in found.output
