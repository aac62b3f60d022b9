"""What it takes to make a turn's tokens: everything rendered and tokenised again, TRL's tool loop, and ours.

Part of benchmarks/turns.py. The tokenizer is a byte-level BPE of 32,000 entries, trained here on Python's own library.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from reporting import print_table

TURNS = (2, 8, 32, 128)
AGAIN, OURS = "everything rendered and tokenised again", "shardproof"
TRL = "TRL's tool loop"
_FILES = 150
_SAID, _REPLY = 60, 40  # words
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}<tool_call>\n{{ c['function'] | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> tuple[Any, list[str]]:
    """(a fast tokenizer with a chat template, words to talk with)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(errors="replace") for path in sorted(library.glob("*.py"))[:_FILES]]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer, " ".join(texts).split()


def measure_tokens(repeats: int = 5) -> dict[str, dict[int, float]]:
    """Milliseconds per turn, on average over a conversation of so many turns; the median of several."""
    tokenizer, words = make_tokenizer()

    def text(turn: int, size: int) -> str:
        start = 997 * turn % (len(words) - size)
        return " ".join(words[start : start + size])

    ways: dict[str, Callable[[list[dict[str, Any]]], object]] = {AGAIN: _render_all(tokenizer)}
    if (of_trl := _trl_suffix(tokenizer)) is not None:
        ways[TRL] = of_trl
    ways[OURS] = _our_reply(tokenizer)
    found: dict[str, dict[int, float]] = {name: {} for name in ways}
    for name, way in ways.items():
        for turns in TURNS:
            taken = []
            for _ in range(repeats):
                messages, seconds = [{"role": "user", "content": text(0, _SAID)}], 0.0
                for turn in range(1, turns + 1):
                    messages.append({"role": "assistant", "content": text(2 * turn, _REPLY)})
                    messages.append({"role": "tool", "name": "look", "content": text(2 * turn + 1, _SAID)})
                    started = time.perf_counter()
                    way(messages)
                    seconds += time.perf_counter() - started
                taken.append(1000 * seconds / turns)
            found[name][turns] = median(taken)
    return found


def _render_all(tokenizer: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda messages: tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )


def _trl_suffix(tokenizer: Any) -> Callable[[list[dict[str, Any]]], object] | None:
    """TRL's own function, which renders a stand-in and the tool's messages twice; None where TRL is not installed."""
    try:
        from trl import GRPOTrainer
    except ImportError:
        return None
    trainer = SimpleNamespace(
        _is_vlm=False,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=None,
        chat_template_kwargs={},
    )
    return lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages[-1:])


def _our_reply(tokenizer: Any) -> Callable[[list[dict[str, Any]]], object]:
    from shardproof.rl.chat.format import ChatFormat

    format = ChatFormat.of(tokenizer)
    return lambda messages: format.reply(messages[-1:], tokenizer.eos_token_id)


def report_tokens(found: dict[str, dict[int, float]]) -> None:
    rows = [
        [name, *(f"{row[turns]:.2f}" for turns in TURNS), f"{row[TURNS[-1]] / row[TURNS[0]]:.1f}"]
        for name, row in found.items()
    ]
    header = ["ms per turn to make its tokens", *(f"{turns} turns" for turns in TURNS), "longest / shortest"]
    print_table(f"{_SAID} words of the tool and {_REPLY} of the policy per turn", header, rows)
