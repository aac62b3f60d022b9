"""verl's own formulas, from a checkout of it: two of its files, without the packages that the rest of verl needs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.rl.parity.cases import Drawn, Rows

# {name: (advantage estimator, policy loss, how tokens are added up, settings of verl)}
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "grpo": ("grpo", "vanilla", "token-mean", {}),
    "dapo": ("grpo", "vanilla", "token-mean", {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}),
    "rloo": ("rloo", "vanilla", "token-mean", {}),
    "reinforce_pp": ("reinforce_plus_plus", "vanilla", "token-mean", {}),
    "reinforce_pp_baseline": ("reinforce_plus_plus_baseline", "vanilla", "token-mean", {}),
    "remax": ("remax", "vanilla", "token-mean", {}),
    "ppo": ("gae", "vanilla", "token-mean", {}),
    "gspo": ("grpo", "gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "cispo": ("grpo", "cispo", "token-mean", {}),
    "sapo": ("grpo", "sapo", "seq-mean-token-mean", {}),
    "clip_cov": ("grpo", "clip_cov", "token-mean", {}),
    "kl_cov": ("grpo", "kl_cov", "token-mean", {}),
    "dr_grpo": ("grpo", "vanilla", "seq-mean-token-sum-norm", {}),
    "gmpo": ("grpo", "geo_mean", "seq-mean-token-mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "dppo": ("grpo", "dppo_tv", "seq-mean-token-sum-norm", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}),
    "dppo by KL": (
        "grpo",
        "dppo_kl",
        "seq-mean-token-sum-norm",
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
    ),
}
_UNSCALED = ("dr_grpo", "dppo", "dppo by KL")  # whose advantages are not divided by a deviation


def load_verl(root: Path) -> ModuleType:
    """verl/trainer/ppo/core_algos.py of a checkout."""

    class Config(SimpleNamespace):
        def get(self, key: str, default: Any = None) -> Any:
            return getattr(self, key, default)

    def stand_in(name: str, **content: Any) -> None:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)

    for name in ("verl", "verl.trainer", "verl.workers"):
        stand_in(name, __path__=[])
    stand_in("verl.utils", __path__=[], as_torch_index=None, group_mean_std=None)
    stand_in("omegaconf", DictConfig=dict)
    stand_in("tensordict", TensorDict=dict)
    stand_in("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch)
    stand_in("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    stand_in("verl.utils.import_utils", deprecated=lambda *_: lambda function: function)
    stand_in("verl.workers.config", ActorConfig=Config)
    for name in ("verl.utils.torch_functional", "verl.trainer.ppo.core_algos"):
        path = root / f"{name.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if name == "verl.utils.torch_functional":
            sys.modules["verl.utils"].torch_functional = module  # type: ignore[attr-defined]
    return sys.modules["verl.trainer.ppo.core_algos"]


def verls(verl: ModuleType, name: str, drawn: Drawn, **changes: Any) -> tuple[float, Rows, Rows]:
    """(loss, its gradient by each completion's log-probs, advantages) by verl's own functions."""
    estimator, loss_mode, aggregation, settings = CASES[name]

    def padded(rows: Rows) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    mask = padded([torch.ones_like(row) for row in drawn.logps])
    rewards = torch.zeros_like(mask)
    for i, length in enumerate(drawn.lengths):
        rewards[i, length - 1] = drawn.rewards[i] or 0.0
    shared = {"token_level_rewards": rewards, "response_mask": mask, "config": SimpleNamespace(gamma=1.0)}
    own: dict[str, Any] = {"index": np.array(drawn.groups)}
    if estimator == "gae":
        shared.pop("config")
        own = {"values": padded(drawn.values), "gamma": 1.0, "lam": 1.0}
    elif name in _UNSCALED:
        own |= {"norm_adv_by_std_in_grpo": False}
    elif estimator == "remax":
        own = {"reward_baselines": torch.tensor(drawn.greedy)}
    advantages, _ = verl.get_adv_estimator_fn(estimator)(**shared, **own)

    covariances = {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.0002}
    config = sys.modules["verl.workers.config"].ActorConfig(
        **{"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0} | settings,
        tau_pos=1.0,
        tau_neg=1.05,
        global_batch_info={},
        policy_loss=SimpleNamespace(**covariances | {"ppo_kl_coef": 0.1} | changes),
    )
    leaves = [row.clone().requires_grad_() for row in drawn.logps]
    logps = padded(leaves)
    loss, *_ = verl.get_policy_loss_fn(loss_mode)(
        padded(drawn.old), logps, advantages, mask, loss_agg_mode=aggregation, config=config
    )
    gradients = torch.autograd.grad(loss, leaves)
    rows = [row[:length] for row, length in zip(advantages, drawn.lengths, strict=True)]
    return float(loss.detach()), list(gradients), rows
