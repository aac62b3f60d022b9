"""What can be known about a run before any rank starts: its data, rewards and model files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from shardproof.config.evaluation_sets import held_out_sets
from shardproof.config.schema import Lora, Recipe, Rollout
from shardproof.environments.pool import EnvironmentPool
from shardproof.environments.protocol import Opening
from shardproof.errors import fail
from shardproof.model.families import check_sequence_parallel, max_positions, why_not_packed
from shardproof.model.inventory import take_inventory
from shardproof.model.roles import REWARD
from shardproof.model.router import check_balanced
from shardproof.model.routing import check_replayable
from shardproof.model.skeleton import build_skeleton
from shardproof.rl.algorithms.registry import check_algorithm, find_algorithm, make_algorithm
from shardproof.rl.chat.template import Template
from shardproof.rl.conversations.conversation import Rules
from shardproof.rl.conversations.prepare import (
    check_variables_of_rows,
    environment_of,
    first_opening,
    first_prompt,
    make_rules,
)
from shardproof.rl.data import HeldOutPrompts, Prompt, sample_seed
from shardproof.rl.rewards.from_recipe import check_rewards
from shardproof.rl.sources.pass_rates import select
from shardproof.rl.sources.reading import (
    Limits,
    check_chosen,
    dropped_of,
    encode,
    is_sampled,
    read_held_out,
    read_training,
    say_dropped,
    sizes_of,
)
from shardproof.rl.sources.text_files import Row
from shardproof.rl.stop_ids import find_stop_ids, unheeded_end
from shardproof.rl.templates import chat_template_of, panics_as_errors
from shardproof.shard.plan import plan_shards
from shardproof.user_code import import_named
from shardproof.weights.source import (
    TOKENIZER_FILES,
    check_tokenizer_keys,
    find_folder,
    read_config,
    resolve_folder,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What a run reads besides weights."""

    tokenizer: Any
    config: PretrainedConfig
    prompts: Sequence[Prompt]
    held_out: HeldOutPrompts
    stop_ids: tuple[int, ...]  # tokens that end a completion
    canary: tuple[int, ...] = ()  # a prompt on which engine and trainer are compared
    rules: Rules | None = None  # of conversations with an environment
    sources: Mapping[str, int] = field(
        default_factory=dict
    )  # how many prompts each source has, in their order
    rates: Sequence[float | None] = ()  # how often each prompt was solved; empty if nobody measured it
    dropped: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # rows that are left out, by key and why


@dataclass(frozen=True)
class Basis:
    """What prompts are made with."""

    tokenizer: Any
    config: PretrainedConfig
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Data:
    """A run's prompts, and whether some prompt is a list of messages."""

    prompts: Sequence[Prompt]
    held_out: HeldOutPrompts
    has_messages: bool
    sources: Mapping[str, int] = field(
        default_factory=dict
    )  # how many prompts each source has, in their order
    rates: Sequence[float | None] = ()  # how often each prompt was solved; empty if nobody measured it
    dropped: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # rows that are left out, by key and why


def check_inputs(recipe: Recipe, pool: EnvironmentPool | None = None) -> Inputs:
    """The run's tokenizer, config and prompts; raises if they, the rewards or the environment do not fit together.

    `pool` are the workers of the recipe's environment; without them one is started, and ends with the check.
    """
    return read_data(recipe, check_basis(recipe, model_folder(recipe.model.path)), pool)[0]


def check_basis(recipe: Recipe, folder: Path) -> Basis:
    """Tokenizer and config from the model's folder; raises if they, the algorithm or the rewards cannot be used."""
    for kind, name in recipe.user_code:
        import_named(kind, name)
    check_algorithm(recipe)
    config = read_config(folder, recipe.model.trust_remote_code)
    if recipe.rollout.replay_experts:
        check_replayable(config)
    if recipe.rollout.exact:
        check_exact(recipe, config)
    check_balanced(config, recipe.algorithm.router_coef, "settings")
    if find_algorithm(recipe.algorithm.name).spec.role == REWARD:
        check_pairs(config)
    tokenizer = load_tokenizer(folder, recipe.model.trust_remote_code)
    check_rewards(recipe)
    return Basis(tokenizer, config, find_stop_ids(folder, config, tokenizer, recipe.rollout.stop_ids))


