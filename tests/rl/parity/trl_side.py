"""TRL's own trainers on a stand-in that has what their methods read: completions, rewards and log-probs are given.

Everything between the rewards and the loss is TRL's code: padding, advantages, importance ratios, the loss.
"""

from __future__ import annotations

from collections import defaultdict
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from tests.rl.parity.cases import MAX_NEW_TOKENS, Drawn, Rows


def _padded(rows: Rows) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class _Accelerator:
    device = torch.device("cpu")
    process_index, num_processes, sync_gradients = 0, 1, True

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = gather

    def pad_across_processes(self, value: Any, **_: Any) -> Any:
        return value

    def reduce(self, value: Any, reduction: str) -> Any:
        return value


def _stand_in(trainer: type, drawn: Drawn, leaves: Rows, options: dict[str, Any]) -> Any:
    # One object per model: which one is asked decides on whose log-probs are answered.
    policy, old, ref = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in range(3))
    rows = {id(policy): leaves, id(old): drawn.old, id(ref): drawn.ref}

    def score(model: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return _padded(rows[id(model)]), _padded(drawn.entropy), None

    def generate(prompts: Any) -> tuple[Any, ...]:
        texts = [""] * len(drawn.completions)
        if trainer is RLOOTrainer:
            return drawn.prompts, drawn.completions, texts
        # As with TRL's own generation, which reports no log-probs.
        sampled = [row.tolist() for row in drawn.rollout] if options.get("use_vllm") else None
        return drawn.prompts, drawn.completions, None, texts, sampled, {}, None, None

    rewards = torch.tensor([[torch.nan if reward is None else reward] for reward in drawn.rewards])
    group_size = drawn.groups.count(drawn.groups[0])
    epsilon = options.pop("epsilon", 0.2)
    args = {
        "per_device_train_batch_size": len(drawn.completions),
        "gradient_checkpointing_kwargs": None,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "use_bias_correction_kl": True,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "delta": None,
        "report_to": [],
        "ds3_gather_for_generation": True,
    }
    args |= {name: options.pop(name) for name in list(options) if name in args}
    return SimpleNamespace(
        **{
            "policy": policy,
            "model": old,
            "ref_model": ref,
            "accelerator": _Accelerator(),
            "args": SimpleNamespace(**args),
            "_get_per_token_logps_and_entropies": score,
            "_generate": generate,
            "get_high_entropy_mask": MethodType(
                GRPOTrainer.get_high_entropy_mask, SimpleNamespace(accelerator=_Accelerator())
            ),
            "get_gamma_weights": GRPOTrainer.get_gamma_weights,
            "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
            "_calculate_rewards": lambda *_: rewards,
            "_tokenizer": SimpleNamespace(pad_token_id=0),
            "processing_class": SimpleNamespace(
                pad_token_id=0, batch_decode=lambda ids, **_: [""] * len(ids)
            ),
            "reward_weights": torch.ones(1),
            "reward_func_names": ["given"],
            "reward_funcs": [None],
            "num_generations": group_size,
            "num_iterations": 2,
            "_metrics": {"train": defaultdict(list)},
            "_logs": defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
            "_pending_extra_logs": {},
            "_pending_metrics": {},
            "eos_token_ids": [1],
            "epsilon_low": epsilon,
            "epsilon_high": options.pop("epsilon_high", epsilon),
            "max_completion_length": MAX_NEW_TOKENS,
            "current_gradient_accumulation_steps": 1,
            "top_entropy_quantile": 1.0,
            "multi_objective_aggregation": "sum_then_normalize",
            "loss_type": "grpo",
            "scale_rewards": "group",
            "importance_sampling_level": "token",
            "beta": 0.0,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_clip_min": None,
            "entropy_coef": 0.0,
            "_entropy_bonus_enabled": bool(options.get("entropy_coef")),
            **dict.fromkeys(
                (
                    *("environment_factories", "tools", "environments", "pad_to_multiple_of"),
                    *("off_policy_mask_threshold", "reward_clip_range"),
                )
            ),
            **dict.fromkeys(
                (
                    *("mask_truncated_completions", "use_vllm", "aux_loss_enabled", "use_adaptive_entropy"),
                    *("normalize_advantages", "log_multimodal"),
                ),
                False,
            ),
            **options,
        }
    )


def trls(drawn: Drawn, *, leaves: Rows | None = None, rloo: bool = False, **options: Any) -> Any:
    """(loss, its gradient by each completion's log-probs, advantages); with `leaves` the loss itself, to go back from."""
    trainer = RLOOTrainer if rloo else GRPOTrainer
    given = leaves is not None
    leaves = leaves if leaves is not None else [row.clone().requires_grad_() for row in drawn.logps]
    standing = _stand_in(trainer, drawn, leaves, dict(options))
    rows = [{"prompt": ""} for _ in drawn.prompts]
    inputs = _plain(trainer._generate_and_score_completions)(standing, rows)
    loss = _plain(trainer._compute_loss)(standing, standing.policy, inputs)
    if given:
        return loss
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    filled = [torch.zeros_like(a) if g is None else g for g, a in zip(gradients, leaves, strict=True)]
    counted = inputs["completion_mask"].any(dim=1)  # TRL masks a completion's tokens, and keeps its advantage
    return float(loss.detach()), filled, (inputs["advantages"] * counted).tolist()


def _plain(method: Any) -> Any:
    return getattr(method, "__wrapped__", method)
