"""Errors that nobody foresaw: every rank raises the same one, of the class that belongs to the stage."""

import re
from pathlib import Path

import pytest

import shardproof
from shardproof.dist.collectives import UNEXPECTED, together
from shardproof.errors import ExportFault, LoadFault, RolloutFault, TrainFault, error_for
from shardproof.findings import CODES, Finding
from tests.ranks import run_ranks_outcomes

CODES_AND_CLASSES = {
    "plan": ("L100", LoadFault),
    "train_step": ("T300", TrainFault),
    "save": ("E400", ExportFault),
    "generate": ("R500", RolloutFault),
}


def divide_by_zero(stage):
    import torch.distributed as dist

    with together(stage):
        _ = 1 / dist.get_rank()


@pytest.mark.distributed
@pytest.mark.parametrize("stage", CODES_AND_CLASSES)
def test_an_unforeseen_error_has_the_class_of_its_stage(stage):
    outcomes = run_ranks_outcomes(2, divide_by_zero, stage)
    assert outcomes[0] == outcomes[1]
    kind, name, message = outcomes[0]
    code, expected = CODES_AND_CLASSES[stage]
    assert (kind, name) == ("error", expected.__name__)
    assert message.startswith(f"{code} {stage}: rank 0: ZeroDivisionError: ")


def test_every_stage_of_the_source_has_a_code():
    source = [path.read_text() for path in Path(shardproof.__file__).parent.rglob("*.py")]
    stages = {stage for text in source for stage in re.findall(r'[ (]together\("(\w+)"\)', text)}
    assert stages <= set(UNEXPECTED), "add what is missing to dist/collectives.py"


@pytest.mark.parametrize("code", sorted(set(UNEXPECTED.values())))
def test_every_such_code_is_of_a_class(code):
    assert code in CODES
    assert (code, type(error_for([Finding(code, "stage", "message")]))) in CODES_AND_CLASSES.values()
