"""The tables in docs/sizing.md: peak memory per GPU of common models, as `shardproof estimate` computes it.

python scripts/make_sizing.py          # print them
python scripts/make_sizing.py --write  # put them into the page
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardproof.config.load import parse_recipe
from shardproof.rl.sizing.recipe import Machine, estimate_run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sizing.md"
BEGIN, END = "<!-- tables: scripts/make_sizing.py writes them -->\n", "<!-- end of tables -->\n"
GIB = 2**30
GPUS = (24, 48, 80, 141)
NUM_GPUS = (1, 2, 4, 8, 16)
ENGINES = ("embedded", "sharded")
PROMPT_TOKENS = 512


def dense(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    """A config like Qwen3's of these sizes."""
    return {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": tied,
    }  # fmt: skip


MODELS = {
    "0.6B": dense(1024, 3072, 28, 16, tied=True),
    "1.7B": dense(2048, 6144, 28, 16, tied=True),
    "4B": dense(2560, 9728, 36, 32, tied=True),
    "8B": dense(4096, 12288, 36, 32),
    "14B": dense(5120, 17408, 40, 40),
    "32B": dense(5120, 25600, 64, 64),
    "30B-A3B (experts)": dense(2048, 6144, 48, 32)
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4,
       "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
}  # fmt: skip
# What the tables assume, beside the defaults of the settings.
ASSUMED: dict[str, Any] = {
    "data": {"train": "prompts.jsonl", "max_prompt_tokens": PROMPT_TOKENS},
    "reward": {"functions": [{"name": "numeric"}]},
    "rollout": {"group_size": 8, "max_new_tokens": 1024, "batch_size": 64, "sleep": True},
    "train": {"steps": 1, "prompts_per_step": 128, "micro_batch_tokens": 8192},
    "output": {"folder": "runs/sizing"},
}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, cpu_offload": {"cpu_offload": True},
    "LoRA": {
        "lora": {"r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "param_dtype": "bfloat16",
    },
}


def peak(folder: Path, way: dict[str, Any], engine: str, ranks: int) -> float:
    """GiB that the fullest rank holds on its GPU."""
    model = {"path": str(folder), "random_init": True, "checkpoint_activations": True, **way}
    rollout = {**ASSUMED["rollout"], "engine": engine, "sleep": engine == "embedded"}
    recipe = parse_recipe({**ASSUMED, "model": model, "rollout": rollout}, "sizing")
    machine = Machine(min(ranks, 8), max(ranks // 8, 1), gpu_bytes=80 * GIB)
    return estimate_run(recipe, machine, [PROMPT_TOKENS]).device_bytes / GIB


def smallest(gib: float) -> str:
    """The peak, and the smallest GPU whose usable memory holds it."""
    gpu = next((size for size in GPUS if gib <= 0.9 * size), None)
    return f"{gib:.0f}" + (f" ({gpu})" if gpu else " (none)")


def tables() -> str:
    """One table per way of training."""
    found: dict[str, list[str]] = {f"{name}, {engine} engine": [] for name in WAYS for engine in ENGINES}
    for model, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            for name, way in WAYS.items():
                for engine in ENGINES:
                    cells = [smallest(peak(Path(folder), way, engine, ranks)) for ranks in NUM_GPUS]
                    found[f"{name}, {engine} engine"].append(f"| {model} | " + " | ".join(cells) + " |")
    head = "| model | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in NUM_GPUS) + " |\n"
    head += "| --- |" + " ---: |" * len(NUM_GPUS) + "\n"
    return "\n".join(f"### {title}\n\n{head}" + "\n".join(rows) + "\n" for title, rows in found.items())


def main() -> None:
    found = tables()
    if "--write" not in sys.argv:
        print(found)
        return
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}")


if __name__ == "__main__":
    main()
