"""What can be known about a run before any rank starts: its data, rewards and model files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from shardproof.config.schema import Model, Recipe, Rollout
from shardproof.environments.pool import EnvironmentPool
from shardproof.environments.protocol import Opening
from shardproof.errors import fail
from shardproof.model.families import check_sequence_parallel, max_positions, why_not_packed
from shardproof.model.inventory import take_inventory
from shardproof.model.roles import POLICY
from shardproof.model.routing import check_replayable
from shardproof.model.skeleton import build_skeleton
from shardproof.rl.algorithms.registry import check_algorithm, find_algorithm, make_algorithm
from shardproof.rl.conversations.conversation import Rules
from shardproof.rl.conversations.prepare import (
    SOURCE,
    environment_of,
    first_opening,
    first_prompt,
    make_rules,
    rows_of,
)
from shardproof.rl.data import Prompt, Row, Rows, encode_completions, encode_prompts, load_rows, sample_seed
from shardproof.rl.reward_functions import find_reward
from shardproof.rl.stop_ids import find_stop_ids
from shardproof.rl.templates import panics_as_errors
from shardproof.shard.plan import plan_shards
from shardproof.user_code import import_named
from shardproof.weights.source import (
    TOKENIZER_FILES,
    check_tokenizer_keys,
    find_folder,
    read_config,
    resolve_folder,
)


@dataclass(frozen=True)
class Inputs:
    """What a run reads besides weights."""

    tokenizer: Any
    config: PretrainedConfig
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    stop_ids: tuple[int, ...]  # tokens that end a completion
    canary: tuple[int, ...] = ()  # a prompt on which engine and trainer are compared
    rules: Rules | None = None  # of conversations with an environment


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
    held_out: Sequence[Prompt]
    has_messages: bool


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
    tokenizer = _load_tokenizer(folder, recipe.model.trust_remote_code)
    for spec in recipe.reward.functions if recipe.reward is not None else []:
        find_reward(spec.name)
    return Basis(tokenizer, config, find_stop_ids(folder, config, tokenizer))


def read_data(recipe: Recipe, basis: Basis, pool: EnvironmentPool | None = None) -> tuple[Inputs, Data]:
    """A run's inputs, and its data by themselves; raises if some row cannot be used."""
    with environment_of(recipe, pool) as environment:
        sources = [source for source in (recipe.data.train, recipe.data.evaluation) if source is not None]
        rows = [_read_rows(recipe, source, environment) for source in sources]
        column = recipe.data.prompt_column
        has_messages = any(isinstance(row.get(column), list) for some in rows for row in some)
        opened = open_first(recipe, basis, environment, rows[0], has_messages)
        prompts, held_out = [*(_encode(recipe, some, basis.tokenizer, opened.rules) for some in rows), []][:2]
        _require_known_tokens([*prompts, *held_out], basis.config)
        limit = max_positions(basis.config) if opened.rules is None else opened.rules.max_tokens
        _require_room(recipe, [*prompts, *held_out], limit)
        data = Data(prompts, held_out, has_messages)
        return make_inputs(recipe, basis, data, opened), data


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
        first = data.prompts[opened.number]
        canary = first_prompt(opened.rules, first, opened.opening, recipe.rollout.max_new_tokens)
    tokenizer, config = basis.tokenizer, basis.config
    return Inputs(tokenizer, config, data.prompts, data.held_out, basis.stop_ids, canary, opened.rules)


def check_model(recipe: Recipe, config: PretrainedConfig, num_ranks: int) -> None:
    """Raise if the checkpoint does not hold what the model needs, or the model cannot be split over the ranks."""
    model = recipe.model
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
            role=POLICY,
            lora=make_lora(model),
            trust_remote_code=model.trust_remote_code,
        )
        plan_shards(skeleton, take_inventory(skeleton.model), resolved.checkpoint, resolved.seed)


def make_lora(model: Model) -> Any:
    """The adapters that a recipe asks for, as peft describes them; None if it asks for none."""
    if model.lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=model.lora.r, lora_alpha=model.lora.alpha, target_modules=model.lora.target_modules)


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


def _load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
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


def _read_rows(recipe: Recipe, source: str, environment: EnvironmentPool | None) -> Rows:
    data, is_given = recipe.data, not find_algorithm(recipe.algorithm.name).spec.samples
    # Given completions need no answer, unless held-out ones are sampled and scored.
    answer = data.answer_column if recipe.reward is not None else None
    rewards = [] if recipe.reward is None else [spec.name for spec in recipe.reward.functions]
    if is_given and source != data.evaluation:
        rewards = []  # completions that are given are not scored
    completion = data.completion_column if is_given else None
    given = rows_of(environment, source) if source.startswith(SOURCE) else None
    return load_rows(
        source, data.prompt_column, answer, completion, rewards, given, needs_prompt=environment is None
    )


def _encode(recipe: Recipe, rows: Rows, tokenizer: Any, rules: Rules | None) -> list[Prompt]:
    data, tools = recipe.data, rules.tools if rules is not None else ()
    chat = data.chat or (rules is not None and rules.is_templated)
    prompts = encode_prompts(rows, tokenizer, data.prompt_column, chat, data.max_prompt_tokens, tools)
    is_given = not find_algorithm(recipe.algorithm.name).spec.samples
    return encode_completions(prompts, tokenizer, data.completion_column) if is_given else prompts


def _require_known_tokens(prompts: list[Prompt], config: PretrainedConfig) -> None:
    """Raise if the tokenizer makes ids for which the model has no embedding."""
    size = config.get_text_config().vocab_size
    for prompt in prompts:
        largest = max((*prompt.tokens, *prompt.completion), default=0)
        if largest >= size:
            message = f"the tokenizer produces the token id {largest}, but the model's vocabulary has {size} tokens: {prompt.text[:60]!r}."
            raise fail("C005", "data", message, fix="use the tokenizer that belongs to the model")


def _require_room(recipe: Recipe, prompts: list[Prompt], limit: int | None) -> None:
    """Raise if some prompt and what follows it are longer than the model's context, or than a conversation may be."""
    if limit is None:
        return
    samples = recipe.reward is not None or recipe.environment is not None
    sampled = recipe.rollout.max_new_tokens if samples else 0
    longest = max(prompts, key=lambda prompt: len(prompt.tokens) + max(len(prompt.completion), sampled))
    num, following = len(longest.tokens), max(len(longest.completion), sampled)
    if num + following > limit:
        what = f"rollout.max_new_tokens={sampled}" if following == sampled else f"a completion of {following}"
        where = f"the model's {limit} positions"
        if recipe.environment is not None and limit == recipe.environment.max_tokens:
            where = f"environment.max_tokens={limit}"
        message = f"a prompt of {num} tokens with {what} does not fit {where}: {longest.text[:60]!r}."
        raise fail("C005", "data", message, fix="leave long rows out, or lower rollout.max_new_tokens")


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
