"""Environments: what answers the policy's turns, and the conversation that follows.

Earlier tokens are never produced again from text: each turn is appended to the tokens that are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist

from shardproof.config.schema import Environment as EnvironmentSettings
from shardproof.dist.collectives import exchange, raise_together
from shardproof.errors import fail
from shardproof.findings import Finding
from shardproof.rl.templates import panics_as_errors
from shardproof.rollout.engine import Engine, Request, Sampling, answers
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.user_code import describe_error, import_named


class Environment(Protocol):
    """Answers the policy. It is made once per rank, and asked from one thread."""

    def reply(self, row: Mapping[str, Any], turns: Sequence[str]) -> str | None:
        """The answer to the last of the policy's turns in a conversation about a data row; None: it is over.

        `row` is a copy. Turns are without the token that ended them, as completions are for rewards.
        """
        ...


def make_conversation(
    settings: EnvironmentSettings | None, tokenizer: Any, max_tokens: int | None
) -> Conversation | None:
    """The conversation that a recipe asks for: `environment.name` stands for a class, or a function, that makes one."""
    if settings is None:
        return None
    make = import_named("environment", settings.name)
    try:
        environment = make()
    except (Exception, SystemExit) as error:  # the user's code
        message = f"environment {settings.name!r} cannot be created: {describe_error(error)}"
        raise fail("C001", "rollout", message, fix="make it callable without arguments") from error
    if not callable(getattr(environment, "reply", None)):
        message = f"environment {settings.name!r} returned a {type(environment).__name__}, which has no reply(row, turns)."
        raise fail(
            "C001", "rollout", message, fix="give it a method reply(row, turns); see docs/extending.md"
        )
    return Conversation(environment, tokenizer, settings.max_turns, max_tokens)


@dataclass(frozen=True)
class Conversation:
    """An environment, how its answers become tokens, and how long a conversation may get."""

    environment: Environment
    tokenizer: Any
    max_turns: int
    max_tokens: int | None  # of a whole trajectory; None: the model has no limit

    def turns(
        self,
        engine: Engine,
        requests: Sequence[Request],
        rows: Sequence[Mapping[str, Any]],
        sampling: Sampling,
    ) -> Iterator[list[tuple[int, Trajectory]]]:
        """(place in `requests`, trajectory) of the conversations that are over, as they come.

        An environment that raises ends the run, on every rank, once the turn is over. Collective: every rank.
        """
        going = dict(enumerate(requests))
        problems: list[Finding] = []
        for turn in range(1, self.max_turns + 1):
            places = list(going)
            for ready in answers(engine, list(going.values()), sampling):
                over = []
                for k, trajectory in ready:
                    place = places[k]
                    request = going.pop(place)
                    reply = None
                    if turn < self.max_turns and trajectory.finished:
                        reply = self._reply(rows[place], trajectory, problems)
                    extended = trajectory if reply is None else trajectory.extended(reply)
                    if reply is not None and self._has_room(extended, sampling):
                        # Another seed per turn: with the same one, every turn would draw the same numbers.
                        going[place] = replace(request, trajectory=extended, seed=request.seed ^ turn)
                    else:
                        over.append((place, trajectory))
                yield over
            raise_together(problems)
            if not any(exchange(len(going))):
                return

    def _has_room(self, trajectory: Trajectory, sampling: Sampling) -> bool:
        needed = len(trajectory.tokens) + sampling.max_new_tokens
        return self.max_tokens is None or needed <= self.max_tokens

    def _reply(
        self, row: Mapping[str, Any], trajectory: Trajectory, problems: list[Finding]
    ) -> Segment | None:
        """The environment's answer as tokens; None where the conversation is over, or the environment raised."""
        try:
            with panics_as_errors():
                said = [s.tokens[:-1] for s in trajectory.sampled]
                turns = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in said]
                # A copy: rewards read the row as well, and so do later conversations about it.
                answer = self.environment.reply(deepcopy(row), turns)
                if answer is None:
                    return None
                if not isinstance(answer, str):
                    raise TypeError(f"the reply is {type(answer).__name__}, expected str or None")
                tokens = self.tokenizer.encode(answer, add_special_tokens=False)
        except (Exception, SystemExit) as error:  # the user's code
            message = f"the environment failed: {describe_error(error)}"
            problems.append(Finding("R500", "rollout", message, rank=dist.get_rank()))
            return None
        return Segment(tuple(tokens), "environment") if tokens else None
