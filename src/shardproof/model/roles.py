"""The sharded root: a thin wrapper around the Hugging Face model, so that everything runs inside one FSDP forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from shardproof.errors import fail
from shardproof.model import exact
from shardproof.model.head import HeadFacts, token_logprobs
from shardproof.model.packing import Packing
from shardproof.model.router import balancing_statistics

POLICY, REFERENCE, CRITIC, REWARD, TEACHER = "policy", "reference", "critic", "reward", "teacher"
ROLES = (POLICY, REFERENCE, CRITIC, REWARD, TEACHER)
VALUED = (CRITIC, REWARD)  # have values in place of log-probs
FROZEN = (REFERENCE, TEACHER)  # are never trained
VALUE_HEAD = "score"
HEADS = (VALUE_HEAD, "classifier")  # what transformers' families call the layer of a sequence classifier
# The wrapper's own attribute; it is stripped from every name that leaves the project.
ROOT_PREFIX = "model."


class RoleModule(nn.Module):
    """`forward(task=...)` runs one task of the model with the root's parameters gathered.

    The head, the embedding and whatever else is in no block belong to the FSDP root. Calling them from outside the
    root's forward would read shards, so each task that uses them is a branch of this forward.
    """

    def __init__(self, model: PreTrainedModel, role: str):
        super().__init__()
        self.model = model
        self.role = role

    def forward(self, *args: Any, task: str | None = None, **kwargs: Any) -> Any:
        task = task or ("values" if self.role in VALUED else "logits")
        if task == "logits":
            return self.model(*args, **kwargs)
        if task == "values":
            return self.values(*args, **kwargs)
        if task == "logprobs":
            return self.logprobs(*args, **kwargs)
        raise ValueError(f"unknown task {task!r}; expected logits, logprobs or values")

    def values(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One value per token."""
        hidden = self.model.base_model(*args, **kwargs)[0]
        return self.model.get_submodule(value_head(self.model))(hidden).squeeze(-1).clone()

    def logprobs(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        *,
        packing: Packing | None = None,
        position_ids: torch.Tensor | None = None,
        temperature: float = 1.0,
        want_entropy: bool = False,
        head: HeadFacts | None = None,
        router_tokens: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Log-prob (and entropy) of each target, [tokens], and the router's statistics over the first `router_tokens`.

        With `head` the language-model head runs in chunks; without it, the model's own forward gives the logits.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if packing is not None:
            inputs |= {"packing": packing, "position_ids": position_ids}
        if router_tokens is not None:
            inputs["output_router_logits"] = True
        if head is None:
            output = self.model(**inputs)
            logits = output.logits[0].float() / temperature
            every = torch.log_softmax(logits, dim=-1)
            logps = every.gather(1, targets[:, None]).squeeze(1)
            if exact.active():
                logps = exact.scored_tokens(output.logits[0], targets, temperature)
            entropy = -(every.exp() * every).sum(-1) if want_entropy else logps.new_empty(0)
        else:
            output = self.model.base_model(**inputs)
            logps, entropy = token_logprobs(
                output[0][0],
                self.model.get_output_embeddings(),
                targets,
                temperature=temperature,
                facts=head,
                want_entropy=want_entropy,
            )
        result = {"logps": logps, "entropy": entropy}
        if router_tokens is not None:
            result["router"] = balancing_statistics(output.router_logits, self.model.config, router_tokens)
        return result


def attach_value_head(model: PreTrainedModel) -> None:
    """Replace the language-model head with a linear layer that gives one value per token.

    The name and shape are those of transformers' sequence classifiers, so a saved critic loads there too.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, nn.Identity())
    model.config.tie_word_embeddings = False
    text_config = model.config.get_text_config()
    text_config.tie_word_embeddings = False
    width = model.get_input_embeddings().get_parameter("weight").shape[-1]
    hidden_size = int(getattr(text_config, "hidden_size", width))
    model.add_module(VALUE_HEAD, nn.Linear(hidden_size, 1, bias=False, device="meta", dtype=torch.float32))


def value_head(model: PreTrainedModel) -> str:
    """The name of the layer that gives one value per token: a critic's, or a sequence classifier's."""
    return next((name for name in HEADS if hasattr(model, name)), VALUE_HEAD)


def build_classifier(config: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """The family's sequence classifier with one label: what a reward model is.

    Its score of a text must be what one linear layer says at the text's last token. Families that read a text from both
    sides, or at its first token, have another layer between.
    """
    config.num_labels = 1
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, **kwargs)
    base, heads = model.base_model, [name for name in HEADS if hasattr(model, name)]
    around = [name for name, module in model.named_children() if module is not base]
    if not heads or around != heads[:1] or not isinstance(model.get_submodule(heads[0]), nn.Linear):
        message = (
            f"{type(model).__name__} is no linear layer on a decoder: it has {', '.join(around) or 'none'}."
        )
        raise fail("L114", "skeleton", message, fix="use a decoder's sequence classifier as the reward model")
    return model
