"""The settings of TRL's trainers on given data: DPO, KTO, SFT and reward models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardproof.config.imported.draft import Draft, Foreign, Same, copy
from shardproof.config.imported.trl_sampled import moving_reference

_TOO_LONG = {"truncate": "cuts", "drop": "leaves out"}


def rows_of_a_step(draft: Draft, foreign: Foreign, ranks: int) -> None:
    """The rows of an optimizer update, over all processes."""
    size = int(foreign.take("per_device_train_batch_size", 8))
    accumulated = int(foreign.take("gradient_accumulation_steps", 1))
    origin = "per_device_train_batch_size, gradient_accumulation_steps"
    draft.put("train.prompts_per_step", size * ranks * accumulated, origin)


def _dpo(draft: Draft, foreign: Foreign) -> None:
    losses = foreign.take("loss_type", ["sigmoid"])
    losses = [losses] if isinstance(losses, str) else losses
    draft.put("algorithm.preference.loss", losses, "loss_type")
    unread = _unread(foreign, losses)
    table = (
        Same("loss_weights", "algorithm.preference.loss_weights"),
        Same("precompute_ref_log_probs", "algorithm.preference.precompute"),
        Same("f_divergence_type", "algorithm.preference.divergence", None, _divergence),
        Same("f_alpha_divergence_coef", "algorithm.preference.divergence_alpha", None, float),
        Same("ld_alpha", "algorithm.preference.ld_alpha", None, float),
        Same("discopop_tau", "algorithm.preference.discopop_tau", None, float),
        Same("beta", "algorithm.preference.beta", 0.1, float),
        Same("label_smoothing", "algorithm.preference.label_smoothing", None, float),
    )
    copy(draft, foreign, (each for each in table if each.theirs not in unread))
    for key in unread:
        draft.skip(foreign, key, "TRL does not read it with this loss")
    if "sigmoid" in losses and "label_smoothing" not in unread and foreign.values.get("label_smoothing"):
        draft.gaps["label_smoothing with loss_type='sigmoid'"] = (
            "it is smoothed here, too; TRL smooths the others alone"
        )
    _lengths(draft, foreign)
    draft.lack(foreign, "use_weighting", "every pair counts alike", unless=(False,))
    moving_reference(draft, foreign, 1)


def _unread(foreign: Foreign, losses: list[str]) -> set[str]:
    """The settings that TRL does not read with these losses."""
    by_alpha = foreign.values.get("f_divergence_type") == "alpha_divergence"
    read = {
        "discopop_tau": "discopop" in losses,
        "f_alpha_divergence_coef": by_alpha,
        "label_smoothing": not {"robust", "exo_pair", "aot", "aot_unpaired"}.isdisjoint(losses),
    }
    return {key for key, is_read in read.items() if not is_read}


def _divergence(kind: str) -> str:
    known = {"js_divergence": "js", "alpha_divergence": "alpha"}
    return known.get(kind, kind)


def _kto(draft: Draft, foreign: Foreign) -> None:
    table = (
        Same("beta", "algorithm.preference.beta", 0.1, float),
        Same("desirable_weight", "algorithm.preference.desirable_weight", 1.0, float),
        Same("undesirable_weight", "algorithm.preference.undesirable_weight", 1.0, float),
    )
    copy(draft, foreign, table)
    copy(draft, foreign, [Same("loss_type", "algorithm.preference.loss", None, lambda loss: [loss])])
    draft.lack(foreign, "precompute_ref_log_probs", "the reference is asked in every step", unless=(False,))
    moving_reference(draft, foreign, 1)
    _lengths(draft, foreign)


def _sft(draft: Draft, foreign: Foreign) -> None:
    _lengths(draft, foreign)
    if foreign.take("assistant_only_loss", False):
        draft.put("data.train_on", "assistant", "assistant_only_loss")
        if foreign.take("completion_only_loss") is not False:
            draft.gaps["assistant_only_loss=True with rows of prompt and completion"] = (
                "what the assistant says in the prompt counts, too"
            )
    elif foreign.take("completion_only_loss") is False:
        draft.put("data.train_on", "all", "completion_only_loss")
    if foreign.take("packing", False):
        what = (
            "TRL's batch counts packed sequences of max_length, which hold several rows; this one counts rows"
        )
        draft.gaps["packing=True"] = what
    what = "'messages' if rows hold whole conversations, with train_on = 'all' or 'assistant'"
    draft.ask("data.messages_column", None, what)
    draft.lack(
        foreign,
        "dataset_text_field",
        "rows are prompts and completions, or data.messages_column",
        unless=("text",),
    )
    draft.lack(foreign, "loss_type", "the cross-entropy is used", unless=("nll", "chunked_nll"))
    draft.lack(foreign, "eos_token", "set it in the tokenizer's files")
    draft.lack(foreign, "chat_template_path", "put the template into the model's folder")


def _reward(draft: Draft, foreign: Foreign) -> None:
    copy(draft, foreign, [Same("center_rewards_coefficient", "algorithm.center_rewards_coef", None, float)])
    _lengths(draft, foreign, "drop")


def _lengths(draft: Draft, foreign: Foreign, too_long: str = "truncate") -> None:
    key = foreign.either("max_length", "max_seq_length")  # of SFT before
    if not foreign.is_null("max_length") or foreign.has(key):
        draft.put("data.max_length", int(foreign.take(key, 1024)), key)
        draft.put("data.on_max_length", too_long, f"TRL {_TOO_LONG[too_long]} rows that are too long")
    draft.lack(foreign, "truncation_mode", "rows are cut at their end", unless=("keep_start",))


GIVEN: dict[str, Callable[[Draft, Foreign], Any]] = {"dpo": _dpo, "kto": _kto, "sft": _sft, "reward": _reward}
