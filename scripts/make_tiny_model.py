"""Make recipes/tiny: a small language model that adds numbers badly, and the prompts to teach it with.

The model is trained here, with this project's own SFT, on sums of which half are right and the others near misses.
It knows the form of an answer and has seen the truth, but is wrong most of the time; reinforcement learning has
something to find.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

import shardproof as sp

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "tiny"
LIMIT = 20  # numbers from 0 to 19
SHARE_RIGHT = 0.5
HELD_OUT = 40


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
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def noisy_answer(a: int, b: int, generator: random.Random) -> int:
    """The sum, or one of its neighbours."""
    if generator.random() < SHARE_RIGHT:
        return a + b
    return max(0, a + b + generator.choice([-4, -3, -2, -1, 1, 2, 3, 4]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = random.Random(0)
    tokenizer = make_tokenizer()
    policy = sp.load(sp.RandomInit(make_config(len(tokenizer))), device="cpu", compute_dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = sp.make_schedule(
        optimizer, "cosine", warmup_steps=20, total_steps=options.steps, final_ratio=0.05
    )
    pairs = [(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    for step in range(options.steps):
        sequences, masks = [], []
        for a, b in pairs:
            prompt = tokenizer(f"{a}+{b}=")["input_ids"]
            answer = tokenizer(str(noisy_answer(a, b, generator)))["input_ids"] + [tokenizer.eos_token_id]
            sequences.append(prompt + answer)
            masks.append([0.0] * (len(prompt) - 1) + [1.0] * len(answer))
        result = sp.train_step(policy, sp.Batch(sequences, mask=masks), optimizer, schedule, loss="sft")
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {result.loss:.4f}", flush=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    sp.save_pretrained(policy, options.folder / "model", dtype=torch.bfloat16)
    tokenizer.save_pretrained(options.folder / "model")
    random.Random(1).shuffle(pairs)
    for name, part in (("evaluation", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in part]
        (options.folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