def read_data(recipe: Recipe, basis: Basis, pool: EnvironmentPool | None = None) -> tuple[Inputs, Data]:
    """A run's inputs, and its data by themselves; raises if some row cannot be used."""
    with environment_of(recipe, pool) as environment:
        sets = held_out_sets(recipe)
        train = read_training(recipe, environment)
        readings = [train, *(read_held_out(recipe, each, environment) for each in sets)]
        check_chosen(recipe, readings)
        has_messages = any(each.has_messages for each in readings)
        opened = open_first(recipe, basis, environment, train.rows, has_messages)
        context = max_positions(basis.config) if opened.rules is None else opened.rules.max_tokens
        lengths = [(recipe.rollout.max_new_tokens, "rollout.max_new_tokens")]
        lengths += [(each.max_new_tokens, each.length_key) for each in sets]
        encoded: list[list[Prompt]] = []
        rates: list[float | None] = []
        for each, (num, length_key) in zip(readings, lengths, strict=True):
            limits = Limits(context, num, basis.config.get_text_config().vocab_size, length_key)
            prompts = encode(recipe, each, basis.tokenizer, opened.rules, limits)
            if each is train:
                prompts, rates = select(recipe, prompts, train.dropped)
            _require_known_tokens(prompts, basis.config)
            encoded.append([replace(prompt, number=number) for number, prompt in enumerate(prompts)])
            if opened.rules is not None:
                check_variables_of_rows(opened.rules, prompts)
        say_dropped(readings)
        _say_unheeded_end(recipe, basis, has_messages, opened.rules)
        held_out = {each.name: prompts for each, prompts in zip(sets, encoded[1:], strict=True)}
        data = Data(encoded[0], held_out, has_messages, sizes_of(encoded[0]), rates, dropped_of(readings))
        return make_inputs(recipe, basis, data, opened), data


def _say_unheeded_end(recipe: Recipe, basis: Basis, has_messages: bool, rules: Rules | None) -> None:
    """Warn where completions of a chat template do not end where it ends the model's turns."""
    is_templated = recipe.data.chat or has_messages if rules is None else rules.is_templated
    samples = is_sampled(recipe, True) or (bool(held_out_sets(recipe)) and is_sampled(recipe, False))
    variables = recipe.data.chat_template_kwargs
    if not (is_templated and samples and chat_template_of(basis.tokenizer, variables)):
        return
    template = Template(basis.tokenizer, variables)
    found = unheeded_end(template, basis.stop_ids, recipe.rollout.stop)
    if found is not None:
        logger.warning(
            "the chat template ends the model's turns with %r, which ends no completion: a model that says it goes on "
            "behind it; add its id to rollout.stop_ids: [%d]",
            *reversed(found),
        )


@dataclass(frozen=True)
class FirstOpening:
    """How a conversation about one of the first rows begins, and the rules of all; nothing without an environment."""

    rules: Rules | None = None
    number: int = 0
    opening: Opening | None = None


def open_first(
    recipe: Recipe,
    basis: Basis,
    environment: EnvironmentPool | None,
    rows: Sequence[Row],
    has_messages: bool,
) -> FirstOpening:
    """Begin a conversation with the environment, of which `rows` are the first; raises if none begins."""
    if environment is None:
        return FirstOpening()
    number, opening = first_opening(environment, rows, sample_seed(recipe.train.seed, -1, 0))
    context = max_positions(basis.config)
    rules = make_rules(recipe, basis.tokenizer, has_messages, environment.facts, opening, context)
    return FirstOpening(rules, number, opening)


def make_inputs(recipe: Recipe, basis: Basis, data: Data, opened: FirstOpening) -> Inputs:
    """What a run reads, from its parts."""
    canary = data.prompts[0].tokens
    if opened.rules is not None and opened.opening is not None:
        first = data.prompts[min(opened.number, len(data.prompts) - 1)]  # rows before it may be left out
        most = (first.sampling or {}).get("max_new_tokens", recipe.rollout.max_new_tokens)
        canary = first_prompt(opened.rules, first, opened.opening, most)
    tokenizer, config = basis.tokenizer, basis.config
    about = (data.sources, data.rates, data.dropped)
    return Inputs(
        tokenizer, config, data.prompts, data.held_out, basis.stop_ids, canary, opened.rules, *about
    )


def check_model(recipe: Recipe, config: PretrainedConfig, num_ranks: int) -> None:
    """Raise if the checkpoint does not hold what the model needs, or the model cannot be split over the ranks."""
    model, role = recipe.model, find_algorithm(recipe.algorithm.name).spec.role
    if num_ranks % model.replicate:
        message = f"model.replicate={model.replicate} does not divide the {num_ranks} ranks."
        fix = "set model.replicate to a number that divides the ranks, or change train.ranks"
        raise fail("C002", "mesh", message, fix=fix)
    check_sequence_parallel(config, model.sequence_parallel, num_ranks // model.replicate)
    if not model.random_init:
        folder = model_folder(model.path)
        resolved = resolve_folder(model.path, folder, model.trust_remote_code)
        skeleton = build_skeleton(
            resolved.config,
            role=role,
            lora=make_lora(model.lora),
            trust_remote_code=model.trust_remote_code,
        )
        plan_shards(
            skeleton, take_inventory(skeleton.model), resolved.checkpoint, resolved.seed, role == REWARD
        )


def make_lora(section: Lora | None) -> Any:
    """The adapters that a section asks for, as peft describes them; None if it asks for none."""
    if section is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=section.r, lora_alpha=section.alpha, target_modules=section.target_modules)


