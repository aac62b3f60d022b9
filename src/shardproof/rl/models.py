"""The models of a run: each role's weights on this rank, and what trains them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig

from shardproof.config.schema import Critic, Recipe, Role
from shardproof.dist.collectives import together
from shardproof.dist.mesh import make_mesh
from shardproof.errors import ShardproofError, fail
from shardproof.model.exact import make_exact
from shardproof.model.families import max_positions
from shardproof.model.roles import FROZEN, POLICY, REWARD, RoleModule
from shardproof.rl.checks import Inputs, load_tokenizer, make_lora
from shardproof.rl.proofs import Ledger, proved_load
from shardproof.rl.sources.reading import is_sampled, longest
from shardproof.shard.load import load
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.optim import make_optimizer
from shardproof.train.schedules import make_schedule
from shardproof.train.trainer import Trainer
from shardproof.user_code import is_user_name
from shardproof.weights.source import RandomInit, find_folder, read_config


def load_role(
    recipe: Recipe,
    section: Role | None,
    role: str,
    *,
    config: PretrainedConfig,
    ledger: Ledger | None,
    step: int,
    trained: bool = True,
    trust_remote_code: bool | None = None,
) -> ShardedModel:
    """The model of a role, as its section and the policy's say, with a line in the ledger.

    A reward model is `trained` in place of a policy, or it scores what the policy says. Collective: every rank.
    """
    model, override = recipe.model, section or Role()
    exact = recipe.rollout.exact and role == "policy"
    source: str | RandomInit = override.path or model.path
    if model.random_init and override.path is None:
        source = RandomInit(config, recipe.train.seed)
    lora = model.lora if role == POLICY or (role == REWARD and trained) else None
    if isinstance(override, Critic):
        lora = override.lora
    make = partial(
        load,
        source,
        role=role,
        strategy=override.strategy or model.strategy,
        mesh=make_mesh(replicate=model.replicate),
        param_dtype=getattr(torch, model.param_dtype),
        compute_dtype=getattr(torch, model.compute_dtype),
        cpu_offload=model.cpu_offload if override.cpu_offload is None else override.cpu_offload,
        lora=make_lora(lora),
        lora_base=lora.base if lora is not None else None,
        sequence_parallel=model.sequence_parallel,
        checkpoint_activations=model.checkpoint_activations if trained and role not in FROZEN else False,
        reshard_after_forward=model.reshard_after_forward,
        trust_remote_code=model.trust_remote_code if trust_remote_code is None else trust_remote_code,
        new_head=role == REWARD and trained,
        compile=False if exact else model.compile,
    )
    loaded = proved_load(ledger, step, role, make)
    if exact:
        roots = (module for module in loaded.module.modules() if isinstance(module, RoleModule))
        make_exact(loaded.model, loaded.device, *roots)
    return loaded


def check_vocabularies(recipe: Recipe, tokenizer: Any) -> None:
    """Raise if a reference or a critic of its own gives tokens other numbers than the policy, whose `tokenizer` this is.

    Both read the policy's tokens by their numbers. Tokens that only one of the two knows are let pass, and so are models
    whose tokenizer cannot be read here: a folder of weights needs none.
    """
    known = tokenizer.get_vocab()
    for role, section in (("reference", recipe.reference), ("critic", recipe.critic)):
        path = section.path if section is not None else None
        folder = find_folder(path, None) if path is not None and path != recipe.model.path else None
        if folder is None:
            continue
        try:
            theirs = load_tokenizer(folder, recipe.model.trust_remote_code).get_vocab()
        except ShardproofError:
            continue
        different = sorted(token for token, number in known.items() if theirs.get(token, number) != number)
        if different:
            token = different[0]
            message = (
                f"{len(different)} tokens have other numbers in the tokenizer of {path!r}: {token[:40]!r} is "
                f"{known[token]} for the policy and {theirs[token]} for the {role}, which reads the policy's numbers."
            )
            raise fail("R513", role, message, fix=f"use a {role} that has the policy's tokenizer")


def longest_sequence(recipe: Recipe, inputs: Inputs) -> int | None:
    """The most tokens of a sequence that a run trains on or scores; None where nothing limits its conversations.

    It looks at every prompt, which ranks that share them decode for that.
    """
    if inputs.rules is not None:
        return inputs.rules.max_tokens
    samples = is_sampled(recipe, True)
    sets = [inputs.prompts, *(() if samples else inputs.held_out.values())]
    return max(longest(recipe, each, recipe.rollout.max_new_tokens if samples else 0) for each in sets)


def check_contexts(recipe: Recipe, inputs: Inputs) -> None:
    """Raise if a model beside the policy has too few positions for the policy's sequences, which it scores.

    Models that are not on this host are let pass.
    """
    rooms = list(_rooms(recipe))
    most = longest_sequence(recipe, inputs) if rooms else None
    for role, path, positions in rooms:
        if most is not None and most > positions:
            message = f"a sequence may have {most} tokens, and {path!r} has {positions} positions."
            raise fail("C005", role, message, fix=_shorter(recipe, inputs))


def _rooms(recipe: Recipe) -> Iterator[tuple[str, str, int]]:
    """(role, path, positions) of each model beside the policy that has another path and a limit."""
    model = recipe.model
    for role, section in (
        ("reference", recipe.reference),
        ("critic", recipe.critic),
        ("teacher", recipe.teacher),
    ):
        path = section.path if section is not None else None
        folder = find_folder(path, None) if path is not None and path != model.path else None
        if path is None or folder is None:
            continue
        trust = recipe.teacher.trust_remote_code if section is recipe.teacher else model.trust_remote_code
        positions = max_positions(read_config(folder, trust))
        if positions is not None:
            yield role, path, positions


def _shorter(recipe: Recipe, inputs: Inputs) -> str:
    """What makes a run's sequences shorter."""
    if inputs.rules is not None:
        return "set environment.max_tokens"
    if is_sampled(recipe, True):
        return "lower rollout.max_new_tokens, or data.max_prompt_tokens with data.too_long='drop'"
    return "set data.max_length and data.on_max_length"


def make_trainer(recipe: Recipe, model: ShardedModel, lr: float | None) -> Trainer:
    """What updates a model: its optimizer and schedule as the recipe says, at a learning rate of its own if `lr` is one."""
    settings = recipe.optimizer
    # A user's may fail on one rank alone; making it issues no collectives.
    with together("settings") if is_user_name(settings.name) else nullcontext():
        optimizer = make_optimizer(model, **(settings.arguments | ({} if lr is None else {"lr": lr})))
    total = recipe.policy_updates if model.role == POLICY else recipe.critic_updates
    schedule = make_schedule(optimizer, total_steps=total, **settings.schedule_arguments)
    return Trainer(model, optimizer, schedule)
