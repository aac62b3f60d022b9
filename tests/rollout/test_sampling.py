"""Sampling settings outside of their bounds."""

import math
import re

import pytest

import shardproof as sp
from shardproof.rollout.engine import Sampling

pytestmark = pytest.mark.fault

BAD_ARGUMENTS = {
    "max_new_tokens=0": lambda: Sampling(0),
    "temperature=nan": lambda: Sampling(1, temperature=math.nan),
    "temperature=-1": lambda: Sampling(1, temperature=-1.0),
    "top_p=0": lambda: Sampling(1, top_p=0.0),
    "top_p=1.5": lambda: Sampling(1, top_p=1.5),
    f"top_k={10**30}": lambda: Sampling(1, top_k=10**30),
    "repetition_penalty=1e-300": lambda: Sampling(1, repetition_penalty=1e-300),
}


@pytest.mark.parametrize("named", BAD_ARGUMENTS)
def test_sampling_outside_of_its_bounds(named):
    with pytest.raises(sp.ConfigError, match=re.escape(named)) as caught:
        BAD_ARGUMENTS[named]()
    assert caught.value.code == "C001"
