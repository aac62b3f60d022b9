"""Make recipes/tiny: a small language model that adds numbers carelessly, and the questions to train and test it with.

The model is trained from scratch, by the same supervised fine-tuning that `shardproof train` offers, on sums of which a
third are right and the others 1 to 3 too large. It learns how to add and to be careless about it: reinforcement
learning then has something to correct. The held-out questions are in neither training set, in neither order: where 12+7
is held out, so is 7+12.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from shardproof.config.load import parse_recipe
from shardproof.rl.loop import train

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "tiny"
LIMIT = 50  # numbers from 0 to 49
HELD_OUT = 400
ROWS_PER_SUM = 60
EXCESS = {0: 0.33, 1: 0.37, 2: 0.15, 3: 0.15}  # how often an answer is this much too large
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
Pair = tuple[int, int]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_config(vocabulary: int, max_positions: int = 64, num_heads: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=32,  # the smallest that vLLM serves on a CPU
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def split_sums(limit: int, num_held_out: int) -> tuple[list[Pair], list[Pair]]:
    """(training, held out): ordered pairs of numbers, with both orders of a pair on the same side."""
    pairs = [(a, b) for a in range(limit) for b in range(a + 1)]
    random.Random(1).shuffle(pairs)
    held_out: list[Pair] = []
    while len(held_out) < num_held_out:
        held_out += both_orders(*pairs.pop())
    training = [pair for each in pairs for pair in both_orders(*each)]
    random.Random(2).shuffle(training)
    return training, held_out


def both_orders(a: int, b: int) -> list[Pair]:
    return sorted({(a, b), (b, a)})


def careless_rows(pairs: list[Pair], seed: int) -> list[dict[str, str]]:
    """Many answers to each sum, most of them up to 3 too large."""
    generator = random.Random(seed)
    excess = generator.choices(list(EXCESS), list(EXCESS.values()), k=ROWS_PER_SUM * len(pairs))
    many = pairs * ROWS_PER_SUM
    return [{"prompt": f"{a}+{b}=", "completion": str(a + b + c)} for (a, b), c in zip(many, excess)]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_recipe(folder: Path, rows: str, options: argparse.Namespace) -> dict[str, Any]:
    """Supervised fine-tuning of the untrained model in `folder` on the file `rows` beside it."""
    return {
        "model": {"path": str(folder / "untrained"), "random_init": True, "compute_dtype": "float32"},
        "data": {"train": str(folder / rows)},
        "algorithm": {"name": "sft"},
        "optimizer": {
            "lr": 3e-3,
            "weight_decay": 0.01,
            "betas": (0.9, 0.98),
            "schedule": "cosine",
            "warmup_steps": 20,
            "final_ratio": 0.05,
        },
        "train": {
            "steps": options.steps,
            "seed": options.seed,
            "prompts_per_step": 256,
            "micro_batch_tokens": 16384,
        },
        "output": {
            "folder": str(folder / "run"),
            "save_every": 0,
            "model_dtype": "bfloat16",
            "tensorboard": False,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    training, held_out = split_sums(LIMIT, HELD_OUT)
    tokenizer = make_tokenizer()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        make_config(len(tokenizer)).save_pretrained(scratch / "untrained")
        tokenizer.save_pretrained(scratch / "untrained")
        write_rows(scratch / "careless.jsonl", careless_rows(training, options.seed))
        train(parse_recipe(make_recipe(scratch, "careless.jsonl", options), "the tiny model's recipe"))
        shutil.copytree(scratch / "run" / "model", options.folder / "model", dirs_exist_ok=True)
        for file in TOKENIZER_FILES:
            shutil.copy(scratch / "untrained" / file, options.folder / "model")
    for part, pairs in (("evaluation", held_out), ("train", training)):
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
        write_rows(options.folder / f"{part}.jsonl", rows)


if __name__ == "__main__":
    main()
