"""Configs of strangers that ask for code, hold no numbers, or change what a model returns."""

import json
import math
import shutil

import pytest
import torch

import shardproof as sp
from shardproof.errors import LoadFault
from shardproof.weights.source import read_config
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mixtral"), "mixtral")


def with_config(folder, target, **changes):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    text = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(text | changes))
    return target


@pytest.mark.parametrize(
    "asked",
    [
        {"attn_implementation": "stranger/kernels"},
        {"attn_implementation": {"": "kernels-community/flash-attn2@main:run"}},
        {"text_config": {"attn_implementation": "paged|stranger/kernels"}},
        {"experts_implementation": "stranger/kernels"},
    ],
    ids=str,
)
def test_a_config_that_asks_for_kernels_of_the_hub_is_refused(folder, tmp_path, asked):
    """transformers would fetch them and run what it got, without a question, where `kernels` is installed."""
    with pytest.raises(LoadFault, match=r"L108 .*kernels"):
        read_config(with_config(folder, tmp_path, **asked), trust_remote_code=False)


def test_a_number_that_is_none_is_refused_by_its_key(folder, tmp_path):
    with pytest.raises(LoadFault, match=r"L103 .*rms_norm_eps is NaN"):
        read_config(with_config(folder, tmp_path, rms_norm_eps=math.nan), trust_remote_code=False)


def test_an_infinity_may_stand_in_a_config(folder, tmp_path):
    """State-space models write one for a limit that is none."""
    read_config(with_config(folder, tmp_path, time_step_limit=[0.0, math.inf]), trust_remote_code=False)


def score(folder):
    return sp.logprobs(sp.load(folder, compute_dtype=torch.float32), [[1, 2, 3, 4, 5]])[0].tolist()


def test_what_a_config_says_about_outputs_changes_no_score(folder, tmp_path):
    flags = dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits"), True)
    target = with_config(folder, tmp_path, return_dict=False, **flags)
    assert run_ranks(1, score, target) == run_ranks(1, score, folder)
