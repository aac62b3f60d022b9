"""Runs whose engine answers in the background, when the test says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardproof.config.load import from_json
from shardproof.export.manifest import ExportReceipt
from shardproof.export.stream import WeightStream
from shardproof.rl.same_run import Resume
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.local import EmbeddedEngine
from tests.rl.background_engine import Asked, FakeEngine
from tests.rl.runs import small_recipe

ENGINE = "tests.rl.background_runs:HeldEngine"
SETTINGS = (f"rollout.engine={ENGINE}", "output.eval_every=0", "output.save_model=false", "train.steps=5")


class HeldEngine(EmbeddedEngine):
    """Takes weights and answers canaries as the embedded engine does; what is asked in the background is held or drawn.

    Of each `every` groups the first one's first completion is slow: one token is drawn at once, and the rest after
    `syncs` more syncs. The others, the first `fast` requests of a rank and what is asked in the last step, are answered
    at once.
    """

    every, syncs, fast, last, fails = 0, 1, 0, 5, False

    def __init__(self, policy: Any, rollout: Any):
        super().__init__(policy, rollout.batch_size, rollout.cache_gib)
        self.fake = FakeEngine(low=2, high=13, held=True, version=-1)
        self.slow: list[tuple[int, Asked]] = []
        self.begun: list[int] = []  # tokens that requests came with
        self.num_syncs = self.num_checks = 0
        engines.append(self)

    def start(self, request: Request, sampling: Sampling) -> Asked:
        asked = self.fake.start(request, sampling)
        made = request.trajectory
        self.begun += [] if request.begun is None else [len(request.begun.tokens)]
        if self.fails and dist.get_rank() == 1 and made.group == 1 and self.num_syncs == 2:
            self.fake.fail(asked, OSError("the wire is cut"))
        elif self._is_slow(made.group, made.sample):
            self.fake.draw(asked, 1)
            self.slow.append((self.num_syncs + self.syncs, asked))
        else:
            self.fake.answer(asked)
        return asked

    def _is_slow(self, group: int, sample: int) -> bool:
        if not self.every or self.num_syncs >= self.last or self.fake.num_started <= self.fast:
            return False
        return group % self.every == 0 and sample == 0

    def load_weights(self, stream: WeightStream) -> ExportReceipt:
        receipt = super().load_weights(stream)
        self.fake.version = self.version
        self.num_syncs += 1
        for when, asked in self.slow:
            if when == self.num_syncs and not asked.future.done():
                self.fake.answer(asked)
        return receipt

    def check_drawn(self) -> None:
        self.num_checks += 1

    def activity(self) -> dict[str, float]:
        return {"time/engine_idle": 0.25 * (1 + dist.get_rank()), "ahead/in_flight": 7.0}


engines: list[HeldEngine] = []


def recipe_of(folder: Path, ahead: int, *overrides: str) -> str:
    return small_recipe(folder, *SETTINGS, f"rollout.ahead={ahead}", *overrides)


def run_and_note(recipe: str, how: dict[str, Any] | None = None, end: int | None = None) -> dict[str, Any]:
    """What each step of a run trained on, its metrics, and what the engine noticed.

    `how` are the engine's settings, and `end` is a step that raises.
    """
    from shardproof.rl import loop

    collect, steps, found = loop.collect, [], []

    def note(*given: Any, step: int, **settings: Any) -> Any:
        if step == end:
            raise RuntimeError("the test ends the run")
        experience = collect(*given, step=step, **settings)
        made = experience.trajectories
        steps.append(
            [(t.facts["prompt"], t.group, t.sample, t.facts["drawn_for"], t.sampled[0].parts) for t in made]
        )
        found.append(experience.metrics)
        return experience

    engines.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", note)
        for name, value in (how or {}).items():
            patch.setattr(HeldEngine, name, value)
        try:
            loop.train(from_json(recipe), resume=Resume())
        except RuntimeError as error:
            if str(error) != "the test ends the run":
                raise
    (engine,) = engines
    return {
        "steps": steps,
        "metrics": found,
        "started": engine.fake.num_started,
        "begun": engine.begun,
        "checks": engine.num_checks,
    }


def prompts_of(*ranks: dict[str, Any]) -> list[list[str]]:
    """Each step's prompts, in the order of the batch."""
    steps = []
    for parts in zip(*(rank["steps"] for rank in ranks), strict=True):
        by_group = {group: prompt for part in parts for prompt, group, *_ in part}
        steps.append([by_group[group] for group in sorted(by_group)])
    return steps
