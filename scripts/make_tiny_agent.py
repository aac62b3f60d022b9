"""Make recipes/tiny-agent: a small model that knows two tasks and is bad at both, and the questions for them.

Multiplying: the model is trained from scratch on guesses at products of two three-digit numbers, which are wrong, on
calls of the tool `multiply`, and on answers that follow the tool's reply. Seven of eight first turns are guesses, so it
knows how a call looks and hardly ever makes one. No held-out question is in its training, in either order.

Taking sticks: it is trained on legal moves at random, so it knows the rules of the game and no way to win.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from make_tiny_model import Pair, make_config, make_recipe, write_rows
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardproof import Turn
from shardproof.config.load import parse_recipe
from shardproof.rl.loop import train

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
sys.path.append(str(RECIPES))
from tiny_agent import TakeAway  # noqa: E402

FOLDER = RECIPES / "tiny-agent"
NUM_TRAIN, NUM_HELD_OUT = 2000, 400
NUM_ROWS = 40_000  # to begin with, of each task
MOST, STICKS = (2, 3, 4), range(4, 25)  # of the game
LONGEST = 12  # sticks that reinforcement learning begins with
CALLS, AFTER_CALLS = 0.125, 0.5  # how many of the first turns are calls; how many turns follow one
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>", "<tool>", "<tools>")
# Parts of a call that are one token each, so that a tiny model writes a call in 14 tokens.
PARTS = ("<tool_call>", "</tool_call>", '{"name": "', "multiply", '", "arguments": {"a": ', ', "b": ', "}}")
TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(",") }})\
{% endfor %}<end>{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<tool>{{ message.content }}<end>
{%- elif message.role == "assistant" %}<assistant>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<end>
{%- else %}<user>{{ message.content }}<end>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, and one for each part of a call."""
    printable = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *printable, "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in PARTS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    return fast


def split_pairs() -> tuple[list[Pair], list[Pair], list[Pair]]:
    """(for the first training, for reinforcement learning, held out); no held-out pair is in the others in any order."""
    generator = random.Random(1)
    seen: set[Pair] = set()

    def fresh(number: int) -> list[Pair]:
        found: list[Pair] = []
        while len(found) < number:
            a, b = generator.randrange(100, 1000), generator.randrange(100, 1000)
            if (a, b) not in seen:
                seen.update([(a, b), (b, a)])
                found.append((a, b))
        return found

    held_out, training = fresh(NUM_HELD_OUT), fresh(NUM_TRAIN)
    return fresh(NUM_ROWS), training, held_out


def first_rows(pairs: list[Pair], seed: int) -> list[dict[str, str]]:
    """Turns to learn from: guesses and a few calls in the first turn, and the answers after a tool's reply."""
    generator = random.Random(seed)
    rows = []
    for a, b in pairs:
        question = f"<tools>multiply(a,b)<end><user>{a}*{b}=<end><assistant>"
        call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
        if generator.random() < AFTER_CALLS:
            prompt = f"{question}{call}<end><tool>{a * b}<end><assistant>"
            rows.append({"prompt": prompt, "completion": str(a * b)})
        elif generator.random() < CALLS:
            rows.append({"prompt": question, "completion": call})
        else:
            guess = round(a * b * generator.uniform(0.8, 1.2))
            rows.append({"prompt": question, "completion": str(guess)})
    return rows


def game_rows(seed: int) -> list[dict[str, str]]:
    """A legal move at random, at some turn of games against the opponent of the recipe."""
    generator = random.Random(seed)
    rows = []
    for _ in range(NUM_ROWS):
        game = TakeAway()
        most, sticks = generator.choice(MOST), generator.choice(STICKS)
        text = f"<user>{game.start({'sticks': sticks, 'most': most}, generator.randrange(2**32))}<end><assistant>"
        turns = generator.randrange(4)
        while True:
            move = str(generator.randint(1, min(most, game.left)))
            reply = game.step(Turn(move))
            if reply.done or not turns:
                break
            text += f"{move}<end><user>{reply.messages}<end><assistant>"
            turns -= 1
        rows.append({"prompt": text, "completion": move})
    return rows


def winnable() -> list[dict[str, Any]]:
    """The positions from which whoever moves first can win."""
    return [
        {"prompt": f"{sticks} left, take 1-{most}", "sticks": sticks, "most": most}
        for most in MOST
        for sticks in range(most + 2, LONGEST + 1)
        if sticks % (most + 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    first, training, held_out = split_pairs()
    tokenizer = make_tokenizer()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        config = make_config(len(tokenizer), max_positions=256, num_heads=4)
        config.save_pretrained(scratch / "untrained")
        tokenizer.save_pretrained(scratch / "untrained")
        write_rows(scratch / "first.jsonl", first_rows(first, options.seed) + game_rows(options.seed))
        train(parse_recipe(make_recipe(scratch, "first.jsonl", options), "the tiny model's recipe"))
        model = options.folder / "model"
        shutil.copytree(scratch / "run" / "model", model, dirs_exist_ok=True)
        tokenizer.save_pretrained(model)
    for part, pairs in (("evaluation", held_out), ("train", training)):
        rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]
        write_rows(options.folder / f"products-{part}.jsonl", rows)
    write_rows(options.folder / "game.jsonl", winnable())


if __name__ == "__main__":
    main()
