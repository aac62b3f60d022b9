"""What a recipe's data are, in numbers, and what the model sees of some rows, token by token. All of it is JSON-able."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardproof.config.evaluation_sets import held_out_sets
from shardproof.config.schema import Recipe
from shardproof.model.families import max_positions
from shardproof.rl.algorithms.registry import find_algorithm
from shardproof.rl.checks import Inputs
from shardproof.rl.conversations.prepare import open_prompts
from shardproof.rl.data import Prompt, sample_seed
from shardproof.rl.sources.given import given_kind, label_of, margin_of
from shardproof.rl.sources.pass_rates import key_of
from shardproof.rl.sources.reading import is_sampled, longest
from shardproof.rl.sources.streams import make_stream
from shardproof.rl.templates import panics_as_errors

TRAIN, EVALUATION = "train", "evaluation"
# Byte-level tokenizers write a byte as the character of its number, or as a further one if that cannot be seen.
_SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTES = {chr(n): n for n in _SEEN} | {chr(256 + k): n for k, n in enumerate(_UNSEEN)}
_SPACE = "\u2581"  # in the names of tokens
_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
_BINS = 8
_EXAMPLES = 3  # prompts that stand in two sets
_LOOKED_AHEAD = 2048  # prompts whose sources are counted


def summarise(recipe: Recipe, inputs: Inputs, split: str, num_rows: int) -> dict[str, Any]:
    """The facts of all sets, and the first rows of one: of the training set, those that the run draws first."""
    sets = sets_of(inputs)
    followed = {_label(each.name): each.max_new_tokens for each in held_out_sets(recipe)}
    followed[TRAIN] = recipe.rollout.max_new_tokens
    limit = max_positions(inputs.config) if inputs.rules is None else inputs.rules.max_tokens
    keys = {_label(each.name): each.key for each in held_out_sets(recipe)}
    keys[TRAIN] = "data.train"
    order = list(range(min(num_rows, len(sets[split]))))
    if split == TRAIN and num_rows:
        stream = make_stream(recipe, inputs.prompts, inputs.sources, inputs.rates)
        order = stream.take(min(num_rows, len(inputs.prompts)))
    show = token_shower(inputs.tokenizer)
    shown = [sets[split][number] for number in order]
    begun = _as_begun(recipe, inputs, split, shown, followed[split])
    return {
        "model": recipe.model.path,
        "algorithm": recipe.algorithm.name,
        "samples": is_sampled(recipe, split == TRAIN),
        "max_new_tokens": followed[split],
        "context": limit,
        "stop_tokens": [show(token) for token in inputs.stop_ids],
        "sets": {
            name: {
                "rows": len(prompts),
                "dropped": dict(inputs.dropped.get(keys[name], {})),
                **_facts(prompts, _is_scored(recipe)),
                "longest": longest(recipe, prompts, followed[name] * is_sampled(recipe, name == TRAIN)),
            }
            for name, prompts in sets.items()
        },
        "sources": _sources(recipe, inputs),
        "shared": _shared(sets),
        "split": split,
        "begins": any(new.tokens != old.tokens for (new, _), old in zip(begun, shown, strict=True)),
        "shown": [row_shown(prompt, show, recipe, error) for prompt, error in begun],
    }


def _as_begun(
    recipe: Recipe, inputs: Inputs, split: str, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[tuple[Prompt, str]]:
    """The first prompts of a set as their conversations begin in a run, and why one does not, if it does not."""
    if inputs.rules is None or not prompts:
        return [(prompt, "") for prompt in prompts]
    size, seed = recipe.train.prompts_per_step, recipe.train.seed
    # As in `starts_of`: of the first steps, or of every evaluation.
    seeds = [
        sample_seed(seed, *(divmod(number, size) if split == TRAIN else (-1, number)))
        for number in range(len(prompts))
    ]
    return open_prompts(recipe, inputs.rules, prompts, seeds, max_new_tokens)


def sets_of(inputs: Inputs) -> dict[str, Sequence[Prompt]]:
    """All sets by name: to train on, `data.evaluation`, and those of `evaluation.sets`."""
    held_out = {_label(name): prompts for name, prompts in inputs.held_out.items()}
    return {TRAIN: inputs.prompts, **held_out}


def _label(name: str) -> str:
    """What a held-out set is called here: by its name, or as its metrics begin if that is what another set is called."""
    return f"eval/{name}" if name in (TRAIN, EVALUATION) else name or EVALUATION


def _facts(prompts: Sequence[Prompt], is_scored: bool) -> dict[str, Any]:
    lengths = [len(prompt.tokens) for prompt in prompts]
    facts: dict[str, Any] = {
        "duplicates": len(prompts)
        - len({(key_of(each), each.completion, each.rejected) for each in prompts}),
        "prompt_tokens": spread(lengths),
        "histogram": histogram(lengths),
    }
    given = [len(prompt.completion) for prompt in prompts if prompt.completion]
    if given:
        facts["completion_tokens"] = spread(given)
        facts["trained_tokens"] = 0 if is_scored else sum(sum(trained_of(prompt)) for prompt in prompts)
    return facts


def spread(lengths: Sequence[int]) -> dict[str, float]:
    """The smallest, the middle, the one that 95 of 100 are not above, and the largest."""
    ordered = sorted(lengths)
    high = ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)]
    return {"min": ordered[0], "median": statistics.median(ordered), "p95": high, "max": ordered[-1]}


def histogram(lengths: Sequence[int]) -> list[dict[str, int]]:
    """How many lie in each of a few ranges of the same width."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // _BINS))
    counts = Counter((length - low) // width for length in lengths)
    return [
        {
            "from": low + number * width,
            "to": min(low + (number + 1) * width - 1, high),
            "rows": counts[number],
        }
        for number in range((high - low) // width + 1)
    ]


def _sources(recipe: Recipe, inputs: Inputs) -> list[dict[str, Any]]:
    """The sources to train on, with their part of the prompts that are drawn first."""
    stream = make_stream(recipe, inputs.prompts, inputs.sources, inputs.rates)
    bounds, begin = {}, 0
    for name, num in inputs.sources.items():
        bounds[name] = range(begin, begin + num)
        begin += num
    drawn = stream.take(_LOOKED_AHEAD)
    return [
        {
            "name": each.name,
            "source": each.source,
            "weight": each.weight,
            "rows": inputs.sources.get(each.name, 0),
            "share": sum(row in bounds.get(each.name, ()) for row in drawn) / len(drawn),
        }
        for each in recipe.data.sources
    ]


def _shared(sets: Mapping[str, Sequence[Prompt]]) -> list[dict[str, Any]]:
    """Prompts of a held-out set that are also trained on."""
    trained = {prompt.text for prompt in sets[TRAIN] if prompt.text}
    found = []
    for name, prompts in sets.items():
        both = [prompt.text for prompt in prompts if prompt.text in trained] if name != TRAIN else []
        if both:
            found.append(
                {"set": name, "rows": len(both), "examples": [text[:80] for text in both[:_EXAMPLES]]}
            )
    return found


def token_shower(tokenizer: Any) -> Callable[[int], dict[str, Any]]:
    """What makes {id, text, special} of a token; that of a part of a letter are its bytes, such as <C3>."""
    special = set(tokenizer.all_special_ids)
    special |= {k for k, v in getattr(tokenizer, "added_tokens_decoder", {}).items() if v.special}
    known: dict[int, dict[str, Any]] = {}

    def show(token: int) -> dict[str, Any]:
        if token not in known:
            with panics_as_errors():
                name = str(tokenizer.convert_ids_to_tokens(token))
                text = _seen(name, str(tokenizer.decode([token], skip_special_tokens=False)))
            known[token] = {"id": int(token), "text": text, "special": token in special}
        return known[token]

    return show


def _seen(name: str, text: str) -> str:
    """The text of a token as it stands inside of a sequence, from its name and from what it decodes to by itself."""
    spaces = len(name) - len(name.lstrip(_SPACE))
    if spaces and not text.startswith(_SPACE):
        # Decoders of SentencePiece's kind take a space from the beginning of what they decode.
        return " " * spaces + text.lstrip(" ")
    return _bytes_in(name) if "\ufffd" in text or not text else text


def _bytes_in(name: str) -> str:
    """The bytes that the name of a token stands for; the name itself if it is of another kind."""
    if (byte := _BYTE_NAME.fullmatch(name)) is not None:
        return f"<{byte[1]}>"
    # The byte-level name of a part of a letter has letters beyond ASCII.
    if name.isascii() or not all(letter in _BYTES for letter in name):
        return name
    return "".join(f"<{_BYTES[letter]:02X}>" for letter in name)


def trained_of(prompt: Prompt) -> list[int]:
    """1 for each token of a prompt and its completion that is trained on, 0 for the others."""
    if prompt.trained:
        return list(prompt.trained)
    return [0] * len(prompt.tokens) + [1] * len(prompt.completion)


def row_shown(
    prompt: Prompt, show: Callable[[int], dict[str, Any]], recipe: Recipe, error: str
) -> dict[str, Any]:
    """What the model sees of a row: its sequences token by token, and what the row says besides.

    There are none where the `error` keeps its conversation from beginning.
    """
    found: dict[str, Any] = {
        "row": prompt.number,
        "text": prompt.text,
        "sequences": [] if error else list(_sequences(prompt, show, _is_scored(recipe))),
    }
    if error:
        found["error"] = error
    for name in ("source", "sampling"):
        if value := getattr(prompt, name):
            found[name] = value
    if prompt.template:
        found["template"] = json.loads(json.dumps(prompt.template, default=str))  # Parquet has dates
    if (said := _judgement(prompt, recipe)) is not None:
        found["judged"] = said
    if prompt.row.get("answer") is not None and recipe.reward is not None:
        found["answer"] = str(prompt.row["answer"])
    return found


def _is_scored(recipe: Recipe) -> bool:
    """Whether a model learns to score whole texts, and no token of them."""
    return find_algorithm(recipe.algorithm.name).spec.role == "reward"


def _judgement(prompt: Prompt, recipe: Recipe) -> str | None:
    """What a row says of its given completions, as the loss reads it: a label, or a margin."""
    place = f"row {prompt.number + 1}"
    if given_kind(recipe) == "labelled":
        return "desirable" if label_of(place, prompt.row, recipe.data.label_column) else "undesirable"
    margin = margin_of(place, prompt.row) if _is_scored(recipe) else 0.0
    return f"margin {margin:g}" if margin else None


def _sequences(
    prompt: Prompt, show: Callable[[int], dict[str, Any]], is_scored: bool
) -> Iterator[dict[str, Any]]:
    if not prompt.rejected:
        yield _sequence("", prompt.tokens + prompt.completion, trained_of(prompt), show)
        return
    for name, tokens in (("chosen", prompt.completion), ("rejected", prompt.rejected)):
        mask = [0] * len(prompt.tokens) + [int(not is_scored)] * len(tokens)
        yield _sequence(name, prompt.tokens + tokens, mask, show)


def _sequence(
    name: str, tokens: Sequence[int], mask: Sequence[int], show: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    shown = [{**show(token), "trained": bool(flag)} for token, flag in zip(tokens, mask, strict=True)]
    return {"name": name, "tokens": shown}
