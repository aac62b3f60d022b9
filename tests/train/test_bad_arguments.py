"""Numbers outside of their bounds as arguments of losses, optimizers, schedules and steps."""

import math
import re

import pytest
import torch

import shardproof as sp
from shardproof.train.loss import policy_gradient, value
from shardproof.train.optim import build_optimizer, make_optimizer
from shardproof.train.schedules import make_schedule
from tests.models import tiny_config
from tests.ranks import run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = pytest.mark.fault

CPU = torch.device("cpu")

BAD_ARGUMENTS = {
    "clip_low=nan": lambda: policy_gradient(clip_low=math.nan),
    "clip_low=-1": lambda: policy_gradient(clip_low=-1),
    "clip_high=-1": lambda: policy_gradient(clip_high=-1),
    "kl_coef=-1": lambda: policy_gradient(kl_coef=-1),
    "entropy_coef=inf": lambda: policy_gradient(entropy_coef=math.inf),
    "clip=0": lambda: value(clip=0),
    "clip=nan": lambda: value(clip=math.nan),
    "lr=nan": lambda: build_optimizer("adamw", [], None, CPU, lr=math.nan),
    "lr=-1": lambda: build_optimizer("adamw", [], None, CPU, lr=-1),
    "weight_decay=-1": lambda: build_optimizer("adamw", [], None, CPU, weight_decay=-1),
    "betas[0]=1.5": lambda: build_optimizer("adamw", [], None, CPU, betas=(1.5, 0.9)),
    "betas[1]=nan": lambda: build_optimizer("adamw", [], None, CPU, betas=(0.9, math.nan)),
    "eps=-1": lambda: build_optimizer("adamw", [], None, CPU, eps=-1),
    "warmup_steps=-1": lambda: make_schedule(None, warmup_steps=-1),
    "warmup_ratio=2": lambda: make_schedule(None, warmup_ratio=2.0, total_steps=3),
    "decay_ratio=-1": lambda: make_schedule(None, "wsd", decay_ratio=-1, total_steps=3),
    "decay_steps=-1": lambda: make_schedule(None, "wsd", decay_steps=-1, total_steps=3),
    "total_steps=-1": lambda: make_schedule(None, "cosine", total_steps=-1),
    "final_ratio=nan": lambda: make_schedule(None, final_ratio=math.nan),
}


@pytest.mark.parametrize("named", BAD_ARGUMENTS)
def test_argument_outside_of_its_bounds(named):
    with pytest.raises(sp.ConfigError, match=re.escape(named)) as caught:
        BAD_ARGUMENTS[named]()
    assert caught.value.code == "C001"


def step_with(**options):
    policy = sp.load(sp.RandomInit(tiny_config("llama")), compute_dtype=torch.float32)
    before = [param.detach().clone() for param in policy.parameters()]
    try:
        sp.train_step(policy, sp.Batch([[1, 2, 3]]), make_optimizer(policy, lr=1e-2), **options)
    finally:
        assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize(
    "option",
    [{"max_grad_norm": -1.0}, {"max_grad_norm": 0}, {"max_grad_norm": math.nan}, {"micro_batch_tokens": 0}]
    + [{"temperature": math.nan}, {"router_coef": math.inf}, {"deadline_s": -1.0}],
    ids=str,
)
def test_step_with_a_number_outside_of_its_bounds(option):
    ((key, number),) = option.items()
    outcomes = run_ranks_outcomes(1, step_with_options, option)
    assert_all_raise(outcomes, "C001", f"{key}={number}", kind="ConfigError")


def step_with_options(options):
    step_with(**options)
