"""TRL's own loss methods, called on stand-ins for its trainer and model: what they say about given log-probs."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from shardproof.train.batching import Batch


class Accelerator:
    """One process."""

    device = torch.device("cpu")

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    gather_for_metrics = gather


class Model:
    """Says the log-probs that it is given, for each call the next."""

    training = True

    def __init__(self, *tables: torch.Tensor):
        self.tables = list(tables)

    def __call__(self, **inputs: Any) -> SimpleNamespace:
        table = self.tables.pop(0)
        nothing = torch.zeros_like(table)
        labels = inputs["labels"][:, 1:]
        return SimpleNamespace(
            log_probs=torch.where(labels != -100, table, 0.0),
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing.bool(),
            label_mask=labels != -100,
        )


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True)


def dpo_loss(batch: Batch, policy: list[torch.Tensor], reference: list[torch.Tensor], **settings: Any) -> Any:
    """(loss, metrics) of TRL's DPOTrainer for a batch of pairs, from log-probs of each sequence."""
    from trl.trainer.dpo_trainer import DPOTrainer

    order = [
        *range(0, len(batch), 2),
        *range(1, len(batch), 2),
    ]  # TRL has all chosen ones before the rejected ones
    ids = padded([torch.tensor(batch.sequences[k]) for k in order])
    mask = padded([torch.cat([torch.zeros(1), batch.columns["mask"][k]]) for k in order]).long()
    trainer = SimpleNamespace(
        model=Model(),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        ref_model=Model(padded([reference[k] for k in order])),
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(
            gradient_checkpointing_kwargs=None, discopop_tau=settings.pop("discopop_tau", 0.05)
        ),
        **{
            "beta": 0.1,
            "label_smoothing": 0.0,
            "ld_alpha": None,
            "f_divergence_type": "reverse_kl",
            "f_alpha_divergence_coef": 0.5,
            **settings,
        },
    )
    model = Model(padded([policy[k] for k in order]))
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "completion_mask": mask}
    loss = _quietly(DPOTrainer._compute_loss, trainer, model, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def kto_loss(
    batch: Batch,
    policy: list[torch.Tensor],
    reference: list[torch.Tensor],
    others: tuple[Batch, list[torch.Tensor], list[torch.Tensor]],
    **settings: Any,
) -> Any:
    """(loss, metrics) of TRL's KTOTrainer; `others` are completions of other prompts with both models' log-probs."""
    from trl.trainer.kto_trainer import KTOTrainer

    def table(of: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [torch.cat([torch.zeros(1), mask]) for mask in of.columns["mask"]]
        return padded([torch.tensor(each) for each in of.sequences]), padded(rows).long()

    (ids, mask), (kl_ids, kl_mask) = table(batch), table(others[0])
    kind = settings.pop("loss_type", "kto")
    has_kl = kind == "kto"
    trainer = SimpleNamespace(
        model=Model(),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        calculate_KL=has_kl,
        loss_type=kind,
        ref_model=Model(*([padded(others[2])] if has_kl else []), padded(reference)),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        **{"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **settings},
    )
    trainer._compute_kl_logps = lambda model, inputs: KTOTrainer._compute_kl_logps(trainer, model, inputs)
    model = Model(*([padded(others[1])] if has_kl else []), padded(policy))
    inputs = {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "completion_mask": mask,
        "KL_input_ids": kl_ids,
        "KL_attention_mask": (kl_ids > 0).long(),
        "KL_completion_mask": kl_mask,
        "label": torch.tensor([float(row[0]) > 0 for row in batch.columns["side"]]),
    }
    loss = _quietly(KTOTrainer._compute_loss, trainer, model, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def _quietly(method: Any, trainer: Any, model: Model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The method without what it does to a real model's checkpointing."""
    import contextlib
    import sys
    from unittest.mock import patch

    module = sys.modules[method.__module__]
    with (
        patch.object(module, "disable_gradient_checkpointing", lambda *_: contextlib.nullcontext()),
        patch.object(module, "is_peft_model", lambda _: False),
    ):
        return method(trainer, model, inputs, False)


def prepared(kind: str, rows: list[dict[str, Any]], tokenizer: Any, **settings: Any) -> list[dict[str, Any]]:
    """The rows as the trainer of a `kind`, "dpo", "kto" or "sft", tokenises them."""
    from datasets import Dataset
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.sft_trainer import SFTTrainer

    known = {"dataset_num_proc": None, "max_length": None, "truncation_mode": "keep_start"}
    args = SimpleNamespace(**{**known, **settings})
    if kind != "sft":
        trainer = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
        trainer.desirable_weight = trainer.undesirable_weight = 1.0
        method = DPOTrainer._prepare_dataset if kind == "dpo" else KTOTrainer._prepare_dataset
        return list(method(trainer, Dataset.from_list(rows), tokenizer, args, "train"))
    args.dataset_text_field, args.shuffle_dataset = "text", False
    args.assistant_only_loss = settings.get("assistant_only_loss", False)
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None)
    trainer.completion_only_loss = settings.get("completion_only_loss", "prompt" in rows[0])
    return list(
        SFTTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, args, False, None, "train")
    )


def sft_loss(labels: list[list[int]], policy: list[torch.Tensor]) -> torch.Tensor:
    """The loss of TRL's SFTTrainer from log-probs of each sequence, of which labels of -100 do not count."""
    from trl.trainer.sft_trainer import SFTTrainer

    trainer = SimpleNamespace(
        model=Model(),
        accelerator=SimpleNamespace(
            parallelism_config=None, gather_for_metrics=lambda value: value, num_processes=1
        ),
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False, max_length=None),
    )
    table = pad_sequence([torch.tensor(row) for row in labels], batch_first=True, padding_value=-100)
    inputs = {"input_ids": table.clamp(min=0), "attention_mask": (table != -100).long(), "labels": table}
    return SFTTrainer.compute_loss(trainer, Model(padded(policy)), inputs)
