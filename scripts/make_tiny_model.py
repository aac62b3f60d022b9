"""Make recipes/tiny: a small language model that adds numbers badly, and the prompts to teach it with.

The model is trained here from nothing, by the same supervised fine-tuning that `shardproof train` offers, on sums of
which some are right and the others made up. It knows the form of an answer, and the truth is what it says most often,
but it is wrong most of the time: reinforcement learning has something to find.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from shardproof.config.load import parse_recipe
from shardproof.rl.loop import train

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "tiny"
LIMIT = 12  # numbers from 0 to 11
SHARE_RIGHT = 0.3
ROWS_PER_SUM = 60
HELD_OUT = 24
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_config(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM serves on a CPU
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def noisy_answer(a: int, b: int, generator: random.Random) -> int:
    """The sum, or any sum that there is."""
    return a + b if generator.random() < SHARE_RIGHT else generator.randrange(2 * LIMIT - 1)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_recipe(folder: Path, steps: int) -> dict[str, Any]:
    """Supervised fine-tuning of the untrained model in `folder` on the rows beside it."""
    return {
        "model": {"path": str(folder / "untrained"), "random_init": True, "compute_dtype": "float32"},
        "data": {"train": str(folder / "noisy.jsonl")},
        "algorithm": {"name": "sft"},
        "optimizer": {
            "lr": 3e-3,
            "weight_decay": 0.01,
            "betas": (0.9, 0.98),
            "schedule": "cosine",
            "warmup_steps": 20,
            "final_ratio": 0.05,
        },
        "train": {"steps": steps, "prompts_per_step": 2 * LIMIT * LIMIT, "micro_batch_tokens": 16384},
        "output": {
            "folder": str(folder / "run"),
            "save_every": 0,
            "model_dtype": "bfloat16",
            "tensorboard": False,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    pairs = [(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    tokenizer, generator = make_tokenizer(), random.Random(0)
    noisy = [(a, b, noisy_answer(a, b, generator)) for _ in range(ROWS_PER_SUM) for a, b in pairs]
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        make_config(len(tokenizer)).save_pretrained(scratch / "untrained")
        tokenizer.save_pretrained(scratch / "untrained")
        write_rows(
            scratch / "noisy.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(c)} for a, b, c in noisy]
        )
        train(parse_recipe(make_recipe(scratch, options.steps), "the tiny model's recipe"))
        shutil.copytree(scratch / "run" / "model", options.folder / "model", dirs_exist_ok=True)
        for file in TOKENIZER_FILES:
            shutil.copy(scratch / "untrained" / file, options.folder / "model")
    random.Random(1).shuffle(pairs)
    for part, rows in (("evaluation", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        write_rows(
            options.folder / f"{part}.jsonl",
            [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in rows],
        )


if __name__ == "__main__":
    main()