def model_folder(path: str) -> Path:
    """Where a model's files lie on this machine; raises L101 if they do not."""
    folder = find_folder(path, None)
    if folder is None:
        from huggingface_hub import constants

        message = f"{path!r} is neither a folder nor a model on the hub or in its cache."
        hint = "the hub needs the network, and a login for private and gated models"
        if constants.HF_HUB_OFFLINE:
            hint = "only the cache was searched, because HF_HUB_OFFLINE is set"
        fix = f"pass a folder or a hub id that holds safetensors files; {hint}"
        raise fail("L101", "source", message, fix=fix)
    return folder


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a folder; raises C005 if it cannot be loaded."""
    check_tokenizer_keys(folder)
    try:
        with panics_as_errors():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raise types of their own for files that are missing or wrong
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            reason = f"there is none of {', '.join(TOKENIZER_FILES)}."
        message = f"the tokenizer of {folder} cannot be loaded: {reason}"
        raise fail("C005", "data", message, fix="put the model's tokenizer files into its folder") from error


def _require_known_tokens(prompts: list[Prompt], config: PretrainedConfig) -> None:
    """Raise if the tokenizer makes ids for which the model has no embedding."""
    size = config.get_text_config().vocab_size
    for prompt in prompts:
        largest = max((*prompt.tokens, *prompt.completion, *prompt.rejected), default=0)
        if largest >= size:
            message = f"the tokenizer produces the token id {largest}, but the model's vocabulary has {size} tokens: {prompt.text[:60]!r}."
            raise fail("C005", "data", message, fix="use the tokenizer that belongs to the model")


def check_pairs(config: PretrainedConfig) -> None:
    """Raise if the two texts of a pair, whose scores the loss of a reward model compares, cannot be scored in one pass."""
    reason = why_not_packed(config)
    if reason is not None:
        message = f"a reward model cannot be trained from {config.model_type!r}: its texts cannot be packed, because {reason}."
        fix = (
            "choose another model"
            if "dropout" not in reason
            else "set the dropout of attention to 0 in config.json"
        )
        raise fail("T303", "settings", message, fix=fix)


def check_exact(recipe: Recipe, config: PretrainedConfig) -> None:
    """Raise if the log-probs of engine and trainer cannot be equal, or not be compared, with this model and algorithm."""
    key, fix = "rollout.exact=true does not work with", "set rollout.exact=false"
    reason = why_not_packed(config)
    if reason is not None:
        raise fail("C001", "rollout", f"{key} {config.model_type!r}: {reason}.", fix=fix)
    loss = make_algorithm(recipe.algorithm, recipe.rollout).loss
    if "mismatch/max" not in loss.metrics:
        message = f"{key} {recipe.algorithm.name!r}: its loss does not report 'mismatch/max', which proves that it is."
        raise fail(
            "C001", "rollout", message, fix=f"build the loss with shardproof.policy_gradient, or {fix}"
        )


def check_ahead(rollout: Rollout) -> None:
    """Raise if an engine that samples while the policy trains would have to share its memory with the policy."""
    shared = [name for name in ("sleep", "offload_policy") if getattr(rollout, name)]
    if rollout.ahead and shared:
        message = f"rollout.ahead={rollout.ahead} and rollout.{shared[0]}=true exclude each other: the engine samples while the policy trains, so neither can lend its memory to the other."
        fix = f"set rollout.{shared[0]}=false, or rollout.ahead=0"
        raise fail("C001", "rollout", message, fix=fix)


def describe_ahead(rollout: Rollout) -> str | None:
    """What running ahead means for a recipe, in one line; None if it does not."""
    if not rollout.ahead:
        return None
    steps, updates = _plural(rollout.ahead, "step"), _plural(rollout.ahead, "update")
    if rollout.engine in ("embedded", "sharded"):
        return f"samples {steps} ahead, in the trainer's own processes: only rewards run while it trains; trained tokens are {updates} old"
    return f"samples up to {steps} ahead while it trains; trained tokens are up to {updates} old"


def _plural(num: int, word: str) -> str:
    return f"{num} {word}{'s' * (num > 1)}"
