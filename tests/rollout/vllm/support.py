"""What the vLLM tests run on ranks: load a policy, connect it to a server, change it, sync it."""

from __future__ import annotations

from typing import Any

import torch

import shardproof as sp
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_engine import VllmEngine
from shardproof.rollout.vllm_server import VllmSettings

PROMPTS = [(1, 2, 3, 4), (9, 8, 7), (100, 50, 25, 12, 6)]
SAMPLING = Sampling(6, temperature=0.7, top_p=0.9, stop_ids=(7,))
SHORT = {"max_model_len": 128, "sync_timeout_s": 30.0, "request_timeout_s": 60.0, "start_timeout_s": 240.0}


def load_policy(source: str | sp.RandomInit, dtype: str = "float32", **options: Any) -> Any:
    return sp.load(source, device="cpu", compute_dtype=getattr(torch, dtype), **options)


def connect(policy: Any, **settings: Any) -> VllmEngine:
    """An engine; without a url it starts a server of its own."""
    mode = "server" if "url" in settings else "colocated"
    return VllmEngine(policy, VllmSettings(**{"mode": mode, **SHORT, **settings}))


def sync(engine: VllmEngine) -> Any:
    return engine.load_weights(sp.WeightStream(engine.policy, engine.policy.settings.compute_dtype))


@torch.no_grad()
def change(policy: Any, factor: float = 1.3) -> None:
    """Move every matrix as an update would, and count it as one."""
    for _, param in policy.named_parameters():
        if param.ndim > 1 and param.requires_grad:
            param.mul_(factor)
    policy.version += 1
    policy.num_updates += 1


def ask(num: int = 6) -> list[Request]:
    return [Request(Trajectory.of_prompt(PROMPTS[k % 3]), seed=k) for k in range(num)]


def sample(engine: VllmEngine, num: int = 6) -> list[Any]:
    return generate(engine, ask(num), SAMPLING)


def failure(action: Any, *args: Any) -> str:
    """The message of the error that an action must end in."""
    try:
        action(*args)
    except sp.ShardproofError as error:
        return str(error)
    raise AssertionError("no error was raised")


def worst(engine: VllmEngine, completions: list[Any]) -> float:
    """The largest difference between the engine's log-probs and the trainer's of the same tokens."""
    sequences = [list(c.tokens) for c in completions]
    scored = sp.logprobs(engine.policy, sequences, SAMPLING.temperature)
    gaps = []
    for k, (c, row) in enumerate(zip(completions, scored, strict=True)):
        mine = row[len(PROMPTS[k % 3]) - 1 :]
        gaps.append(float((mine - torch.tensor(c.sampled[-1].logprobs)).abs().max()))
    return max(gaps)
