"""One rank on a device: gradients are added up where they belong, with no copy for a reduction that has no one to meet."""

from unittest import mock

import peft
import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from shardproof.train import passes
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.train.test_recompute import assert_same_run, train

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]


def train_in_place(folder, options):
    """As `train`, as if on a GPU; FSDP must find nothing to reduce."""
    with (
        mock.patch.object(passes, "_is_alone", return_value=True),
        mock.patch.object(_fsdp_param_group, "foreach_reduce", side_effect=AssertionError("a reduction")),
    ):
        return train(folder, options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_tied", {"compute_dtype": torch.bfloat16}),
        ("qwen3_moe", {"checkpoint_activations": True, "reshard_after_forward": False}),
        ("qwen3", {"lora": peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)}),
    ],
    ids=["tied, 16 bits", "moe, recomputed", "lora"],
)
def test_no_number_changes(tmp_path, family, options):
    folder = str(make_checkpoint(tmp_path, family))
    expected = run_ranks(1, train, folder, options)
    assert_same_run(run_ranks(1, train_in_place, folder, options), expected)
